// SPDX-License-Identifier: Apache-2.0
#include "storage/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "storage/record.h"

namespace ballast {

UniqueFd::~UniqueFd() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

AlignedBuffer::AlignedBuffer(uint64_t bytes)
    : data_(static_cast<std::byte*>(
          std::aligned_alloc(kPageBytes, RoundUp(bytes, kPageBytes)))),
      size_(bytes) {
  BALLAST_CHECK(data_ != nullptr);
  std::memset(data_.get(), 0, RoundUp(bytes, kPageBytes));
}

void AlignedBuffer::Free::operator()(std::byte* data) const { std::free(data); }

absl::Status ErrnoError(int error, absl::string_view what) {
  const std::string text =
      absl::StrCat(what, ": ", std::generic_category().message(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
      return absl::ResourceExhaustedError(text);
    case EIO:
      return absl::DataLossError(text);
    case ENOENT:
      return absl::NotFoundError(text);
    case EEXIST:
      return absl::AlreadyExistsError(text);
    case EACCES:
    case EPERM:
    case EROFS:
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
      return absl::FailedPreconditionError(text);
    default:
      return absl::InternalError(text);
  }
}

absl::StatusOr<StorageFile> OpenDirect(const std::string& path, bool create) {
  const int flags = O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0);
  StorageFile file;
  file.path = path;
  file.direct = true;
  file.fd = UniqueFd(open(path.c_str(), flags | O_DIRECT, 0644));
  if (!file.fd.valid() && errno == EINVAL) {
    file.direct = false;
    file.fd = UniqueFd(open(path.c_str(), flags, 0644));
    LogEvent(Severity::kWarn, "direct_io_unavailable", {{"path", path}});
  }
  if (!file.fd.valid()) {
    return ErrnoError(errno, absl::StrCat("cannot open ", path));
  }
  return file;
}

absl::StatusOr<StorageFile> OpenForRead(const std::string& path) {
  StorageFile file;
  file.path = path;
  file.fd = UniqueFd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.fd.valid()) {
    return ErrnoError(errno, absl::StrCat("cannot open ", path));
  }
  return file;
}

absl::StatusOr<uint64_t> FileBytes(const StorageFile& file) {
  struct stat info = {};
  if (fstat(file.fd.get(), &info) != 0) {
    return ErrnoError(errno, absl::StrCat("cannot stat ", file.path));
  }
  return static_cast<uint64_t>(info.st_size);
}

absl::Status Preallocate(const StorageFile& file, uint64_t from, uint64_t to) {
  const int error = posix_fallocate(file.fd.get(), static_cast<off_t>(from),
                                    static_cast<off_t>(to - from));
  if (error == 0) {
    return absl::OkStatus();
  }
  // A failed call may have taken some blocks already: give them back.
  if (ftruncate(file.fd.get(), static_cast<off_t>(from)) != 0) {
    LogEvent(Severity::kWarn, "cannot_trim_file", {{"path", file.path}});
  }
  return ErrnoError(error, absl::StrCat("cannot give ", file.path, " another ",
                                        to - from, " bytes after ", from));
}

absl::Status ReadFully(const StorageFile& file, uint64_t offset,
                       absl::Span<std::byte> out) {
  uint64_t done = 0;
  while (done < out.size()) {
    const ssize_t got =
        pread(file.fd.get(), out.data() + done, out.size() - done,
              static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      return ErrnoError(errno, absl::StrCat("cannot read ", file.path));
    }
    if (got == 0) {
      return absl::DataLossError(
          absl::StrCat(file.path, " ends at ", offset + done, "; want bytes [",
                       offset, ", ", offset + out.size(), ")"));
    }
    done += static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t bytes_max) {
  BALLAST_ASSIGN_OR_RETURN(const StorageFile file, OpenForRead(path));
  BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, FileBytes(file));
  if (bytes > bytes_max) {
    return absl::DataLossError(absl::StrCat(
        path, " is ", bytes, " bytes long; want at most ", bytes_max));
  }
  std::string text(bytes, '\0');
  BALLAST_RETURN_IF_ERROR(ReadFully(
      file, 0, {reinterpret_cast<std::byte*>(text.data()), text.size()}));
  return text;
}

absl::Status WriteFully(const StorageFile& file, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = write(file.fd.get(), bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) {
      continue;
    }
    if (put < 0) {
      return ErrnoError(errno, absl::StrCat("cannot write ", file.path));
    }
    bytes.remove_prefix(static_cast<size_t>(put));
  }
  return absl::OkStatus();
}

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view bytes) {
  StorageFile file;
  file.path = absl::StrCat(path, ".tmp");
  file.fd = UniqueFd(
      open(file.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file.fd.valid()) {
    return ErrnoError(errno, absl::StrCat("cannot create ", file.path));
  }
  absl::Status status = WriteFully(file, bytes);
  if (status.ok() && fsync(file.fd.get()) != 0) {
    status = ErrnoError(errno, absl::StrCat("cannot sync ", file.path));
  }
  if (status.ok() && rename(file.path.c_str(), path.c_str()) != 0) {
    status = ErrnoError(errno, absl::StrCat("cannot rename to ", path));
  }
  if (!status.ok()) {
    unlink(file.path.c_str());
    return status;
  }
  return SyncDirectory(ParentDirectory(path));
}

absl::Status MakeDirectories(const std::string& path) {
  struct stat info = {};
  const std::string parent = ParentDirectory(path);
  if (stat(path.c_str(), &info) == 0) {
    if (!S_ISDIR(info.st_mode)) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " is a file; want a folder"));
    }
    // Whoever made it may have been killed before its name was durable. Where
    // the parent may not be read, others made it, long ago.
    SyncDirectory(parent).IgnoreError();
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(MakeDirectories(parent));
  if (mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) {
    return ErrnoError(errno, absl::StrCat("cannot create ", path));
  }
  return SyncDirectory(parent);
}

absl::Status SyncDirectory(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid() || fsync(fd.get()) != 0) {
    return ErrnoError(errno, absl::StrCat("cannot sync folder ", path));
  }
  return absl::OkStatus();
}

std::string ParentDirectory(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  const size_t slash =
      end == std::string::npos ? end : path.find_last_of('/', end);
  if (slash == std::string::npos) {
    return path.empty() || path[0] != '/' ? "." : "/";
  }
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace ballast
