// SPDX-License-Identifier: Apache-2.0
// What ends a run early: stops, deaths, silence, skips and broken members.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ps/membership/coordinator_core.h"
#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::ballast::testing::CoreHarness;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CoreFailureTest : public ::testing::Test {
 protected:
  Phase phase() const { return cluster_.core->phase(); }
  std::string failure() const {
    return std::string(cluster_.core->failure().message());
  }
  void AdvanceWithout(uint64_t silent, absl::Duration by) {
    cluster_.AdvanceWithout(silent, by);
  }
  void FailAs(const std::string& why) {
    cluster_.core->Fail(absl::UnavailableError(why), cluster_.now);
    cluster_.Carry();
  }
  void Stop(bool abort = false) {
    v1::StopRequest request;
    request.set_reason("test");
    request.set_abort(abort);
    cluster_.core->Stop(request, cluster_.now);
    cluster_.Carry();
  }
  void LeaveAll() {
    for (const auto* group : {&cluster_.workers, &cluster_.servers}) {
      for (const uint64_t incarnation : *group) {
        (void)cluster_.Leave(incarnation);
      }
    }
  }
  CoreHarness cluster_;
};

TEST_F(CoreFailureTest, EveryoneIsToldToExitAndWhy) {
  cluster_.Train();
  FailAs("the disk is gone");
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_EXIT);
  EXPECT_EQ(cluster_.WorkerOf(0).reason(), failure());
  EXPECT_EQ(cluster_.ServerOf(0).task(), v1::SERVER_EXIT);
  EXPECT_EQ(cluster_.ServerOf(0).reason(), failure());
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).failure(), failure());
  ASSERT_FALSE(cluster_.core->ended());
  LeaveAll();
  EXPECT_TRUE(cluster_.core->ended());
}

TEST_F(CoreFailureTest, AFailedRunEndsThoughNobodyLeaves) {
  cluster_.Train();
  FailAs("the disk is gone");
  AdvanceWithout(0, absl::Seconds(5));
  EXPECT_FALSE(cluster_.core->ended());
  AdvanceWithout(0, absl::Seconds(1));
  EXPECT_TRUE(cluster_.core->ended());
}

TEST_F(CoreFailureTest, ADeathThatShowsAfterItsConsequenceIsNamedToo) {
  cluster_.Train();
  v1::ReportRequest fatal = cluster_.Of(cluster_.workers[0]);
  fatal.mutable_fatal()->set_code(15);
  fatal.mutable_fatal()->set_message("h.0 has bits that cannot be");
  ASSERT_TRUE(cluster_.Send(fatal).ok());
  ASSERT_EQ(phase(), Phase::kFailed);
  ASSERT_TRUE(cluster_.Leave(cluster_.workers[1]).ok());
  ASSERT_TRUE(cluster_.Leave(cluster_.servers[0]).ok());
  EXPECT_FALSE(cluster_.core->ended());
  AdvanceWithout(cluster_.servers[1], absl::Seconds(5));
  EXPECT_TRUE(cluster_.core->ended());
  EXPECT_THAT(failure(),
              AllOf(HasSubstr("worker-0 (pid 42 on here) cannot go on after "
                              "step 0: h.0 has bits that cannot be"),
                    HasSubstr("server-1 (pid 42 on here): it has been silent "
                              "for 5s")));
  EXPECT_EQ(cluster_.core->failure().code(), absl::StatusCode::kDataLoss);
}

TEST_F(CoreFailureTest, AFatalReportWithoutACodeIsInternal) {
  cluster_.Train();
  v1::ReportRequest fatal = cluster_.Of(cluster_.servers[0]);
  fatal.mutable_fatal()->set_message("disk");
  ASSERT_TRUE(cluster_.Send(fatal).ok());
  EXPECT_EQ(cluster_.core->failure().code(), absl::StatusCode::kInternal);
}

TEST_F(CoreFailureTest, AMemberThatLeavesWhileFormingFreesItsPlace) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.Join(v1::ROLE_SERVER, 0);
  ASSERT_TRUE(cluster_.Leave(cluster_.servers[0]).ok());
  EXPECT_EQ(phase(), Phase::kForming);
  v1::JoinRequest again = cluster_.JoinOf(v1::ROLE_SERVER, 0);
  again.set_life_id(77);
  EXPECT_TRUE(cluster_.TryJoin(again).ok());
}

