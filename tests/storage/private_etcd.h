// SPDX-License-Identifier: Apache-2.0
// An etcd of a test's own: on loopback ports that the system chose, its data in
// a folder that goes away, and gone with the test process.

#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tests/storage/storage_testing.h"

namespace ballast::testing {

// Not thread-safe.
class PrivateEtcd {
 public:
  // Whether etcd is installed.
  static bool Installed();

  // Errors: UNAVAILABLE  it did not answer within half a minute; says what it
  //         printed.
  static absl::StatusOr<std::unique_ptr<PrivateEtcd>> Start();
  ~PrivateEtcd() { Kill(); }

  const std::string& address() const { return address_; }
  // As kill -9 does.
  void Kill();
  // After Kill: with the same ports and data.
  absl::Status Restart();
  void Pause();
  void Resume();

 private:
  PrivateEtcd() = default;
  absl::Status Launch();

  TempDir dir_;
  std::string address_;
  std::string peer_address_;
  pid_t pid_ = 0;
};

}  // namespace ballast::testing
