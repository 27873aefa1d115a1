// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/coordinator_service.h"

#include <utility>

#include "rpc/status.h"

namespace ballast {
namespace {

// Finishes a call with what the loop answers. `reply` is valid until then.
template <typename Reply>
CoordinatorLoop::Answer<Reply> Finisher(grpc::ServerUnaryReactor* reactor,
                                        Reply* reply) {
  return [reactor, reply](absl::StatusOr<Reply> answer) {
    if (answer.ok()) {
      *reply = *std::move(answer);
    }
    reactor->Finish(ToGrpcStatus(answer.status()));
  };
}

}  // namespace

grpc::ServerUnaryReactor* CoordinatorService::Join(
    grpc::CallbackServerContext* context, const v1::JoinRequest* request,
    v1::JoinReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  loop_->Join(*request, Finisher(reactor, reply));
  return reactor;
}

grpc::ServerUnaryReactor* CoordinatorService::Poll(
    grpc::CallbackServerContext* context, const v1::PollRequest* request,
    v1::PollReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  loop_->Poll(*request, Finisher(reactor, reply));
  return reactor;
}

grpc::ServerUnaryReactor* CoordinatorService::Report(
    grpc::CallbackServerContext* context, const v1::ReportRequest* request,
    v1::ReportReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  loop_->Report(*request, Finisher(reactor, reply));
  return reactor;
}

grpc::ServerUnaryReactor* CoordinatorService::GetPlacement(
    grpc::CallbackServerContext* context, const v1::GetPlacementRequest*,
    v1::Placement* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  loop_->GetPlacement(Finisher(reactor, reply));
  return reactor;
}

grpc::ServerUnaryReactor* CoordinatorService::GetStatus(
    grpc::CallbackServerContext* context, const v1::StatusRequest*,
    v1::StatusReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  loop_->GetStatus(Finisher(reactor, reply));
  return reactor;
}

grpc::ServerUnaryReactor* CoordinatorService::Stop(
    grpc::CallbackServerContext* context, const v1::StopRequest* request,
    v1::StopReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  loop_->Stop(*request, Finisher(reactor, reply));
  return reactor;
}

}  // namespace ballast