TEST_F(CoreFailureTest, FormingIsBoundedAndNamesWhoIsMissing) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.Join(v1::ROLE_SERVER, 1);
  cluster_.Join(v1::ROLE_WORKER, 0);
  cluster_.Join(v1::ROLE_WORKER, 1);
  cluster_.Advance(absl::Seconds(1));  // From here on it is waited.
  cluster_.Advance(absl::Minutes(10) - absl::Seconds(1));
  EXPECT_EQ(phase(), Phase::kForming);
  cluster_.Advance(absl::Seconds(1));
  EXPECT_EQ(phase(), Phase::kFailed);
  EXPECT_THAT(failure(), AllOf(HasSubstr("gave up after 10m"),
                               HasSubstr("cluster.give_up_after"),
                               HasSubstr("1 of 2 servers have joined, missing "
                                         "server-0")));
}

TEST_F(CoreFailureTest, NoProgressEndsTheRunAtTheTimeoutNotBefore) {
  cluster_.Train();
  // Nobody is stuck: each waits for another.
  v1::MemberStats waits;
  waits.set_waits_for("server-1: the weights of h.0");
  for (const uint64_t worker : cluster_.workers) {
    cluster_.Stats(worker, waits);
  }
  waits.set_waits_for("disk: a sync");
  cluster_.Stats(cluster_.servers[1], waits);
  cluster_.Advance(absl::Seconds(59));
  EXPECT_EQ(phase(), Phase::kTraining);
  cluster_.Advance(absl::Seconds(1));
  ASSERT_EQ(phase(), Phase::kFailed);
  EXPECT_THAT(failure(), AllOf(HasSubstr("worker-0 owes gradients of step 1"),
                               HasSubstr("worker-1 owes gradients of step 1"),
                               Not(HasSubstr("server-0"))));
  EXPECT_EQ(cluster_.core->failure().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(CoreFailureTest, BlameGoesToServersWhenWorkersAreDone) {
  cluster_.Train();
  v1::MemberStats waits;
  waits.set_waits_for("disk: a sync");
  cluster_.Stats(cluster_.servers[1], waits);
  ASSERT_TRUE(cluster_.Done(0, 1).ok());
  ASSERT_TRUE(cluster_.Done(1, 1).ok());
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  cluster_.Advance(absl::Seconds(60));
  EXPECT_THAT(failure(), AllOf(HasSubstr("server-1 owes its vote for step 1"),
                               Not(HasSubstr("worker"))));
}

TEST_F(CoreFailureTest, UnitsMovedCountAsProgress) {
  cluster_.Train();
  for (uint64_t i = 1; i <= 100; ++i) {
    cluster_.Advance(absl::Seconds(1));
    v1::MemberStats stats;
    stats.set_fetched_bytes(i);
    for (const uint64_t worker : cluster_.workers) {
      cluster_.Stats(worker, stats);
    }
  }
  EXPECT_EQ(phase(), Phase::kTraining);
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).faults_size(), 0);
}

TEST_F(CoreFailureTest, RepeatedReportsAreNoProgress) {
  cluster_.Train();
  v1::MemberStats waits;
  waits.set_waits_for("server-1: credit");
  for (const uint64_t worker : cluster_.workers) {
    cluster_.Stats(worker, waits);
  }
  waits.set_waits_for("worker-0: gradients of h.0");
  cluster_.Stats(cluster_.servers[1], waits);
  for (int i = 0; i < 60; ++i) {
    cluster_.Advance(absl::Seconds(1));
    (void)cluster_.Vote(0, 1);
  }
  // The first vote came after one second and counted.
  EXPECT_EQ(phase(), Phase::kTraining);
  cluster_.Advance(absl::Seconds(1));
  EXPECT_EQ(phase(), Phase::kFailed);
}

TEST_F(CoreFailureTest, SkippedStepsInARowEndTheRunByTensorAndStep) {
  cluster_.Train();
  const auto skip = [this](uint64_t step) {
    ASSERT_TRUE(cluster_.Vote(0, step).ok());
    ASSERT_TRUE(cluster_.VoteNonFinite(1, step, 1, 7).ok());
    if (phase() == Phase::kEvaluating) {
      cluster_.EvaluateAll(step);
    }
  };
  skip(1);
  cluster_.Step(2);  // One good step starts the count anew.
  skip(3);
  skip(4);
  EXPECT_EQ(phase(), Phase::kTraining);
  skip(5);
  ASSERT_EQ(phase(), Phase::kFailed);
  EXPECT_THAT(failure(), AllOf(HasSubstr("step 5"), HasSubstr("h.0.weight"),
                               HasSubstr("cluster.skip_max")));
  // It was decided all the same, and its line is not lost.
  EXPECT_EQ(cluster_.core->committed(), 5u);
  EXPECT_EQ(cluster_.metrics.back().decision.step(), 5u);
  EXPECT_TRUE(cluster_.metrics.back().decision.skip());
}

