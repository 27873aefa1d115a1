// SPDX-License-Identifier: Apache-2.0
#include "storage/data_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

constexpr absl::string_view kTitle = "ballast data directory";
constexpr int kFormatVersion = 1;

std::string WithChecksum(const std::string& body) {
  return absl::StrCat(body, "checksum ", HashHex(HashBytes(body)), "\n");
}

std::string Identity(const Hash128& run) {
  return WithChecksum(absl::StrCat(kTitle, "\nformat_version ", kFormatVersion,
                                   "\nrun ", HashHex(run), "\n"));
}

// The value of the line "<key> <value>".
absl::string_view Line(absl::string_view text, absl::string_view key) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::ConsumePrefix(&line, key) && absl::ConsumePrefix(&line, " ")) {
      return line;
    }
  }
  return {};
}

absl::Status CheckIdentity(const std::string& path, const Hash128& run) {
  const std::string file = path + "/IDENTITY";
  absl::StatusOr<std::string> text = ReadFile(file, 4096);
  BALLAST_RETURN_IF_ERROR(text.status());
  if (*text == Identity(run)) {
    return absl::OkStatus();
  }
  const std::string body = text->substr(0, text->rfind("checksum "));
  if (!absl::StartsWith(body, kTitle) || *text != WithChecksum(body)) {
    return absl::DataLossError(absl::StrCat(file, " is damaged"));
  }
  const absl::string_view version = Line(*text, "format_version");
  if (version != absl::StrCat(kFormatVersion)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " has data directory format ", version, ", want ",
                     kFormatVersion, "; use the version that wrote it"));
  }
  return absl::FailedPreconditionError(
      absl::StrCat(path, " belongs to run ", Line(*text, "run"), ", want ",
                   HashHex(run), "; name another folder"));
}

// Refuses a folder that holds what is not ours.
absl::Status CheckNotForeign(const std::string& path) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    // A creation that was cut short leaves these two.
    if (name != "LOCK" && name != "IDENTITY.tmp") {
      return absl::FailedPreconditionError(
          absl::StrCat(path,
                       " is not a data directory and not empty (it holds "
                       "'",
                       name, "'); name an empty or a new folder"));
    }
  }
  if (error) {
    return ErrnoError(error.value(), absl::StrCat("cannot list ", path));
  }
  return absl::OkStatus();
}

bool Exists(const std::string& path) {
  struct stat info = {};
  return stat(path.c_str(), &info) == 0;
}

absl::StatusOr<UniqueFd> TakeLock(const std::string& path,
                                  const std::string& owner) {
  StorageFile file;
  file.path = path + "/LOCK";
  file.fd =
      UniqueFd(open(file.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!file.fd.valid()) {
    return ErrnoError(errno, absl::StrCat("cannot open ", file.path));
  }
  if (flock(file.fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {
      return ErrnoError(errno, absl::StrCat("cannot lock ", file.path));
    }
    std::string holder = ReadFile(file.path, 4096).value_or("");
    absl::StripTrailingAsciiWhitespace(&holder);
    return absl::FailedPreconditionError(absl::StrCat(
        path, " is in use by ", holder.empty() ? "another process" : holder,
        "; stop it or name another folder"));
  }
  if (ftruncate(file.fd.get(), 0) != 0) {
    return ErrnoError(errno, absl::StrCat("cannot write ", file.path));
  }
  BALLAST_RETURN_IF_ERROR(WriteFully(file, absl::StrCat(owner, "\n")));
  return std::move(file.fd);
}

}  // namespace

absl::StatusOr<DataDirectory> DataDirectory::Open(const std::string& path,
                                                  const Hash128& run,
                                                  const std::string& owner) {
  BALLAST_RETURN_IF_ERROR(MakeDirectories(path));
  const std::string identity = path + "/IDENTITY";
  if (Exists(identity)) {
    BALLAST_RETURN_IF_ERROR(CheckIdentity(path, run));
  } else {
    BALLAST_RETURN_IF_ERROR(CheckNotForeign(path));
  }
  BALLAST_ASSIGN_OR_RETURN(UniqueFd lock, TakeLock(path, owner));
  // Again under the lock: two processes may have found an empty folder.
  if (Exists(identity)) {
    BALLAST_RETURN_IF_ERROR(CheckIdentity(path, run));
  } else {
    BALLAST_RETURN_IF_ERROR(WriteFileAtomically(identity, Identity(run)));
  }
  return DataDirectory(std::move(lock));
}

}  // namespace ballast
