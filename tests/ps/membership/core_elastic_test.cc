// SPDX-License-Identifier: Apache-2.0
// Workers that die, come, go and get stuck while a step is computed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ps/membership/coordinator_core.h"
#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::ballast::testing::CoreHarness;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Spans = std::vector<std::pair<uint32_t, uint32_t>>;

class CoreElasticTest : public ::testing::Test {
 protected:
  Phase phase() const { return cluster_.core->phase(); }
  Spans SpansOf(int worker) const {
    Spans spans;
    const v1::WorkerDirective directive = cluster_.WorkerOf(worker);
    for (const v1::MicroBatchSpan& span : directive.spans()) {
      spans.emplace_back(span.first(), span.count());
    }
    return spans;
  }
  std::string state(uint64_t incarnation) const {
    const v1::StatusReply status = Status();
    for (const v1::MemberStatus& member : status.members()) {
      if (member.incarnation() == incarnation) {
        return member.state();
      }
    }
    return "unknown";
  }
  v1::StatusReply Status() const {
    return cluster_.core->GetStatus(cluster_.now);
  }
  absl::StatusOr<v1::ScaleReply> Scale(v1::Role role, uint32_t add,
                                       const std::string& drain) {
    v1::ScaleRequest request;
    request.set_role(role);
    request.set_add(add);
    request.set_drain(drain);
    auto reply = cluster_.core->Scale(request, cluster_.now);
    cluster_.Carry();
    return reply;
  }
  void Draining(uint64_t incarnation) {
    v1::ReportRequest request = cluster_.Of(incarnation);
    request.mutable_draining()->set_reason("SIGTERM");
    ASSERT_TRUE(cluster_.Send(request).ok());
  }
  CoreHarness cluster_;
};

TEST_F(CoreElasticTest, OnlyTheDeadWorkersSpansAreDealtAgain) {
  cluster_.job.worker.count = 3;
  cluster_.Train();
  const Spans first = SpansOf(0);
  const Spans third = SpansOf(2);
  cluster_.Kill(v1::ROLE_WORKER, 1);  // It had 2 to 4.
  EXPECT_EQ(phase(), Phase::kTraining);
  EXPECT_THAT(SpansOf(0), ElementsAre(first[0], std::pair(2u, 2u)));
  EXPECT_THAT(SpansOf(2), ElementsAre(std::pair(4u, 1u), third[0], third[1]));
  EXPECT_EQ(cluster_.WorkerOf(0).step(), 1u);
  EXPECT_EQ(cluster_.core->Directive(cluster_.workers[1], 0).status().code(),
            absl::StatusCode::kAborted);
}

TEST_F(CoreElasticTest, WhatADeadWorkerHadDoneIsNotDealtAgain) {
  cluster_.Train();
  ASSERT_TRUE(cluster_.Done(1, 1).ok());
  cluster_.Kill(v1::ROLE_WORKER, 1);
  EXPECT_THAT(SpansOf(0), ElementsAre(std::pair(0u, 4u)));
}

TEST_F(CoreElasticTest, AnAnswerToAnEarlierDirectiveDoesNotCountAsDone) {
  cluster_.Train();
  v1::ReportRequest done = cluster_.Of(cluster_.workers[1]);
  done.mutable_worker_done()->set_timeline(1);
  done.mutable_worker_done()->set_step(1);
  done.mutable_worker_done()->set_number(
      cluster_.NumberOf(cluster_.workers[1]) - 1);
  ASSERT_TRUE(cluster_.Send(done).ok());
  cluster_.Kill(v1::ROLE_WORKER, 1);
  EXPECT_THAT(SpansOf(0), ElementsAre(std::pair(0u, 4u), std::pair(4u, 4u)));
}

TEST_F(CoreElasticTest, ADeathCostsNobodyElseItsWork) {
  cluster_.Train();
  ASSERT_TRUE(cluster_.Done(0, 1).ok());
  const uint64_t number = cluster_.NumberOf(cluster_.servers[0]);
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  cluster_.Kill(v1::ROLE_WORKER, 1);
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  EXPECT_EQ(cluster_.core->committed(), 1u);
  EXPECT_GT(cluster_.NumberOf(cluster_.servers[0]), number);
}

