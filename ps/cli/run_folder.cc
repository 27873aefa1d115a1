// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "common/status_macros.h"
#include "ps/membership/member_table.h"
#include "storage/file.h"

namespace ballast {
namespace {

namespace fs = std::filesystem;

absl::StatusOr<int> Lock(const std::string& path) {
  const std::string name = path + "/launcher.lock";
  const int fd = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cannot write ", name, ": ", std::generic_category().message(errno)));
  }
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    close(fd);
    return absl::FailedPreconditionError(absl::StrCat(
        path,
        " is in use by another `ballast train`; wait for it, stop it "
        "with `ballast stop --run-dir ",
        path, "`, or choose another run.dir"));
  }
  return fd;
}

// Text of a quoted log value, up to its closing quote.
std::string Unquoted(absl::string_view text) {
  size_t end = 0;
  while (end < text.size() && text[end] != '"') {
    end += text[end] == '\\' ? 2 : 1;
  }
  std::string out;
  return absl::CUnescape(text.substr(0, end), &out) ? out : std::string(text);
}

absl::Status CheckSameNumerics(const Job& before, const Job& now,
                               const std::string& config_path) {
  // A new run.dir is no advice for a text that was edited by mistake.
  if (now.data.hash != before.data.hash) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the text in data.path ", now.data.path,
        " has changed: its data.hash is ", now.data.hash,
        ", but the run to resume was started with ", before.data.hash,
        "; put the old text back, or start a run of its own with another "
        "run.dir"));
  }
  const absl::Status same =
      CheckFields(NumericsFields(before), NumericsFields(now),
                  "the run to resume", /*extra_allowed=*/false);
  if (same.ok()) {
    return same;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      same.message(), " (", config_path, "; numerics ",
      HashHex(NumericsHash(now)), " and ", HashHex(NumericsHash(before)),
      "); give the run its values back, or start a run of its own with "
      "another run.dir"));
}

absl::Status CheckResume(const JobFile& file, bool resume,
                         const std::string& job_path) {
  const Job& job = file.job;
  const std::string config_path = job.run.dir + "/config.yaml";
  std::error_code error;
  if (!resume) {
    if (!HoldsRun(job)) {
      return absl::OkStatus();
    }
    if (!fs::exists(config_path, error)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "server.data_dir ", job.server.data_dir,
          " holds records of another run; choose another, or move it away "
          "yourself"));
    }
    return absl::FailedPreconditionError(absl::StrCat(
        job.run.dir, " holds an earlier run; continue it with `ballast train ",
        job_path,
        " --resume`, or keep it and start anew with --set run.dir=DIR, or "
        "remove it yourself"));
  }
  if (!HoldsRun(job) || !fs::exists(config_path, error)) {
    return absl::FailedPreconditionError(
        absl::StrCat("nothing to resume in ", job.run.dir,
                     "; start without --resume, or name the run's folder with "
                     "--set run.dir=DIR"));
  }
  BALLAST_ASSIGN_OR_RETURN(const JobFile before, LoadJobFile(config_path, {}));
  return CheckSameNumerics(before.job, job, config_path);
}

}  // namespace

absl::StatusOr<LockedRunFolder> LockedRunFolder::Open(
    const JobFile& file, bool resume, const std::string& job_path) {
  const std::string& path = file.job.run.dir;
  // A refused resume must not leave an empty folder behind.
  BALLAST_RETURN_IF_ERROR(CheckResume(file, resume, job_path));
  BALLAST_RETURN_IF_ERROR(MakeDirectories(path + "/logs"));
  BALLAST_ASSIGN_OR_RETURN(const int lock, Lock(path));
  LockedRunFolder folder(path, lock);
  // Another launcher may have come and gone before the lock was ours.
  BALLAST_RETURN_IF_ERROR(CheckResume(file, resume, job_path));
  BALLAST_RETURN_IF_ERROR(
      WriteFileAtomically(folder.config_path(), EffectiveYaml(file)));
  return folder;
}

LockedRunFolder::LockedRunFolder(LockedRunFolder&& other) noexcept
    : path_(std::move(other.path_)),
      lock_fd_(std::exchange(other.lock_fd_, -1)) {}

LockedRunFolder::~LockedRunFolder() {
  if (lock_fd_ >= 0) {
    close(lock_fd_);
  }
}

bool HoldsRun(const Job& job) {
  // A file that is empty, a folder without entries: a start that came to
  // nothing, such as one that found its port in use.
  const auto filled = [](const std::string& path) {
    std::error_code error;
    return fs::exists(path, error) && !fs::is_empty(path, error);
  };
  return filled(job.run.dir + "/metrics.jsonl") ||
         filled(job.run.dir + "/checkpoints") || filled(job.server.data_dir);
}

absl::Status CheckText(const Job& job) {
  const std::string& path = job.data.path;
  std::error_code error;
  const auto wrong = [&path](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("data.path ", path, " ", what));
  };
  if (!fs::exists(path, error)) {
    return wrong(
        "is not there; name a text file (`make data` fetches the example's)");
  }
  if (!fs::is_regular_file(path, error)) {
    return wrong("is not a file; name a text file");
  }
  if (access(path.c_str(), R_OK) != 0) {
    return wrong(absl::StrCat("cannot be read: ",
                              std::generic_category().message(errno)));
  }
  const uint64_t bytes = fs::file_size(path, error);
  if (bytes == 0) {
    return wrong("is empty; want text to train on");
  }
  if (bytes <= job.model.context) {
    return wrong(absl::StrCat("has ", bytes, " bytes; want more than ",
                              "model.context = ", job.model.context));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> HashText(const Job& job) {
  const std::string& path = job.data.path;
  const auto failed = [&path](absl::string_view what) {
    return absl::FailedPreconditionError(
        absl::StrCat("data.path ", path, " cannot be ", what, ": ",
                     std::generic_category().message(errno)));
  };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return failed("opened");
  }
  const off_t bytes = lseek(fd, 0, SEEK_END);
  void* map = bytes <= 0 ? MAP_FAILED
                         : mmap(nullptr, static_cast<size_t>(bytes), PROT_READ,
                                MAP_PRIVATE, fd, 0);
  close(fd);
  if (map == MAP_FAILED) {
    return failed("read");
  }
  std::string hash = HashHex(HashBytes(map, static_cast<uint64_t>(bytes)));
  munmap(map, static_cast<size_t>(bytes));
  if (job.data.hash != "any" && job.data.hash != hash) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data.hash is ", job.data.hash, ", but that of data.path ", path,
        " is ", hash, "; name the text that is meant, or set data.hash: any"));
  }
  return hash;
}

std::string LastLines(const std::string& path, int count) {
  std::ifstream file(path);
  std::deque<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    lines.push_back(line);
    if (lines.size() > static_cast<size_t>(count)) {
      lines.pop_front();
    }
  }
  std::string text;
  for (const std::string& line : lines) {
    absl::StrAppend(&text, "  ", line, "\n");
  }
  return text;
}

std::string LastComplaint(const std::string& path) {
  std::ifstream file(path);
  std::string complaint;
  for (std::string line; std::getline(file, line);) {
    const size_t why = line.find(" why=\"");
    if (absl::StartsWith(line, "ballast-")) {
      const size_t colon = line.find(": ");
      complaint = colon == std::string::npos ? line : line.substr(colon + 2);
    } else if (absl::StrContains(line, " ERROR ") && why != std::string::npos) {
      complaint = Unquoted(absl::string_view(line).substr(why + 6));
    }
  }
  return complaint;
}

}  // namespace ballast
