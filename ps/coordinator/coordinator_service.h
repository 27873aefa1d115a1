// SPDX-License-Identifier: Apache-2.0
// The Coordinator service over gRPC: hands every call to the loop and finishes
// it when the loop answers, so no thread of gRPC's ever blocks. While there is
// no loop, because another coordinator leads or none does yet, every call is
// UNAVAILABLE with the reason: "standby; leader is host:port".

#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"
#include "proto/ballast.grpc.pb.h"
#include "ps/coordinator/coordinator_loop.h"

namespace ballast {

// Thread-safe.
class CoordinatorService final : public v1::Coordinator::CallbackService {
 public:
  // Calls go to `loop`, which is not owned and lives until StandBy returns or
  // the server has ended.
  void Serve(CoordinatorLoop* loop);
  void StandBy(const std::string& reason);

  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context,
                                 const v1::JoinRequest* request,
                                 v1::JoinReply* reply) override;
  grpc::ServerUnaryReactor* Poll(grpc::CallbackServerContext* context,
                                 const v1::PollRequest* request,
                                 v1::PollReply* reply) override;
  grpc::ServerUnaryReactor* Report(grpc::CallbackServerContext* context,
                                   const v1::ReportRequest* request,
                                   v1::ReportReply* reply) override;
  grpc::ServerUnaryReactor* GetPlacement(grpc::CallbackServerContext* context,
                                         const v1::GetPlacementRequest* request,
                                         v1::Placement* reply) override;
  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::StatusRequest* request,
                                      v1::StatusReply* reply) override;
  grpc::ServerUnaryReactor* Stop(grpc::CallbackServerContext* context,
                                 const v1::StopRequest* request,
                                 v1::StopReply* reply) override;
  grpc::ServerUnaryReactor* ReportExit(grpc::CallbackServerContext* context,
                                       const v1::ExitReport* request,
                                       v1::ExitReply* reply) override;
  grpc::ServerUnaryReactor* Scale(grpc::CallbackServerContext* context,
                                  const v1::ScaleRequest* request,
                                  v1::ScaleReply* reply) override;

 private:
  class PollReactor;

  // Calls `call` with the loop, or finishes the call.
  grpc::ServerUnaryReactor* WithLoop(
      grpc::ServerUnaryReactor* reactor,
      const std::function<void(CoordinatorLoop*)>& call);
  // The loop, which stays until Leave; null: there is none.
  CoordinatorLoop* Enter();
  void Leave();

  Mutex mutex_;
  CondVar changed_;
  CoordinatorLoop* loop_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t visitors_ ABSL_GUARDED_BY(mutex_) = 0;  // Between Enter and Leave.
  std::string reason_ ABSL_GUARDED_BY(mutex_) = "this coordinator is starting";
};

}  // namespace ballast