TEST_F(CoreElasticTest, AJoiningWorkerTakesPartFromTheNextStep) {
  cluster_.Train();
  ASSERT_TRUE(cluster_.Return(cluster_.JoinOf(v1::ROLE_WORKER, 2)).ok());
  ASSERT_TRUE(cluster_.Return(cluster_.JoinOf(v1::ROLE_WORKER, 3)).ok());
  EXPECT_EQ(cluster_.WorkerOf(2).task(), v1::WORKER_WAIT);
  EXPECT_THAT(SpansOf(0), ElementsAre(std::pair(0u, 4u)));
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  for (int worker = 0; worker < 4; ++worker) {
    EXPECT_THAT(SpansOf(worker),
                ElementsAre(std::pair(static_cast<uint32_t>(2 * worker), 2u)));
  }
  EXPECT_THAT(Status().wanted(),
              ElementsAre("server-0", "server-1", "worker-0", "worker-1",
                          "worker-2", "worker-3"));
}

TEST_F(CoreElasticTest, AJoiningWorkerTakesPartAtOnceWhenThereIsNone) {
  cluster_.Train();
  cluster_.Kill(v1::ROLE_WORKER, 0);
  cluster_.Kill(v1::ROLE_WORKER, 1);
  EXPECT_EQ(phase(), Phase::kTraining);
  EXPECT_THAT(Status().waits_for(),
              HasSubstr("0 of 1 needed workers are in, missing worker-0"));
  ASSERT_TRUE(cluster_.Return(cluster_.NextLifeOf(v1::ROLE_WORKER, 1)).ok());
  EXPECT_THAT(SpansOf(1), ElementsAre(std::pair(0u, 8u)));
}

TEST_F(CoreElasticTest, WithFewerThanMinWorkersNothingIsDealt) {
  cluster_.job.cluster.min_workers = 2;
  cluster_.Train();
  cluster_.Kill(v1::ROLE_WORKER, 1);
  EXPECT_THAT(SpansOf(0), ElementsAre(std::pair(0u, 4u)));  // Its own.
  ASSERT_TRUE(cluster_.Return(cluster_.NextLifeOf(v1::ROLE_WORKER, 1)).ok());
  EXPECT_THAT(SpansOf(0), ElementsAre(std::pair(0u, 4u)));
  EXPECT_THAT(SpansOf(1), ElementsAre(std::pair(4u, 4u)));
  cluster_.Kill(v1::ROLE_WORKER, 0);
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  EXPECT_EQ(cluster_.core->committed(), 1u);
  EXPECT_THAT(SpansOf(1), IsEmpty());
}

TEST_F(CoreElasticTest, TheWaitForWorkersIsBoundedAndResumable) {
  cluster_.Train();
  cluster_.Kill(v1::ROLE_WORKER, 0);
  cluster_.Kill(v1::ROLE_WORKER, 1);
  cluster_.Advance(absl::Seconds(1));
  cluster_.Advance(absl::Minutes(10) - absl::Seconds(1));
  EXPECT_EQ(phase(), Phase::kTraining);
  cluster_.Advance(absl::Seconds(1));
  ASSERT_EQ(phase(), Phase::kFailed);
  EXPECT_THAT(
      std::string(cluster_.core->failure().message()),
      AllOf(HasSubstr("0 of 1 needed workers are in"), HasSubstr("--resume")));
}

TEST_F(CoreElasticTest, FormsWithMinWorkersAfterAWhile) {
  cluster_.job.worker.count = 3;
  cluster_.job.cluster.min_workers = 2;
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.Join(v1::ROLE_SERVER, 0);
  cluster_.Join(v1::ROLE_SERVER, 1);
  cluster_.Join(v1::ROLE_WORKER, 0);
  cluster_.Advance(absl::Seconds(6));
  EXPECT_EQ(phase(), Phase::kForming);  // Too few.
  cluster_.Join(v1::ROLE_WORKER, 1);
  cluster_.Advance(absl::Seconds(5) - absl::Nanoseconds(1));
  EXPECT_EQ(phase(), Phase::kForming);
  cluster_.Advance(absl::Nanoseconds(1));
  EXPECT_EQ(phase(), Phase::kLoading);
}

