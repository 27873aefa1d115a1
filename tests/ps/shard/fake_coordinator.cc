// SPDX-License-Identifier: Apache-2.0
#include "tests/ps/shard/fake_coordinator.h"

#include "common/clock.h"

namespace ballast::testing {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

}  // namespace

FakeCoordinator::FakeCoordinator() {
  endpoint_ = *Endpoint::Start("127.0.0.1", 0, {this});
}

FakeCoordinator::~FakeCoordinator() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  endpoint_->Stop(absl::Milliseconds(100));
}

void FakeCoordinator::SetPlacement(const v1::Placement& placement) {
  MutexLock lock(&mutex_);
  placement_ = placement;
}

std::string FakeCoordinator::WaitForJoin(const std::string& name) {
  const absl::Time deadline = MonotonicNow() + kPatience;
  MutexLock lock(&mutex_);
  while (members_[name].incarnation == 0 && MonotonicNow() < deadline) {
    changed_.WaitFor(&mutex_, absl::Seconds(1));
  }
  return members_[name].join.address();
}

void FakeCoordinator::Direct(const std::string& name,
                             const v1::ServerDirective& directive) {
  MutexLock lock(&mutex_);
  members_[name].directive = directive;
  ++members_[name].number;
  changed_.NotifyAll();
}

v1::ReportRequest FakeCoordinator::WaitForReport(
    const std::string& name,
    const std::function<bool(const v1::ReportRequest&)>& wanted) {
  const absl::Time deadline = MonotonicNow() + kPatience;
  MutexLock lock(&mutex_);
  while (true) {
    std::vector<v1::ReportRequest>& reports = members_[name].reports;
    for (size_t i = 0; i < reports.size(); ++i) {
      if (wanted(reports[i])) {
        v1::ReportRequest found = reports[i];
        reports.erase(reports.begin() + static_cast<ptrdiff_t>(i));
        return found;
      }
    }
    if (MonotonicNow() > deadline) {
      return {};
    }
    changed_.WaitFor(&mutex_, absl::Seconds(1));
  }
}

grpc::Status FakeCoordinator::Join(grpc::ServerContext*,
                                   const v1::JoinRequest* request,
                                   v1::JoinReply* reply) {
  MutexLock lock(&mutex_);
  Member& member = members_[request->name()];
  if (member.incarnation == 0 || member.join.life_id() != request->life_id()) {
    member.join = *request;
    member.incarnation = next_incarnation_++;
  }
  reply->set_incarnation(member.incarnation);
  reply->set_timeline(1);
  reply->set_lease_ms(4000);
  reply->set_life_id(request->life_id());
  reply->set_run_id("00112233445566778899aabbccddeeff");
  changed_.NotifyAll();
  return grpc::Status::OK;
}

grpc::Status FakeCoordinator::Poll(grpc::ServerContext*,
                                   const v1::PollRequest* request,
                                   v1::PollReply* reply) {
  const absl::Time deadline =
      MonotonicNow() + absl::Milliseconds(request->wait_ms());
  MutexLock lock(&mutex_);
  for (auto& [name, member] : members_) {
    if (member.incarnation != request->incarnation()) {
      continue;
    }
    while (!stopping_ && member.number <= request->seen_number() &&
           MonotonicNow() < deadline) {
      changed_.WaitFor(&mutex_, deadline - MonotonicNow());
    }
    reply->set_number(member.number);
    *reply->mutable_server() = member.directive;
    return grpc::Status::OK;
  }
  return {grpc::StatusCode::ABORTED, "not admitted"};
}

grpc::Status FakeCoordinator::Report(grpc::ServerContext*,
                                     const v1::ReportRequest* request,
                                     v1::ReportReply*) {
  MutexLock lock(&mutex_);
  for (auto& [name, member] : members_) {
    if (member.incarnation == request->incarnation()) {
      member.reports.push_back(*request);
      changed_.NotifyAll();
      return grpc::Status::OK;
    }
  }
  return {grpc::StatusCode::ABORTED, "not admitted"};
}

grpc::Status FakeCoordinator::GetPlacement(grpc::ServerContext*,
                                           const v1::GetPlacementRequest*,
                                           v1::Placement* reply) {
  MutexLock lock(&mutex_);
  *reply = placement_;
  return grpc::Status::OK;
}

}  // namespace ballast::testing
