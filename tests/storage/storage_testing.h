// SPDX-License-Identifier: Apache-2.0
// What the storage tests share: a folder that goes away, waiting for a
// completion, a small file system that can fill up, and damaging a file.

#pragma once

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "storage/file.h"

namespace ballast::testing {

inline constexpr Hash128 kRun = {0x1234, 0x5678};

class TempDir {
 public:
  TempDir() {
    std::string path =
        (std::filesystem::temp_directory_path() / "ballast.XXXXXX").string();
    path_ = mkdtemp(path.data());
  }
  ~TempDir() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string path(absl::string_view name = "") const {
    return name.empty() ? path_ : absl::StrCat(path_, "/", name);
  }

 private:
  std::string path_;
};

// A tmpfs of a given size; ok() is false where mounting is not allowed.
class SmallDisk {
 public:
  explicit SmallDisk(uint64_t bytes)
      : ok_(mount("tmpfs", dir_.path().c_str(), "tmpfs", 0,
                  absl::StrCat("size=", bytes).c_str()) == 0) {}
  ~SmallDisk() {
    if (ok_) {
      umount2(dir_.path().c_str(), MNT_DETACH);
    }
  }
  bool ok() const { return ok_; }
  std::string path(absl::string_view name) const { return dir_.path(name); }

 private:
  TempDir dir_;
  bool ok_;
};

// Starts an operation that takes a completion and waits for it.
inline absl::Status Await(
    const std::function<void(std::function<void(absl::Status)>)>& start) {
  std::promise<absl::Status> promise;
  start([&promise](absl::Status status) {
    promise.set_value(std::move(status));
  });
  return promise.get_future().get();
}

// Whether `status` has that code and its text names `part`.
inline ::testing::AssertionResult Says(const absl::Status& status,
                                       absl::StatusCode code,
                                       const std::string& part) {
  if (status.code() == code &&
      std::string(status.message()).find(part) != std::string::npos) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
         << status << "; want " << absl::StatusCodeToString(code) << " with '"
         << part << "'";
}

inline std::string Slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void Spill(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline void FlipByte(const std::string& path, uint64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const auto old = static_cast<char>(file.get());
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(static_cast<char>(old ^ 0x10));
}

inline void FillRandom(uint64_t seed, absl::Span<std::byte> out) {
  std::mt19937_64 random(seed);
  for (std::byte& byte : out) {
    byte = static_cast<std::byte>(random());
  }
}

// Printed first, so that a failure can be repeated: BALLAST's random tests
// take `--seed=N`.
inline uint64_t Seed() {
  uint64_t seed = std::random_device()();
  for (const std::string& argument : ::testing::internal::GetArgvs()) {
    if (argument.rfind("--seed=", 0) == 0) {
      seed = std::strtoull(argument.c_str() + 7, nullptr, 10);
    }
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace ballast::testing
