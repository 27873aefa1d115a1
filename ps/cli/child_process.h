// SPDX-License-Identifier: Apache-2.0
// One process that the launcher started: in its own session, so that a Ctrl-C
// at the terminal reaches the launcher alone; its output in a log file.

#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ps/cli/keeper.h"

namespace ballast {

// Thread-compatible. Whoever destroys it ends the process: nothing is left.
class ChildProcess {
 public:
  struct Options {
    std::string name;                // For messages: "server-1".
    std::vector<std::string> argv;   // argv[0] is the path of the binary.
    std::string log_path;            // Appended to: standard output and error.
    std::vector<int> keep_fds = {};  // Stay open in the child.
    // Told of its birth, it ends the child when the launcher is killed. Without
    // one the child gets a SIGTERM then.
    const Keeper* keeper = nullptr;
    bool coordinator = false;  // For the keeper.
  };

  // Errors: NOT_FOUND  no such binary; FAILED_PRECONDITION  the log cannot be
  //         written, or the system refuses another process.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(
      const Options& options);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // Whether it has ended; reaps it then. Does not block.
  bool Ended();
  void Signal(int number);

  const std::string& name() const { return options_.name; }
  const std::string& log_path() const { return options_.log_path; }
  pid_t pid() const { return pid_; }
  // Of an ended process: its exit code, or -1 when a signal ended it, and that
  // signal, or 0.
  int exit_code() const;
  int signal() const;
  // "exited with code 1", "was killed by signal 9 (Killed)".
  std::string Ending() const;

 private:
  ChildProcess(Options options, pid_t pid)
      : options_(std::move(options)), pid_(pid) {}

  const Options options_;
  const pid_t pid_;
  bool ended_ = false;
  int wait_status_ = 0;
};

}  // namespace ballast
