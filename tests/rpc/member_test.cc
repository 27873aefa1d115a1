// SPDX-License-Identifier: Apache-2.0
#include "rpc/member.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "proto/ballast.grpc.pb.h"
#include "rpc/endpoint.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Answers what the test sets; every call may be made to fail first.
class ScriptedCoordinator final : public v1::Coordinator::Service {
 public:
  grpc::Status Join(grpc::ServerContext*, const v1::JoinRequest* request,
                    v1::JoinReply* reply) override {
    MutexLock lock(&mutex_);
    reply->set_incarnation(5);
    reply->set_lease_ms(2000);
    reply->set_life_id(request->life_id());
    return Next();
  }
  grpc::Status Poll(grpc::ServerContext*, const v1::PollRequest*,
                    v1::PollReply* reply) override {
    MutexLock lock(&mutex_);
    if (const grpc::Status status = Next(); !status.ok()) {
      return status;
    }
    ++polls_;
    if (number_ < 3) {
      ++number_;
    } else {  // The same directive again, at the pace of a long poll.
      changed_.WaitFor(&mutex_, absl::Milliseconds(20));
    }
    reply->set_number(number_);
    reply->mutable_worker()->set_step(number_ * 10);
    return grpc::Status::OK;
  }
  grpc::Status Report(grpc::ServerContext*, const v1::ReportRequest* request,
                      v1::ReportReply*) override {
    MutexLock lock(&mutex_);
    if (const grpc::Status status = Next(); !status.ok()) {
      return status;
    }
    EXPECT_EQ(request->incarnation(), 5u);
    reported_.push_back(request->confirm().step());
    return grpc::Status::OK;
  }

  // The next `count` calls end with `code`.
  void FailNext(int count, grpc::StatusCode code,
                const std::string& message = "scripted") {
    MutexLock lock(&mutex_);
    failures_ = count;
    code_ = code;
    message_ = message;
  }
  int polls() {
    MutexLock lock(&mutex_);
    return polls_;
  }
  std::vector<uint64_t> reported() {
    MutexLock lock(&mutex_);
    return reported_;
  }

 private:
  grpc::Status Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return failures_ > 0 && failures_-- > 0 ? grpc::Status(code_, message_)
                                            : grpc::Status::OK;
  }

  Mutex mutex_;
  CondVar changed_;
  int failures_ ABSL_GUARDED_BY(mutex_) = 0;
  grpc::StatusCode code_ ABSL_GUARDED_BY(mutex_) = grpc::StatusCode::OK;
  std::string message_ ABSL_GUARDED_BY(mutex_);
  int polls_ ABSL_GUARDED_BY(mutex_) = 0;  // Answered.
  uint64_t number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<uint64_t> reported_ ABSL_GUARDED_BY(mutex_);
};

class MemberTest : public ::testing::Test {
 protected:
  MemberTest() : endpoint_(*Endpoint::Start("127.0.0.1", 0, {&service_})) {
    options_.coordinator = endpoint_->address();
    options_.join.set_name("worker-0");
    options_.silence_max = absl::Seconds(10);
    options_.on_directive = [this](const v1::PollReply& reply) {
      MutexLock lock(&mutex_);
      steps_.push_back(reply.worker().step());
      changed_.NotifyAll();
    };
    options_.on_end = [this](const absl::Status& status) {
      MutexLock lock(&mutex_);
      end_ = status;
      changed_.NotifyAll();
    };
  }

  static v1::ReportRequest Confirm(uint64_t step) {
    v1::ReportRequest request;
    request.mutable_confirm()->set_step(step);
    return request;
  }
  absl::Status WaitForEnd() {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
    MutexLock lock(&mutex_);
    while (end_.ok() && MonotonicNow() < deadline) {
      changed_.WaitFor(&mutex_, absl::Seconds(1));
    }
    return end_;
  }

  // Whether `service` answers polls from now on.
  bool IsPolled(ScriptedCoordinator* service, absl::Duration within) {
    const int before = service->polls();
    const absl::Time deadline = MonotonicNow() + within;
    MutexLock lock(&mutex_);
    while (service->polls() == before && MonotonicNow() < deadline) {
      changed_.WaitFor(&mutex_, absl::Milliseconds(10));
    }
    return service->polls() > before;
  }

