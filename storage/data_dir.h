// SPDX-License-Identifier: Apache-2.0
// What makes a folder the data directory of one run: the file IDENTITY says
// whose it is, the file LOCK is held while a process works in it. Nothing in
// it is ever wiped, and a folder with other contents is refused untouched.
// Format: docs/FORMATS.md.

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "common/hash.h"
#include "storage/disk.h"

namespace ballast {

// The run that a data directory belongs to; nullopt when there is no folder, or
// one without IDENTITY. Changes nothing and takes no lock.
// Errors: FAILED_PRECONDITION  a newer format.
//         DATA_LOSS            IDENTITY is damaged.
absl::StatusOr<std::optional<Hash128>> ReadDataDirectoryRun(
    Disk* disk, const std::string& path);

// The lock lasts as long as the object. Thread-compatible.
class DataDirectory {
 public:
  // Creates the folder when it is missing and takes an empty one.
  // Errors:
  //   FAILED_PRECONDITION  another process owns it (named), it belongs to
  //                        another run or a newer format, or it is not empty
  //                        and no data directory.
  //   DATA_LOSS            IDENTITY is damaged.
  static absl::StatusOr<DataDirectory> Open(Disk* disk, const std::string& path,
                                            const Hash128& run,
                                            const std::string& owner);

 private:
  explicit DataDirectory(std::unique_ptr<DiskLock> lock)
      : lock_(std::move(lock)) {}
  std::unique_ptr<DiskLock> lock_;
};

}  // namespace ballast
