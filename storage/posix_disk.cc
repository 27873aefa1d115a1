// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/status_macros.h"
#include "storage/disk.h"
#include "storage/file.h"
#include "storage/posix_file.h"
#include "storage/state_store.h"

namespace ballast {
namespace {

class PosixLock final : public DiskLock {
 public:
  explicit PosixLock(UniqueFd fd) : fd_(std::move(fd)) {}

 private:
  const UniqueFd fd_;
};

absl::StatusOr<std::unique_ptr<DiskFile>> Owned(
    absl::StatusOr<StorageFile> file) {
  BALLAST_RETURN_IF_ERROR(file.status());
  return std::unique_ptr<DiskFile>(
      std::make_unique<PosixFile>(*std::move(file)));
}

// Transfers of a killed process end some time after it, and after its lock on
// the directory is gone. They hold the file open, and with it this lock: once
// it is ours, nothing of theirs can land on what we write.
constexpr absl::Duration kFormerOwnerWait = absl::Seconds(10);

absl::Status OutwaitFormerOwner(const StorageFile& file) {
  const absl::Time give_up = absl::Now() + kFormerOwnerWait;
  while (flock(file.fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {
      return absl::OkStatus();  // A file system without such locks.
    }
    if (absl::Now() > give_up) {
      return absl::FailedPreconditionError(absl::StrCat(
          file.path, " is still being written for another process after ",
          absl::FormatDuration(kFormerOwnerWait), "; stop it, then try again"));
    }
    absl::SleepFor(absl::Milliseconds(1));
  }
  return absl::OkStatus();
}

class PosixDiskImpl final : public Disk {
 public:
  absl::StatusOr<std::unique_ptr<DiskFile>> OpenDirect(const std::string& path,
                                                       bool create) override {
    BALLAST_ASSIGN_OR_RETURN(StorageFile file,
                             ballast::OpenDirect(path, create));
    BALLAST_RETURN_IF_ERROR(OutwaitFormerOwner(file));
    return Owned(std::move(file));
  }
  absl::StatusOr<std::unique_ptr<DiskFile>> OpenForRead(
      const std::string& path) override {
    return Owned(ballast::OpenForRead(path));
  }
  bool Exists(const std::string& path) override {
    struct stat info = {};
    return stat(path.c_str(), &info) == 0;
  }
  absl::StatusOr<std::string> ReadFile(const std::string& path,
                                       uint64_t bytes_max) override {
    return ballast::ReadFile(path, bytes_max);
  }
  absl::Status ReplaceFile(const std::string& path,
                           absl::string_view bytes) override {
    return WriteFileAtomically(path, bytes);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) != 0) {
      return ErrnoError(errno,
                        absl::StrCat("cannot rename ", from, " to ", to));
    }
    return absl::OkStatus();
  }
  absl::Status Unlink(const std::string& path) override {
    if (unlink(path.c_str()) != 0) {
      return ErrnoError(errno, absl::StrCat("cannot remove ", path));
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<std::string>> List(
      const std::string& path) override;
  absl::Status MakeDirectories(const std::string& path) override {
    return ballast::MakeDirectories(path);
  }
  absl::Status SyncDirectory(const std::string& path) override {
    return ballast::SyncDirectory(path);
  }
  absl::StatusOr<std::unique_ptr<DiskLock>> Lock(
      const std::string& path, const std::string& owner) override;
  absl::StatusOr<std::unique_ptr<IoQueue>> StartQueue(
      const IoQueue::Options& options) override {
    return StartUringQueue(options);
  }
  absl::StatusOr<std::unique_ptr<StateStore>> OpenStateStore(
      const std::string& dir, const EmbeddedStoreOptions& options) override {
    return OpenEmbeddedStateStore(dir, options);
  }
};

absl::StatusOr<std::vector<std::string>> PosixDiskImpl::List(
    const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(path, error);
       !error && it != std::filesystem::directory_iterator();
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error) {
    return ErrnoError(error.value(), absl::StrCat("cannot list ", path));
  }
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<std::unique_ptr<DiskLock>> PosixDiskImpl::Lock(
    const std::string& path, const std::string& owner) {
  StorageFile file;
  file.path = path;
  file.fd = UniqueFd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!file.fd.valid()) {
    return ErrnoError(errno, absl::StrCat("cannot open ", path));
  }
  if (flock(file.fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {
      return ErrnoError(errno, absl::StrCat("cannot lock ", path));
    }
    std::string holder = ballast::ReadFile(path, 4096).value_or("");
    absl::StripTrailingAsciiWhitespace(&holder);
    return absl::AbortedError(holder.empty() ? "another process" : holder);
  }
  if (ftruncate(file.fd.get(), 0) != 0) {
    return ErrnoError(errno, absl::StrCat("cannot write ", path));
  }
  BALLAST_RETURN_IF_ERROR(WriteFully(file, absl::StrCat(owner, "\n")));
  return std::unique_ptr<DiskLock>(
      std::make_unique<PosixLock>(std::move(file.fd)));
}

}  // namespace

absl::StatusOr<uint64_t> PosixFile::Bytes() const { return FileBytes(file_); }

absl::Status PosixFile::Preallocate(uint64_t from, uint64_t to) {
  return ballast::Preallocate(file_, from, to);
}

absl::Status PosixFile::Read(uint64_t offset, absl::Span<std::byte> out) const {
  return ReadFully(file_, offset, out);
}

absl::Status PosixFile::Sync() {
  if (fdatasync(fd()) == 0) {
    return absl::OkStatus();
  }
  return absl::DataLossError(
      ErrnoError(errno, absl::StrCat("cannot sync ", path())).message());
}

Disk* PosixDisk() {
  static PosixDiskImpl disk;
  return &disk;
}

}  // namespace ballast