TEST_F(CoreFailureTest, AReportOfAnotherTimelineIsFenced) {
  cluster_.Train();
  v1::ReportRequest request = cluster_.Of(cluster_.servers[0]);
  request.set_timeline(2);
  request.mutable_confirm()->set_step(0);
  EXPECT_EQ(cluster_.Send(request).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(phase(), Phase::kTraining);
}

TEST_F(CoreFailureTest, AnUnknownIncarnationIsFenced) {
  cluster_.Train();
  EXPECT_EQ(cluster_.Send(cluster_.Of(7)).code(), absl::StatusCode::kAborted);
  v1::PollRequest poll;
  poll.set_incarnation(7);
  EXPECT_EQ(cluster_.core->Heartbeat(poll, cluster_.now).code(),
            absl::StatusCode::kAborted);
  EXPECT_EQ(cluster_.core->Directive(7, 0).status().code(),
            absl::StatusCode::kAborted);
}

TEST_F(CoreFailureTest, AVoteBeyondTheStepLogIsDataLoss) {
  cluster_.Train();
  EXPECT_EQ(cluster_.Vote(0, 2).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(cluster_.core->failure().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(failure(), HasSubstr("server-0"));
}

TEST_F(CoreFailureTest, AConfirmBeyondTheStepLogIsDataLoss) {
  cluster_.Train();
  EXPECT_EQ(cluster_.Confirm(0, 1).code(), absl::StatusCode::kDataLoss);
}

TEST_F(CoreFailureTest, AServerThatLoadsAnotherVersionIsBroken) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.JoinAll();
  EXPECT_EQ(cluster_.Load(cluster_.servers[0], 3).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(phase(), Phase::kFailed);
}

TEST_F(CoreFailureTest, AWorkerCannotVote) {
  cluster_.Train();
  v1::ReportRequest request = cluster_.Of(cluster_.workers[0]);
  request.mutable_vote()->set_step(1);
  EXPECT_EQ(cluster_.Send(request).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CoreFailureTest, TwoLossesEndTheRun) {
  cluster_.Train();
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  v1::ReportRequest request = cluster_.Of(cluster_.servers[0]);
  ASSERT_TRUE(cluster_.VoteNonFinite(0, 1, 0, 0).ok());
  EXPECT_EQ(cluster_.core->committed(), 1u);
  ASSERT_TRUE(cluster_.VoteNonFinite(1, 2, 0, 0).ok());
  request.mutable_vote()->set_step(2);
  request.mutable_vote()->set_sum_squares(ExactSum().Encode());
  EXPECT_TRUE(cluster_.Send(request).ok());
  ASSERT_EQ(phase(), Phase::kFailed);
  EXPECT_THAT(failure(), HasSubstr("0 servers voted with the loss"));
}

TEST_F(CoreFailureTest, AManifestThatCannotBeWrittenEndsTheRun) {
  cluster_.hold_manifests = true;
  cluster_.Train();
  cluster_.Step(1);
  cluster_.Step(2);
  ASSERT_EQ(cluster_.held.size(), 1u);
  cluster_.core->ManifestWritten(
      {1, 2}, absl::ResourceExhaustedError("disk full"), cluster_.now);
  EXPECT_THAT(failure(), HasSubstr("the manifest of step 2 cannot be written: "
                                   "disk full"));
}

TEST_F(CoreFailureTest, JoinsAreRefusedOnceTheRunIsOver) {
  cluster_.options.keep_up = true;
  cluster_.Train();
  cluster_.RunToDone();
  EXPECT_EQ(
      cluster_.TryJoin(cluster_.JoinOf(v1::ROLE_WORKER, 5)).status().code(),
      absl::StatusCode::kUnavailable);
  // A repeated join of a life that is in is answered as before.
  const auto repeated = cluster_.TryJoin(cluster_.JoinOf(v1::ROLE_WORKER, 1));
  ASSERT_TRUE(repeated.ok());
  EXPECT_EQ(repeated->incarnation(), cluster_.workers[1]);
}

TEST_F(CoreFailureTest, StopFinishesTheStepInFlightAndCheckpointsIt) {
  cluster_.Train();
  Stop();
  Stop();  // Again: no further effect.
  EXPECT_EQ(phase(), Phase::kTraining);
  cluster_.Step(1);
  EXPECT_TRUE(cluster_.core->last_decision().checkpoint());
  EXPECT_EQ(phase(), Phase::kFinishing);  // Without an evaluation.
  ASSERT_TRUE(cluster_.Digest(0, 1).ok());
  ASSERT_TRUE(cluster_.Digest(1, 1).ok());
  EXPECT_EQ(phase(), Phase::kDone);
  EXPECT_TRUE(cluster_.manifests.contains(testing::ManifestPath({1, 1})));
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_EXIT);
  EXPECT_TRUE(cluster_.core->failure().ok());
}

TEST_F(CoreFailureTest, StopEndsAKeptRunAfterItsLastStepToo) {
  cluster_.options.keep_up = true;
  cluster_.Train();
  Stop();
  cluster_.Step(1);
  ASSERT_TRUE(cluster_.Digest(0, 1).ok());
  ASSERT_TRUE(cluster_.Digest(1, 1).ok());
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_EXIT);
}

TEST_F(CoreFailureTest, StopWhileACheckpointedVersionIsEvaluatedEndsThere) {
  cluster_.Train();
  cluster_.Step(1);
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  ASSERT_EQ(phase(), Phase::kEvaluating);
  Stop();
  cluster_.EvaluateAll(2);
  EXPECT_EQ(phase(), Phase::kFinishing);
  EXPECT_EQ(cluster_.core->committed(), 2u);
}

TEST_F(CoreFailureTest, StopWhileAVersionWithoutCheckpointIsEvaluatedSteps) {
  cluster_.job.checkpoint.every = 0;
  cluster_.Train();
  cluster_.Step(1);
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  ASSERT_EQ(phase(), Phase::kEvaluating);
  Stop();
  cluster_.EvaluateAll(2);
  EXPECT_EQ(phase(), Phase::kTraining);
  cluster_.Step(3);
  EXPECT_TRUE(cluster_.core->last_decision().checkpoint());
  EXPECT_EQ(phase(), Phase::kFinishing);
}

TEST_F(CoreFailureTest, StopBeforeTheFirstStepEndsAtOnce) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.Join(v1::ROLE_SERVER, 0);
  Stop();
  EXPECT_EQ(phase(), Phase::kDone);
  EXPECT_EQ(cluster_.ServerOf(0).task(), v1::SERVER_EXIT);
  EXPECT_EQ(
      cluster_.TryJoin(cluster_.JoinOf(v1::ROLE_SERVER, 1)).status().code(),
      absl::StatusCode::kUnavailable);
  ASSERT_TRUE(cluster_.Leave(cluster_.servers[0]).ok());
  EXPECT_TRUE(cluster_.core->ended());
}

TEST_F(CoreFailureTest, StopWhileLoadingEndsAtOnce) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.JoinAll();
  Stop();
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_EXIT);
  LeaveAll();
  EXPECT_TRUE(cluster_.core->ended());
  EXPECT_TRUE(cluster_.core->failure().ok());
}

TEST_F(CoreFailureTest, AbortEndsWithoutFinishingTheStep) {
  cluster_.Train();
  Stop(/*abort=*/true);
  EXPECT_EQ(phase(), Phase::kFailed);
  EXPECT_EQ(cluster_.core->failure().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_EXIT);
}

TEST_F(CoreFailureTest, ADeathAfterTheEndFailsNothing) {
  cluster_.options.keep_up = true;
  cluster_.Train();
  cluster_.RunToDone();
  AdvanceWithout(cluster_.workers[0], absl::Seconds(5));
  EXPECT_EQ(phase(), Phase::kDone);
  EXPECT_TRUE(cluster_.core->failure().ok());
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).members(2).state(), "gone");
}

TEST_F(CoreFailureTest, TheFirstFailureStays) {
  cluster_.Train();
  cluster_.core->Fail(absl::InternalError("first"), cluster_.now);
  cluster_.core->Fail(absl::DataLossError("second"), cluster_.now);
  EXPECT_EQ(failure(), "first");
}

}  // namespace
}  // namespace ballast
