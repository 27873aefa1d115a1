// SPDX-License-Identifier: Apache-2.0
// Micro-batches of a text file, prepared by a background thread while the
// device computes. The file is read in place (pread), never whole, and a file
// that is cut short meanwhile is an error, not a crash.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/job.h"
#include "worker/data/sampler.h"

namespace ballast {

// Both (micro_batch_size, context), row-major; targets are the next bytes.
struct MicroBatch {
  std::vector<uint32_t> ids;
  std::vector<uint32_t> targets;
};

// Names one micro-batch: of a training step (from 1), or of an evaluation,
// where `step` has no meaning and is 0.
struct BatchName {
  uint64_t step = 0;
  uint32_t micro_batch = 0;
  bool eval = false;
  friend bool operator==(const BatchName&, const BatchName&) = default;
};

// Thread-safe.
class Loader {
 public:
  // Opens job.data.path and starts the thread.
  //
  // Errors (each names data.path):
  //   NOT_FOUND          there is no such file.
  //   INVALID_ARGUMENT   not a file, empty, or too short for the job.
  //   PERMISSION_DENIED  it cannot be read.
  static absl::StatusOr<std::unique_ptr<Loader>> Open(const Job& job);
  // Ends the thread; no call may be in progress.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // What will be taken next, in this order; replaces what was announced and
  // not taken. Only the first kAheadMax not yet taken are held ready.
  void Announce(absl::Span<const BatchName> next);

  // Waits for the micro-batch if the thread has it in hand, and reads it here
  // if it was not announced.
  //
  // Errors:
  //   INVALID_ARGUMENT     a byte is not below model.vocabulary.
  //   FAILED_PRECONDITION  the file is shorter than it was, or unreadable.
  absl::StatusOr<MicroBatch> Take(const BatchName& name);

  const Sampler& sampler() const;

  static constexpr uint32_t kAheadMax = 16;

 private:
  class Impl;
  explicit Loader(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ballast
