// SPDX-License-Identifier: Apache-2.0
#include "storage/data_dir.h"

#include <vector>

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

// The run that a whole IDENTITY names.
absl::StatusOr<Hash128> ReadIdentity(Disk* disk, const std::string& path) {
  const std::string file = path + "/IDENTITY";
  BALLAST_ASSIGN_OR_RETURN(const std::string text, disk->ReadFile(file, 4096));
  const std::string body = text.substr(0, text.rfind("checksum "));
  if (!absl::StartsWith(body, kTitle) || text != WithChecksum(body)) {
    return absl::DataLossError(absl::StrCat(file, " is damaged"));
  }
  const absl::string_view version = Line(text, "format_version");
  if (version != absl::StrCat(kFormatVersion)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " has data directory format ", version, ", want ",
                     kFormatVersion, "; use the version that wrote it"));
  }
  const std::optional<Hash128> run = ParseHashHex(Line(text, "run"));
  if (!run) {
    return absl::DataLossError(absl::StrCat(file, " names no run"));
  }
  return *run;
}

absl::Status CheckIdentity(Disk* disk, const std::string& path,
                           const Hash128& run) {
  BALLAST_ASSIGN_OR_RETURN(const Hash128 found, ReadIdentity(disk, path));
  if (found == run) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat(path, " belongs to run ", HashHex(found), ", want ",
                   HashHex(run), "; name another folder"));
}

// Refuses a folder that holds what is not ours.
absl::Status CheckNotForeign(Disk* disk, const std::string& path) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           disk->List(path));
  for (const std::string& name : names) {
    // A creation that was cut short leaves these two.
    if (name != "LOCK" && name != "IDENTITY.tmp") {
      return absl::FailedPreconditionError(
          absl::StrCat(path,
                       " is not a data directory and not empty (it holds "
                       "'",
                       name, "'); name an empty or a new folder"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::optional<Hash128>> ReadDataDirectoryRun(
    Disk* disk, const std::string& path) {
  if (!disk->Exists(path + "/IDENTITY")) {
    return std::nullopt;
  }
  BALLAST_ASSIGN_OR_RETURN(const Hash128 run, ReadIdentity(disk, path));
  return run;
}

absl::StatusOr<DataDirectory> DataDirectory::Open(Disk* disk,
                                                  const std::string& path,
                                                  const Hash128& run,
                                                  const std::string& owner) {
  BALLAST_RETURN_IF_ERROR(disk->MakeDirectories(path));
  const std::string identity = path + "/IDENTITY";
  if (disk->Exists(identity)) {
    BALLAST_RETURN_IF_ERROR(CheckIdentity(disk, path, run));
  } else {
    BALLAST_RETURN_IF_ERROR(CheckNotForeign(disk, path));
  }
  absl::StatusOr<std::unique_ptr<DiskLock>> lock =
      disk->Lock(path + "/LOCK", owner);
  if (absl::IsAborted(lock.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is in use by ", lock.status().message(),
                     "; stop it or name another folder"));
  }
  BALLAST_RETURN_IF_ERROR(lock.status());
  // Again under the lock: two processes may have found an empty folder.
  if (disk->Exists(identity)) {
    BALLAST_RETURN_IF_ERROR(CheckIdentity(disk, path, run));
  } else {
    BALLAST_RETURN_IF_ERROR(disk->ReplaceFile(identity, Identity(run)));
  }
  return DataDirectory(*std::move(lock));
}

}  // namespace ballast