TEST_F(CoreElasticTest, MissingLossesOfADeadWorkerAreDealtAgain) {
  cluster_.Train();
  cluster_.Step(1);
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  ASSERT_EQ(phase(), Phase::kEvaluating);
  ASSERT_TRUE(cluster_.Evaluate(0, 2).ok());
  cluster_.Kill(v1::ROLE_WORKER, 1);
  EXPECT_THAT(SpansOf(0), ElementsAre(std::pair(0u, 2u), std::pair(2u, 2u)));
  ASSERT_TRUE(cluster_.Evaluate(0, 2).ok());
  EXPECT_EQ(phase(), Phase::kTraining);
  EXPECT_EQ(cluster_.evaluations.size(), 1u);
}

TEST_F(CoreElasticTest, ASilentMemberIsDeadAfterALease) {
  cluster_.Train();
  cluster_.AdvanceWithout(cluster_.workers[1],
                          absl::Seconds(5) - absl::Nanoseconds(1));
  EXPECT_EQ(Status().faults_size(), 0);
  cluster_.AdvanceWithout(cluster_.workers[1], absl::Nanoseconds(1));
  EXPECT_EQ(cluster_.LastFault().kind(), "silent");
  EXPECT_EQ(cluster_.LastFault().member(), "worker-1");
  EXPECT_EQ(phase(), Phase::kTraining);
}

TEST_F(CoreElasticTest, APausedCoordinatorBlamesNobody) {
  cluster_.Train();
  cluster_.now += absl::Seconds(20);
  cluster_.core->Tick(cluster_.now);
  EXPECT_EQ(Status().faults_size(), 0);
  cluster_.AdvanceWithout(cluster_.workers[1], absl::Seconds(5));
  EXPECT_EQ(Status().faults_size(), 1);
}

TEST_F(CoreElasticTest, ABrokenConnectionIsADeathUnlessTheMemberReturns) {
  cluster_.Train();
  const absl::Duration patience = CoordinatorCore::kReturnMax;
  cluster_.core->ConnectionLost(cluster_.workers[0], cluster_.now);
  cluster_.core->ConnectionLost(cluster_.workers[1], cluster_.now);
  v1::PollRequest poll;
  poll.set_incarnation(cluster_.workers[0]);
  cluster_.now += patience - absl::Nanoseconds(1);
  ASSERT_TRUE(cluster_.core->Heartbeat(poll, cluster_.now).ok());
  cluster_.core->Tick(cluster_.now);
  EXPECT_EQ(Status().faults_size(), 0);
  cluster_.now += absl::Nanoseconds(1);
  cluster_.core->Tick(cluster_.now);
  cluster_.Carry();
  EXPECT_EQ(Status().faults_size(), 1);
  EXPECT_EQ(cluster_.LastFault().kind(), "lost");
  EXPECT_EQ(cluster_.LastFault().member(), "worker-1");
  EXPECT_THAT(cluster_.probes, IsEmpty());  // Workers have no address.
}

TEST_F(CoreElasticTest, AnExitReportIsActedOnAtOnceWhenItMeansThisLife) {
  cluster_.Train();
  v1::ExitReport report;
  report.set_name("worker-1");
  report.set_pid(41);  // Another life of that name.
  report.set_signal(9);
  cluster_.core->ExitReported(report, cluster_.now);
  EXPECT_EQ(Status().faults_size(), 0);
  report.set_pid(42);
  report.set_host("elsewhere");
  cluster_.core->ExitReported(report, cluster_.now);
  EXPECT_EQ(Status().faults_size(), 0);
  report.set_host("here");
  cluster_.core->ExitReported(report, cluster_.now);
  EXPECT_EQ(cluster_.LastFault().kind(), "killed");
  EXPECT_EQ(cluster_.LastFault().detail(), "signal 9");
  EXPECT_EQ(cluster_.LastFault().recovered_seconds(), -1);
}

