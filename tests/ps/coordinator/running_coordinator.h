// SPDX-License-Identifier: Apache-2.0
// A coordinator in this process and members that a test plays by hand, over
// loopback.

#pragma once

#include <grpcpp/client_context.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/job_file.h"
#include "common/status_macros.h"
#include "proto/ballast.grpc.pb.h"
#include "ps/coordinator/coordinator_loop.h"
#include "ps/coordinator/coordinator_service.h"
#include "ps/coordinator/leadership.h"
#include "ps/coordinator/startup.h"
#include "rpc/endpoint.h"
#include "tests/ps/membership/core_harness.h"

namespace ballast::testing {

inline constexpr absl::Duration kCall = absl::Seconds(20);

inline std::vector<std::string> Lines(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    lines.push_back(line);
  }
  return lines;
}

// A run opened by its leader.
struct Led {
  Led(const Job& job, const CoordinatorFlags& flags) : run(Open(job, flags)) {}

  std::unique_ptr<SharedStateStore> store;
  std::unique_ptr<Leadership> leadership;
  absl::StatusOr<OpenedRun> run;

 private:
  absl::StatusOr<OpenedRun> Open(const Job& job,
                                 const CoordinatorFlags& flags) {
    JobFile file;
    file.job = job;
    BALLAST_ASSIGN_OR_RETURN(store, OpenStore(job, ""));
    BALLAST_ASSIGN_OR_RETURN(
        leadership, Leadership::Take(store.get(), "here:1", absl::Seconds(2)));
    return OpenRun(file, flags, leadership.get(), MonotonicNow());
  }
};

// A coordinator process in miniature: store, folder, loop, service, endpoint.
class RunningCoordinator {
 public:
  RunningCoordinator(const Job& job, const CoordinatorFlags& flags)
      : endpoint_(*Endpoint::Start("127.0.0.1", 0, {&service_})),
        led_(job, flags) {
    EXPECT_TRUE(led_.run.ok()) << led_.run.status();
    EXPECT_NE(led_.run->core, nullptr) << led_.run->ended;
    loop_ = std::make_unique<CoordinatorLoop>(
        job, std::move(led_.run->core), led_.leadership.get(),
        led_.run->folder.get(), MonotonicNow);
    loop_->Start();
    service_.Serve(loop_.get());
    stub_ = v1::Coordinator::NewStub(MakeChannel(endpoint_->address()));
  }
  // As a crash does it: nobody is told.
  ~RunningCoordinator() {
    service_.StandBy("gone");
    loop_.reset();
    endpoint_->Stop(absl::ZeroDuration());
  }
  v1::Coordinator::Stub* stub() { return stub_.get(); }
  CoordinatorLoop* loop() { return loop_.get(); }
  SharedStateStore* store() { return led_.store.get(); }
  CoordinatorService* service() { return &service_; }
  v1::StatusReply Status() {
    v1::StatusReply status;
    const absl::Status called = CallOnce(
        [this](auto* context, const auto& in, auto* out) {
          return stub_->GetStatus(context, in, out);
        },
        v1::StatusRequest(), &status, kCall);
    EXPECT_TRUE(called.ok()) << called;
    return status;
  }

 private:
  CoordinatorService service_;
  std::unique_ptr<Endpoint> endpoint_;
  Led led_;
  std::unique_ptr<CoordinatorLoop> loop_;
  std::unique_ptr<v1::Coordinator::Stub> stub_;
};

// One member; every call blocks the test.
class FakeMember {
 public:
  FakeMember(RunningCoordinator* coordinator, const Job& job, v1::Role role)
      : stub_(coordinator->stub()) {
    request_.set_role(role);
    request_.set_name(role == v1::ROLE_SERVER ? "server-0" : "worker-0");
    request_.set_life_id(role == v1::ROLE_SERVER ? 1 : 2);
    request_.set_address("127.0.0.1:1");
    request_.set_layout(SmallLayout().Encode());
    for (const auto& [key, value] : NumericsFields(job)) {
      v1::ConfigField* field = request_.add_numerics();
      field->set_key(key);
      field->set_value(value);
    }
  }
  v1::JoinRequest* join() { return &request_; }
  // From now on it calls another life of the coordinator.
  void TurnTo(RunningCoordinator* coordinator) { stub_ = coordinator->stub(); }

  absl::Status Join() {
    return Call(&v1::Coordinator::Stub::Join, request_, &admission_);
  }
  absl::StatusOr<v1::PollReply> Poll(absl::Duration wait) {
    v1::PollRequest request;
    request.set_incarnation(admission_.incarnation());
    request.set_seen_number(seen_);
    request.set_wait_ms(absl::ToInt64Milliseconds(wait));
    request.mutable_stats()->set_memory_budget_bytes(1000);
    request.mutable_stats()->set_memory_peak_bytes(900);
    v1::PollReply reply;
    const absl::Status status =
        Call(&v1::Coordinator::Stub::Poll, request, &reply);
    if (!status.ok()) {
      return status;
    }
    seen_ = std::max(seen_, reply.number());
    if (reply.has_worker() || reply.has_server()) {
      newest_ = reply;
    }
    return reply;
  }
  // Polls until the newest directive is as wanted; false after `kCall`.
  bool Await(const std::function<bool(const v1::PollReply&)>& wanted) {
    const absl::Time give_up = MonotonicNow() + kCall;
    while (!wanted(newest_) && MonotonicNow() < give_up) {
      if (!Poll(absl::Seconds(1)).ok()) {
        return false;
      }
    }
    return wanted(newest_);
  }
  bool Await(v1::ServerTask task) {
    return Await([task](const v1::PollReply& reply) {
      return reply.has_server() && reply.server().task() == task;
    });
  }
  bool Await(v1::WorkerTask task, uint64_t step) {
    return Await([task, step](const v1::PollReply& reply) {
      return reply.has_worker() && reply.worker().task() == task &&
             (task == v1::WORKER_EXIT || reply.worker().step() == step);
    });
  }
  bool AwaitDecision(uint64_t step) {
    return Await([step](const v1::PollReply& reply) {
      return reply.server().decisions_size() > 0 &&
             reply.server().decisions(0).step() == step;
    });
  }
  absl::Status Report(const std::function<void(v1::ReportRequest*)>& fill) {
    v1::ReportRequest request;
    request.set_incarnation(admission_.incarnation());
    request.set_timeline(admission_.timeline());
    fill(&request);
    v1::ReportReply reply;
    return Call(&v1::Coordinator::Stub::Report, request, &reply);
  }
  const v1::JoinReply& admission() const { return admission_; }
  uint64_t seen() const { return seen_; }

 private:
  template <typename Method, typename Request, typename Reply>
  absl::Status Call(Method method, const Request& request, Reply* reply) {
    return CallOnce(
        [this, method](auto* context, const auto& in, auto* out) {
          return (stub_->*method)(context, in, out);
        },
        request, reply, kCall);
  }
  v1::Coordinator::Stub* stub_;
  v1::JoinRequest request_;
  v1::JoinReply admission_;
  v1::PollReply newest_;
  uint64_t seen_ = 0;
};

}  // namespace ballast::testing
