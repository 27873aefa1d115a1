// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/cluster_client.h"

#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "proto/ballast.grpc.pb.h"
#include "rpc/endpoint.h"

namespace ballast {

class ClusterClient::Connection {
 public:
  explicit Connection(const std::string& address)
      : stub_(v1::Coordinator::NewStub(MakeChannel(address))) {}

  // Calls a member function of the stub once.
  template <typename Request, typename Reply>
  absl::Status Call(grpc::Status (v1::Coordinator::Stub::*method)(
                        grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply* reply,
                    absl::Duration timeout) {
    return CallOnce(
        [&](grpc::ClientContext* context, const Request& asked, Reply* out) {
          return (stub_.get()->*method)(context, asked, out);
        },
        request, reply, timeout);
  }

 private:
  const std::unique_ptr<v1::Coordinator::Stub> stub_;
};

std::string AddressFile(const std::string& run_dir) {
  return absl::StrCat(run_dir, "/coordinator.address");
}

absl::StatusOr<std::string> CoordinatorAddress(const Target& target) {
  if (!target.coordinator.empty()) return target.coordinator;
  if (target.run_dir.empty()) return std::string(kDefaultCoordinator);
  const std::string path = AddressFile(target.run_dir);
  std::ifstream file(path);
  std::string address;
  if (!std::getline(file, address) || address.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no coordinator.address in ", target.run_dir,
                     "; is it the folder of a run that is up?"));
  }
  return std::string(absl::StripAsciiWhitespace(address));
}

ClusterClient::ClusterClient(const std::string& address)
    : address_(address), connection_(std::make_unique<Connection>(address)) {}

ClusterClient::~ClusterClient() = default;

absl::Status ClusterClient::Explain(const absl::Status& status) const {
  if (status.code() == absl::StatusCode::kUnavailable ||
      status.code() == absl::StatusCode::kDeadlineExceeded) {
    return absl::UnavailableError(absl::StrCat(
        "no answer from a coordinator at ", address_, " (", status.message(),
        "); is a run up? give --coordinator or --run-dir"));
  }
  return status;
}

absl::StatusOr<v1::StatusReply> ClusterClient::GetStatus(
    absl::Duration timeout) {
  v1::StatusReply reply;
  BALLAST_RETURN_IF_ERROR(
      Explain(connection_->Call(&v1::Coordinator::Stub::GetStatus,
                                v1::StatusRequest(), &reply, timeout)));
  return reply;
}

absl::StatusOr<v1::Placement> ClusterClient::GetPlacement(
    absl::Duration timeout) {
  v1::Placement reply;
  BALLAST_RETURN_IF_ERROR(
      Explain(connection_->Call(&v1::Coordinator::Stub::GetPlacement,
                                v1::GetPlacementRequest(), &reply, timeout)));
  return reply;
}

absl::Status ClusterClient::Stop(const std::string& reason, bool abort,
                                 absl::Duration timeout) {
  v1::StopRequest request;
  request.set_reason(reason);
  request.set_abort(abort);
  v1::StopReply reply;
  return Explain(connection_->Call(&v1::Coordinator::Stub::Stop, request,
                                   &reply, timeout));
}

absl::Status ClusterClient::ReportExit(const v1::ExitReport& report,
                                       absl::Duration timeout) {
  v1::ExitReply reply;
  return Explain(connection_->Call(&v1::Coordinator::Stub::ReportExit, report,
                                   &reply, timeout));
}

absl::StatusOr<v1::ScaleReply> ClusterClient::Scale(
    const v1::ScaleRequest& request, absl::Duration timeout) {
  v1::ScaleReply reply;
  BALLAST_RETURN_IF_ERROR(Explain(connection_->Call(
      &v1::Coordinator::Stub::Scale, request, &reply, timeout)));
  return reply;
}

absl::StatusOr<std::unique_ptr<ClusterClient>> ConnectTo(const Target& target) {
  BALLAST_ASSIGN_OR_RETURN(const std::string address,
                           CoordinatorAddress(target));
  return std::make_unique<ClusterClient>(address);
}

}  // namespace ballast