TEST_F(CoreElasticTest, AnExitReportExplainsADeathThatShowedBefore) {
  cluster_.Train();
  cluster_.core->ConnectionLost(cluster_.workers[1], cluster_.now);
  cluster_.now += absl::Milliseconds(300);
  cluster_.core->Tick(cluster_.now);
  EXPECT_EQ(cluster_.LastFault().kind(), "lost");
  cluster_.Kill(v1::ROLE_WORKER, 1);
  EXPECT_EQ(Status().faults_size(), 1);
  EXPECT_EQ(cluster_.LastFault().kind(), "killed");
}

TEST_F(CoreElasticTest, AFaultCostsTheTimeToTheNextCommittedStep) {
  cluster_.Train();
  cluster_.Kill(v1::ROLE_WORKER, 1);
  cluster_.now += absl::Milliseconds(250);
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  EXPECT_EQ(cluster_.LastFault().recovered_seconds(), -1);
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  EXPECT_DOUBLE_EQ(cluster_.LastFault().recovered_seconds(), 0.25);
  EXPECT_EQ(cluster_.LastFault().step(), 0u);
  const RunState state =
      *ParseRunState({cluster_.pairs.begin(), cluster_.pairs.end()});
  ASSERT_EQ(state.faults.size(), 1u);
  EXPECT_DOUBLE_EQ(state.faults.begin()->second.recovered_seconds(), 0.25);
}

TEST_F(CoreElasticTest, AMemberWithItsInputsThatStandsStillIsStuck) {
  cluster_.Train();
  v1::MemberStats stats;
  for (uint64_t unit = 1; unit <= 10; ++unit) {
    cluster_.Advance(absl::Milliseconds(200));
    stats.set_units_done(unit);
    cluster_.Stats(cluster_.workers[0], stats);
    cluster_.Stats(cluster_.workers[1], stats);
  }
  // From now on worker-1 stands still; worker-0 waits for it.
  stats.set_waits_for("server-1: credit");
  cluster_.Stats(cluster_.workers[0], stats);
  cluster_.Advance(absl::Seconds(3));  // cluster.progress_limit.
  EXPECT_EQ(Status().faults_size(), 0);
  cluster_.Advance(absl::Milliseconds(200));
  EXPECT_EQ(Status().faults_size(), 1);
  EXPECT_EQ(cluster_.LastFault().kind(), "stuck");
  EXPECT_EQ(cluster_.LastFault().member(), "worker-1");
  EXPECT_THAT(cluster_.LastFault().detail(),
              HasSubstr("gradients of step 1 (micro-batches 4 to 7)"));
  EXPECT_EQ(state(cluster_.workers[0]), "active");
}

TEST_F(CoreElasticTest, AFatalReportThatANewLifeMayHealIsADeath) {
  for (const int code : {14, 10, 4}) {
    CoreHarness cluster;
    cluster.Train();
    v1::ReportRequest fatal = cluster.Of(cluster.workers[0]);
    fatal.mutable_fatal()->set_code(code);
    fatal.mutable_fatal()->set_message("fetch of h.0: connection refused");
    ASSERT_TRUE(cluster.Send(fatal).ok());
    EXPECT_EQ(cluster.core->phase(), Phase::kTraining);
    EXPECT_EQ(cluster.LastFault().kind(), "exit");
  }
  for (const int code : {15, 9, 3, 8, 13}) {
    CoreHarness cluster;
    cluster.Train();
    v1::ReportRequest fatal = cluster.Of(cluster.workers[0]);
    fatal.mutable_fatal()->set_code(code);
    ASSERT_TRUE(cluster.Send(fatal).ok());
    EXPECT_EQ(cluster.core->phase(), Phase::kFailed) << code;
  }
}