  ScriptedCoordinator service_;
  std::unique_ptr<Endpoint> endpoint_;
  MemberSession::Options options_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<uint64_t> steps_ ABSL_GUARDED_BY(mutex_);
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(MemberTest, EachDirectiveIsDeliveredOnceInOrder) {
  const auto session = MemberSession::Start(options_);
  ASSERT_TRUE(session.ok()) << session.status();
  {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
    MutexLock lock(&mutex_);
    while (steps_.size() < 3 && MonotonicNow() < deadline) {
      changed_.WaitFor(&mutex_, absl::Seconds(1));
    }
  }
  (*session)->Stop();
  MutexLock lock(&mutex_);
  EXPECT_THAT(steps_, ElementsAre(10, 20, 30));
  EXPECT_TRUE(end_.ok());
}

TEST_F(MemberTest, AnUnavailableCoordinatorIsAskedAgain) {
  service_.FailNext(2, grpc::StatusCode::UNAVAILABLE);
  const auto session = MemberSession::Start(options_);
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ((*session)->admission().incarnation(), 5u);
  service_.FailNext(3, grpc::StatusCode::UNAVAILABLE);
  (*session)->Post(Confirm(1));
  (*session)->Post(Confirm(2));
  EXPECT_TRUE((*session)->Report(Confirm(3), absl::Seconds(10)).ok());
  EXPECT_THAT(service_.reported(), ElementsAre(1, 2, 3));
}

TEST_F(MemberTest, ARefusedJoinIsNotRepeated) {
  service_.FailNext(1, grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(MemberSession::Start(options_).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(MemberTest, AFencedMemberIsToldOnceAndItsReportsEnd) {
  const auto session = MemberSession::Start(options_);
  ASSERT_TRUE(session.ok()) << session.status();
  service_.FailNext(1 << 20, grpc::StatusCode::ABORTED);
  EXPECT_EQ(WaitForEnd().code(), absl::StatusCode::kAborted);
  EXPECT_EQ((*session)->Report(Confirm(1), absl::Seconds(5)).code(),
            absl::StatusCode::kAborted);
  EXPECT_THAT(service_.reported(), ElementsAre());
}

TEST_F(MemberTest, SilenceEndsTheSessionAndNamesTheCoordinator) {
  options_.silence_max = absl::Milliseconds(300);
  const auto session = MemberSession::Start(options_);
  ASSERT_TRUE(session.ok()) << session.status();
  const std::string address = endpoint_->address();
  endpoint_->Stop(absl::ZeroDuration());
  const absl::Status end = WaitForEnd();
  EXPECT_EQ(end.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(end.message()), HasSubstr(address));
}

TEST_F(MemberTest, AnotherCoordinatorIsFoundWhenTheFirstIsGone) {
  ScriptedCoordinator second;
  const auto other = *Endpoint::Start("127.0.0.1", 0, {&second});
  options_.coordinator =
      absl::StrCat(endpoint_->address(), ",", other->address());
  const auto session = MemberSession::Start(options_);
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ(second.polls(), 0);
  endpoint_->Stop(absl::ZeroDuration());
  EXPECT_TRUE(IsPolled(&second, absl::Seconds(10)));
  EXPECT_TRUE((*session)->Report(Confirm(1), absl::Seconds(10)).ok());
  EXPECT_THAT(second.reported(), ElementsAre(1));
  (*session)->Stop();
}

TEST_F(MemberTest, AStandbySaysWhoLeads) {
  ScriptedCoordinator leader;
  const auto other = *Endpoint::Start("127.0.0.1", 0, {&leader});
  service_.FailNext(1 << 20, grpc::StatusCode::UNAVAILABLE,
                    absl::StrCat("standby; leader is ", other->address()));
  const auto session = MemberSession::Start(options_);
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_TRUE((*session)->Report(Confirm(1), absl::Seconds(10)).ok());
  EXPECT_THAT(leader.reported(), ElementsAre(1));
  (*session)->Stop();
}

TEST_F(MemberTest, ACoordinatorThatComesBackOnItsPortIsFoundAtOnce) {
  const auto session = MemberSession::Start(options_);
  ASSERT_TRUE(session.ok()) << session.status();
  const std::string address = endpoint_->address();
  const auto port =
      static_cast<uint32_t>(std::stoul(address.substr(address.rfind(':') + 1)));
  std::vector<uint64_t> reported;
  // Again and again: a connection may be attempted at any moment of it.
  for (uint64_t step = 1; step <= 4; ++step) {
    endpoint_->Stop(absl::ZeroDuration());
    (*session)->Post(Confirm(step));
    // Away for long enough that a back-off without bound would show.
    EXPECT_FALSE(IsPolled(&service_, absl::Milliseconds(300) * step));
    endpoint_ = *Endpoint::Start("127.0.0.1", port, {&service_});
    // Usually 0.1 s; a loaded machine gets time.
    EXPECT_TRUE(IsPolled(&service_, absl::Seconds(2)));
    EXPECT_TRUE((*session)->Report(Confirm(100 + step), absl::Seconds(2)).ok());
    reported.push_back(step);
    reported.push_back(100 + step);
  }
  EXPECT_EQ(service_.reported(), reported);
  (*session)->Stop();
}

TEST_F(MemberTest, ThePlacementIsAskedForOnceByWhoCannotWait) {
  const auto session = MemberSession::Start(options_);
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ((*session)->TryPlacement(absl::Seconds(5)).status().code(),
            absl::StatusCode::kUnimplemented);
  endpoint_->Stop(absl::ZeroDuration());
  EXPECT_EQ((*session)->TryPlacement(absl::Seconds(5)).status().code(),
            absl::StatusCode::kUnavailable);
  (*session)->Stop();
}

}  // namespace
}  // namespace ballast
