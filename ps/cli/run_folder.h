// SPDX-License-Identifier: Apache-2.0
// The run folder as the launcher sees it: who may use it, and what it leaves
// there. Nothing in it is ever wiped.

#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/job_file.h"

namespace ballast {

// Holds the lock of a run folder while it lives: one launcher at a time.
class LockedRunFolder {
 public:
  // Makes the folder when it is not there, locks it, and writes the effective
  // configuration to config.yaml. `job_path` is for messages.
  //
  // Errors:
  //   FAILED_PRECONDITION  it holds a run and not `resume`; none and `resume`;
  //   another launcher has it; it
  //                        cannot be made or written.
  //   INVALID_ARGUMENT     resuming with other numerics: names the first field
  //                        that differs, both values and both hashes.
  static absl::StatusOr<LockedRunFolder> Open(const JobFile& file, bool resume,
                                              const std::string& job_path);
  LockedRunFolder(LockedRunFolder&& other) noexcept;
  LockedRunFolder& operator=(LockedRunFolder&&) = delete;
  ~LockedRunFolder();

  const std::string& path() const { return path_; }
  // Whoever has it open, a copy too, holds the lock.
  int lock_fd() const { return lock_fd_; }
  std::string config_path() const { return path_ + "/config.yaml"; }
  std::string log_path(const std::string& name) const {
    return path_ + "/logs/" + name + ".log";
  }
  std::string checkpoints_path() const { return path_ + "/checkpoints"; }

 private:
  LockedRunFolder(std::string path, int lock_fd)
      : path_(std::move(path)), lock_fd_(lock_fd) {}

  std::string path_;
  int lock_fd_;
};

// Whether run.dir or server.data_dir holds what only a run that got as far as
// its servers leaves: steps, checkpoints or records.
bool HoldsRun(const Job& job);

// What can be said of data.path before anything starts.
// Errors: INVALID_ARGUMENT  not there, not a file, empty, or shorter than a
//         sequence.
absl::Status CheckText(const Job& job);

// What data.hash is for the text in data.path, 32 hex digits.
// Errors: FAILED_PRECONDITION  it cannot be read; INVALID_ARGUMENT  data.hash
//         asks for another text.
absl::StatusOr<std::string> HashText(const Job& job);

// The last `count` lines of a file, each after two spaces; empty when it cannot
// be read.
std::string LastLines(const std::string& path, int count);

// Why the process that wrote a log ended, in its own words: the last line that
// is a complaint ("ballast-ps: ...") or an error event with a reason. Empty
// when there is none.
std::string LastComplaint(const std::string& path);

}  // namespace ballast
