// SPDX-License-Identifier: Apache-2.0
// What the parts of PosixDisk share: its files, and the queue that moves their
// bytes. Others include storage/disk.h.

#pragma once

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/disk.h"
#include "storage/file.h"

namespace ballast {

class PosixFile final : public DiskFile {
 public:
  explicit PosixFile(StorageFile file)
      : DiskFile(file.path), file_(std::move(file)) {}
  int fd() const { return file_.fd.get(); }

  bool direct() const override { return file_.direct; }
  absl::StatusOr<uint64_t> Bytes() const override;
  absl::Status Preallocate(uint64_t from, uint64_t to) override;
  absl::Status Read(uint64_t offset, absl::Span<std::byte> out) const override;
  absl::Status Sync() override;

 private:
  const StorageFile file_;  // Its path stays the one it was opened by.
};

// One thread that feeds an io_uring, reaps it and runs the completions. Where
// the kernel refuses a ring (seccomp, old kernels) the same thread uses pread,
// pwrite and fdatasync, after one warning, `io_uring_unavailable`.
//
// The I/O thread also submits, rather than the caller: a request belongs to the
// thread that submits it and would be cancelled when that thread exits.
absl::StatusOr<std::unique_ptr<IoQueue>> StartUringQueue(
    const IoQueue::Options& options);

}  // namespace ballast
