// SPDX-License-Identifier: Apache-2.0
// A coordinator that does what a test says: admits everybody, hands out the
// directives it is given and keeps every report.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "proto/ballast.grpc.pb.h"
#include "rpc/endpoint.h"

namespace ballast::testing {

// Thread-safe.
class FakeCoordinator final : public v1::Coordinator::Service {
 public:
  FakeCoordinator();
  ~FakeCoordinator() override;

  const std::string& address() const { return endpoint_->address(); }
  void SetPlacement(const v1::Placement& placement);
  // Waits until `name` has joined; the address it serves at.
  std::string WaitForJoin(const std::string& name);
  void Direct(const std::string& name, const v1::ServerDirective& directive);
  // The first report of `name` for which `wanted`, now or later; it is taken
  // out. An empty request after 20 s.
  v1::ReportRequest WaitForReport(
      const std::string& name,
      const std::function<bool(const v1::ReportRequest&)>& wanted);

  grpc::Status Join(grpc::ServerContext* context,
                    const v1::JoinRequest* request,
                    v1::JoinReply* reply) override;
  grpc::Status Poll(grpc::ServerContext* context,
                    const v1::PollRequest* request,
                    v1::PollReply* reply) override;
  grpc::Status Report(grpc::ServerContext* context,
                      const v1::ReportRequest* request,
                      v1::ReportReply* reply) override;
  grpc::Status GetPlacement(grpc::ServerContext* context,
                            const v1::GetPlacementRequest* request,
                            v1::Placement* reply) override;

 private:
  struct Member {
    v1::JoinRequest join;
    uint64_t incarnation = 0;
    uint64_t number = 0;
    v1::ServerDirective directive;
    std::vector<v1::ReportRequest> reports;
  };

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, Member> members_ ABSL_GUARDED_BY(mutex_);
  v1::Placement placement_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_incarnation_ ABSL_GUARDED_BY(mutex_) = 1;
  std::unique_ptr<Endpoint> endpoint_;
};

}  // namespace ballast::testing
