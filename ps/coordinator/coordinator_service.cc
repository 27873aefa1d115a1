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

// A poll is what a member always has in flight, so its end without an answer is
// the first sign of a death. Deletes itself.
class CoordinatorService::PollReactor final : public grpc::ServerUnaryReactor {
 public:
  PollReactor(CoordinatorService* service, uint64_t incarnation)
      : service_(service), incarnation_(incarnation) {}
  void OnCancel() override {
    CoordinatorLoop* loop = service_->Enter();
    if (loop != nullptr) {
      loop->ConnectionLost(incarnation_);
      service_->Leave();
    }
  }
  void OnDone() override { delete this; }

 private:
  CoordinatorService* const service_;
  const uint64_t incarnation_;
};

void CoordinatorService::Serve(CoordinatorLoop* loop) {
  MutexLock lock(&mutex_);
  loop_ = loop;
}

void CoordinatorService::StandBy(const std::string& reason) {
  MutexLock lock(&mutex_);
  loop_ = nullptr;
  reason_ = reason;
  while (visitors_ > 0) {  // Calls to the loop do not block.
    changed_.Wait(&mutex_);
  }
}

CoordinatorLoop* CoordinatorService::Enter() {
  MutexLock lock(&mutex_);
  visitors_ += loop_ != nullptr ? 1 : 0;
  return loop_;
}

void CoordinatorService::Leave() {
  MutexLock lock(&mutex_);
  --visitors_;
  changed_.NotifyAll();
}

grpc::ServerUnaryReactor* CoordinatorService::WithLoop(
    grpc::ServerUnaryReactor* reactor,
    const std::function<void(CoordinatorLoop*)>& call) {
  CoordinatorLoop* loop = Enter();
  if (loop != nullptr) {
    call(loop);
    Leave();
    return reactor;
  }
  std::string reason;
  {
    MutexLock lock(&mutex_);
    reason = reason_;
  }
  reactor->Finish(ToGrpcStatus(absl::UnavailableError(reason)));
  return reactor;
}

grpc::ServerUnaryReactor* CoordinatorService::Join(
    grpc::CallbackServerContext* context, const v1::JoinRequest* request,
    v1::JoinReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  return WithLoop(reactor, [&](CoordinatorLoop* loop) {
    loop->Join(*request, Finisher(reactor, reply));
  });
}

grpc::ServerUnaryReactor* CoordinatorService::Poll(
    grpc::CallbackServerContext*, const v1::PollRequest* request,
    v1::PollReply* reply) {
  auto* reactor = new PollReactor(this, request->incarnation());
  return WithLoop(reactor, [&](CoordinatorLoop* loop) {
    loop->Poll(*request, Finisher(reactor, reply));
  });
}

grpc::ServerUnaryReactor* CoordinatorService::Report(
    grpc::CallbackServerContext* context, const v1::ReportRequest* request,
    v1::ReportReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  return WithLoop(reactor, [&](CoordinatorLoop* loop) {
    loop->Report(*request, Finisher(reactor, reply));
  });
}

grpc::ServerUnaryReactor* CoordinatorService::GetPlacement(
    grpc::CallbackServerContext* context, const v1::GetPlacementRequest*,
    v1::Placement* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  return WithLoop(reactor, [&](CoordinatorLoop* loop) {
    loop->GetPlacement(Finisher(reactor, reply));
  });
}

grpc::ServerUnaryReactor* CoordinatorService::GetStatus(
    grpc::CallbackServerContext* context, const v1::StatusRequest*,
    v1::StatusReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  return WithLoop(reactor, [&](CoordinatorLoop* loop) {
    loop->GetStatus(Finisher(reactor, reply));
  });
}

grpc::ServerUnaryReactor* CoordinatorService::Stop(
    grpc::CallbackServerContext* context, const v1::StopRequest* request,
    v1::StopReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  return WithLoop(reactor, [&](CoordinatorLoop* loop) {
    loop->Stop(*request, Finisher(reactor, reply));
  });
}

grpc::ServerUnaryReactor* CoordinatorService::ReportExit(
    grpc::CallbackServerContext* context, const v1::ExitReport* request,
    v1::ExitReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  return WithLoop(reactor, [&](CoordinatorLoop* loop) {
    loop->ReportExit(*request, Finisher(reactor, reply));
  });
}

grpc::ServerUnaryReactor* CoordinatorService::Scale(
    grpc::CallbackServerContext* context, const v1::ScaleRequest* request,
    v1::ScaleReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  return WithLoop(reactor, [&](CoordinatorLoop* loop) {
    loop->Scale(*request, Finisher(reactor, reply));
  });
}

}  // namespace ballast
