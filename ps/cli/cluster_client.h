// SPDX-License-Identifier: Apache-2.0
// A running cluster as the tool sees it: the questions it may ask the
// coordinator, each one bounded call.

#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/ballast.pb.h"
#include "ps/cli/tool.h"

namespace ballast {

// "host:port" of the coordinator that `target` means.
// Errors: NOT_FOUND  --run-dir holds no coordinator.address.
absl::StatusOr<std::string> CoordinatorAddress(const Target& target);

// The file in a run folder that says where its coordinator listens.
std::string AddressFile(const std::string& run_dir);

// Thread-compatible.
class ClusterClient {
 public:
  explicit ClusterClient(const std::string& address);
  ~ClusterClient();
  ClusterClient(const ClusterClient&) = delete;
  ClusterClient& operator=(const ClusterClient&) = delete;

  // Errors of all: UNAVAILABLE  nobody answers at the address, which the
  // message names with what to do.
  absl::StatusOr<v1::StatusReply> GetStatus(absl::Duration timeout);
  absl::StatusOr<v1::Placement> GetPlacement(absl::Duration timeout);
  absl::Status Stop(const std::string& reason, bool abort,
                    absl::Duration timeout);
  absl::Status ReportExit(const v1::ExitReport& report, absl::Duration timeout);
  // Errors besides: what the coordinator has against it.
  absl::StatusOr<v1::ScaleReply> Scale(const v1::ScaleRequest& request,
                                       absl::Duration timeout);

 private:
  class Connection;  // Keeps gRPC out of this header.
  absl::Status Explain(const absl::Status& status) const;

  const std::string address_;
  const std::unique_ptr<Connection> connection_;
};

// Resolves `target` and connects to it.
absl::StatusOr<std::unique_ptr<ClusterClient>> ConnectTo(const Target& target);

}  // namespace ballast
