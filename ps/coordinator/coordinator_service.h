// SPDX-License-Identifier: Apache-2.0
// The Coordinator service over gRPC: hands every call to the loop and finishes
// it when the loop answers, so no thread of gRPC's ever blocks.

#pragma once

#include "proto/ballast.grpc.pb.h"
#include "ps/coordinator/coordinator_loop.h"

namespace ballast {

// Thread-safe. `loop` is not owned and outlives the server.
class CoordinatorService final : public v1::Coordinator::CallbackService {
 public:
  explicit CoordinatorService(CoordinatorLoop* loop) : loop_(loop) {}

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

 private:
  CoordinatorLoop* const loop_;
};

}  // namespace ballast
