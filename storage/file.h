// SPDX-License-Identifier: Apache-2.0
// Small helpers around POSIX files that everything durable is made of: owned
// descriptors, page-aligned memory, whole-file reads, atomic replacement and
// preallocation, each with errors that name the path.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/round_up.h"

namespace ballast {

// Owns a file descriptor. Thread-compatible.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Zeroed memory that starts on a 4 KiB boundary, as O_DIRECT wants it.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(uint64_t bytes);
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  uint64_t size() const { return size_; }
  absl::Span<std::byte> span() { return {data_.get(), size_}; }
  absl::Span<const std::byte> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  uint64_t size_ = 0;
};

// An open file and its name for messages.
struct StorageFile {
  UniqueFd fd;
  std::string path;
  bool direct = false;  // O_DIRECT.
};

// "<what>: <text of errno>". ENOSPC and EDQUOT are RESOURCE_EXHAUSTED, EIO is
// DATA_LOSS, ENOENT is NOT_FOUND, a refusal is FAILED_PRECONDITION.
absl::Status ErrnoError(int error, absl::string_view what);

// Opens for reading and writing with O_DIRECT, created when `create`. A file
// system without O_DIRECT gives a buffered file and one warning,
// `direct_io_unavailable`.
absl::StatusOr<StorageFile> OpenDirect(const std::string& path, bool create);
// Opens read-only, buffered.
absl::StatusOr<StorageFile> OpenForRead(const std::string& path);

absl::StatusOr<uint64_t> FileBytes(const StorageFile& file);

// Gives bytes [from, to) of the file blocks on the disk; the file is at least
// `from` long before, and what lies behind counts for nothing, and at least
// `to` long after. On failure it is `from` long.
// Errors: RESOURCE_EXHAUSTED  the disk is full (path and bytes named).
absl::Status Preallocate(const StorageFile& file, uint64_t from, uint64_t to);

// Reads exactly out.size() bytes. Errors: DATA_LOSS  the file ends before.
absl::Status ReadFully(const StorageFile& file, uint64_t offset,
                       absl::Span<std::byte> out);

// Errors: NOT_FOUND; DATA_LOSS  longer than `bytes_max`, or unreadable.
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t bytes_max);
// Writes everything at the descriptor's position.
absl::Status WriteFully(const StorageFile& file, absl::string_view bytes);
// Replaces `path` as a whole or not at all, durable on return: temporary name
// beside it ("<path>.tmp"), fsync, rename, fsync of the folder.
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view bytes);

// Creates the folder and its parents, durable on return.
absl::Status MakeDirectories(const std::string& path);
absl::Status SyncDirectory(const std::string& path);
// The folder part; "." when there is none.
std::string ParentDirectory(const std::string& path);

}  // namespace ballast
