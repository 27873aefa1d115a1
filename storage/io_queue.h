// SPDX-License-Identifier: Apache-2.0
// Asynchronous reads and writes of files: one thread that feeds an io_uring,
// reaps it and runs the completions. Where the kernel refuses a ring (seccomp,
// old kernels) the same thread uses pread and pwrite, after one warning,
// `io_uring_unavailable`.
//
// The I/O thread also submits, rather than the caller: a request belongs to the
// thread that submits it and would be cancelled when that thread exits.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/file.h"

namespace ballast {

struct IoRequest {
  bool write = false;
  // Must outlive the request.
  const StorageFile* file = nullptr;
  uint64_t offset = 0;        // A multiple of 4 KiB, as are `bytes` and `data`.
  std::byte* data = nullptr;  // Valid until `done`; a write only reads it.
  uint64_t bytes = 0;         // 0: only runs `done`.
  // Runs on the I/O thread, must not block, may submit.
  // Errors: DATA_LOSS           EIO, or the file ends before.
  //         RESOURCE_EXHAUSTED  the disk is full.
  std::function<void(absl::Status)> done;
};

// Thread-safe.
class IoQueue {
 public:
  struct Options {
    // Requests given to the kernel at once; more wait in order. 1 to 1024.
    uint32_t depth = 16;
    bool use_io_uring = true;
  };

  static absl::StatusOr<std::unique_ptr<IoQueue>> Start(const Options& options);
  // Finishes everything that was submitted, completions included.
  virtual ~IoQueue() = default;

  virtual void Submit(IoRequest request) = 0;
};

}  // namespace ballast