TEST_F(CoreElasticTest, ALeaveThatNobodyAskedForIsAFault) {
  cluster_.Train();
  ASSERT_TRUE(cluster_.Leave(cluster_.workers[1]).ok());
  EXPECT_EQ(phase(), Phase::kTraining);
  EXPECT_EQ(cluster_.LastFault().kind(), "left");
  EXPECT_THAT(SpansOf(0), ElementsAre(std::pair(0u, 4u), std::pair(4u, 4u)));
}

TEST_F(CoreElasticTest, ADrainingWorkerFinishesItsWorkAndLeaves) {
  cluster_.Train();
  Draining(cluster_.workers[1]);
  EXPECT_EQ(cluster_.WorkerOf(1).task(), v1::WORKER_TRAIN);
  EXPECT_EQ(state(cluster_.workers[1]), "draining");
  ASSERT_TRUE(cluster_.Done(1, 1).ok());
  EXPECT_EQ(cluster_.WorkerOf(1).task(), v1::WORKER_EXIT);
  ASSERT_TRUE(cluster_.Leave(cluster_.workers[1]).ok());
  EXPECT_THAT(SpansOf(0), ElementsAre(std::pair(0u, 4u)));
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  EXPECT_THAT(SpansOf(0), ElementsAre(std::pair(0u, 8u)));
}

TEST_F(CoreElasticTest, ADrainedWorkerGetsNoNewWork) {
  cluster_.Train();
  const auto reply = Scale(v1::ROLE_WORKER, 0, "worker-0");
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_THAT(reply->names(), ElementsAre("worker-0"));
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_TRAIN);
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_EXIT);
  EXPECT_THAT(SpansOf(1), ElementsAre(std::pair(0u, 8u)));
  ASSERT_TRUE(cluster_.Leave(cluster_.workers[0]).ok());
  EXPECT_EQ(Status().faults_size(), 0);
  EXPECT_THAT(Status().wanted(),
              ElementsAre("server-0", "server-1", "worker-1"));
}

TEST_F(CoreElasticTest, TheLastWorkersCannotBeDrained) {
  cluster_.Train();
  ASSERT_TRUE(Scale(v1::ROLE_WORKER, 0, "worker-0").ok());
  const absl::Status status = Scale(v1::ROLE_WORKER, 0, "worker-1").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("has 1 workers and needs 1 (cluster.min_workers)"));
}

TEST_F(CoreElasticTest, AddedWorkersAreWantedByTheLowestFreeNames) {
  cluster_.Train();
  ASSERT_TRUE(Scale(v1::ROLE_WORKER, 0, "worker-0").ok());
  EXPECT_THAT(Scale(v1::ROLE_WORKER, 2, "")->names(),
              ElementsAre("worker-0", "worker-2"));
  // Eight micro-batches: five more would be nine workers.
  EXPECT_EQ(Scale(v1::ROLE_WORKER, 6, "").status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Scale(v1::ROLE_WORKER, 5, "").ok());
}

TEST_F(CoreElasticTest, ScaleRefusesWhatMakesNoSense) {
  cluster_.Train();
  EXPECT_EQ(Scale(v1::ROLE_WORKER, 0, "").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Scale(v1::ROLE_WORKER, 1, "worker-0").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(Scale(v1::ROLE_WORKER, 0, "worker-9").status().message()),
      HasSubstr("there is no worker-9 to drain; the run has server-0"));
  EXPECT_THAT(std::string(Scale(v1::ROLE_SERVER, 1, "").status().message()),
              HasSubstr("server.durability is checkpoint"));
}

TEST_F(CoreElasticTest, StatusSaysWhatEachOwesAndSinceWhen) {
  cluster_.Train();
  cluster_.Advance(absl::Milliseconds(1500));
  const v1::StatusReply status = Status();
  ASSERT_EQ(status.members_size(), 4);
  EXPECT_EQ(status.members(0).owes(), "its vote for step 1, for 1.5s");
  EXPECT_EQ(status.members(3).owes(),
            "gradients of step 1 (micro-batches 4 to 7), for 1.5s");
}

}  // namespace
}  // namespace ballast
