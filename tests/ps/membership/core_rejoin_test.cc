// SPDX-License-Identifier: Apache-2.0
// Servers that die and come back: under durability step where they were, under
// durability checkpoint everyone goes back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ps/membership/coordinator_core.h"
#include "ps/membership/step_chain.h"
#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::ballast::testing::CoreHarness;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CoreRejoinTest : public ::testing::Test {
 protected:
  CoreRejoinTest() {
    cluster_.job.server.durability = Durability::kStep;
    cluster_.job.eval.every = 0;
  }
  Phase phase() const { return cluster_.core->phase(); }
  RunState State() const {
    return *ParseRunState({cluster_.pairs.begin(), cluster_.pairs.end()});
  }
  void TrainTo(uint64_t step) {
    cluster_.Train();
    for (uint64_t i = 1; i <= step; ++i) {
      cluster_.Step(i);
    }
  }
  std::vector<uint64_t> DecisionsOf(int server) const {
    std::vector<uint64_t> steps;
    const v1::ServerDirective directive = cluster_.ServerOf(server);
    for (const v1::Decision& decision : directive.decisions()) {
      steps.push_back(decision.step());
    }
    return steps;
  }
  CoreHarness cluster_;
};

TEST_F(CoreRejoinTest, TheRunWaitsForTheServerAndGoesOn) {
  TrainTo(3);
  const v1::Placement before = *cluster_.core->GetPlacement();
  cluster_.Kill(v1::ROLE_SERVER, 1);
  EXPECT_EQ(phase(), Phase::kTraining);
  EXPECT_EQ(cluster_.core->identity().timeline, 1u);
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).waits_for(),
              HasSubstr("1 of 2 servers are in, missing server-1"));
  v1::Placement placement = *cluster_.core->GetPlacement();
  EXPECT_EQ(placement.servers(1).incarnation(), 0u);
  EXPECT_EQ(placement.placement_version(), before.placement_version());
  EXPECT_GT(placement.address_version(), before.address_version());
  const auto life = cluster_.Return(cluster_.NextLifeOf(1, 1, 3));
  ASSERT_TRUE(life.ok()) << life.status();
  placement = *cluster_.core->GetPlacement();
  EXPECT_EQ(placement.servers(1).incarnation(), *life);
  EXPECT_EQ(cluster_.WorkerOf(0).address_version(),
            placement.address_version());
  // It redoes 2 and 3 from its record of version 1.
  const v1::ServerDirective load = cluster_.ServerOf(1);
  EXPECT_EQ(load.task(), v1::SERVER_LOAD);
  EXPECT_TRUE(load.load_own());
  EXPECT_EQ(load.load_step(), 3u);
  EXPECT_THAT(DecisionsOf(1), ElementsAre(2, 3));
  ASSERT_TRUE(cluster_.Load(*life, 3).ok());
  EXPECT_EQ(cluster_.ServerOf(1).task(), v1::SERVER_RUN);
  EXPECT_EQ(cluster_.ServerOf(1).collecting_step(), 4u);
  cluster_.Step(4);
  EXPECT_EQ(cluster_.core->committed(), 4u);
}

TEST_F(CoreRejoinTest, AVoteOfALifeThatDiedCounts) {
  TrainTo(1);
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  cluster_.Kill(v1::ROLE_SERVER, 1);
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  EXPECT_EQ(cluster_.core->committed(), 2u);
  // Its next life is given the decision.
  const auto life = cluster_.Return(cluster_.NextLifeOf(1, 1, 2));
  ASSERT_TRUE(life.ok()) << life.status();
  EXPECT_THAT(DecisionsOf(1), ElementsAre(2));
}

TEST_F(CoreRejoinTest, ALifeThatHasItsVoteNeedsNothingPushedAgain) {
  TrainTo(1);
  ASSERT_TRUE(cluster_.Done(0, 2).ok());
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  cluster_.Kill(v1::ROLE_SERVER, 1);
  const auto life = cluster_.Return(cluster_.NextLifeOf(1, 1, 2));
  ASSERT_TRUE(life.ok());
  EXPECT_THAT(cluster_.WorkerOf(0).voted(), ElementsAre(*life));
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  EXPECT_EQ(cluster_.core->committed(), 2u);
  EXPECT_THAT(cluster_.WorkerOf(0).voted(), IsEmpty());
}

TEST_F(CoreRejoinTest, ALifeThatLostItsVoteVotesAgain) {
  TrainTo(1);
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  cluster_.Kill(v1::ROLE_SERVER, 1);
  const auto life = cluster_.Return(cluster_.NextLifeOf(1, 1, 1));
  ASSERT_TRUE(life.ok());
  EXPECT_THAT(cluster_.WorkerOf(0).voted(), IsEmpty());
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  EXPECT_EQ(cluster_.core->committed(), 1u);
  ASSERT_TRUE(cluster_.Load(*life, 1).ok());
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  EXPECT_EQ(cluster_.core->committed(), 2u);
}

TEST_F(CoreRejoinTest, WhatWorkersHadDoneIsOwedAgainToALifeWithoutItsVote) {
  TrainTo(1);
  ASSERT_TRUE(cluster_.Done(0, 2).ok());
  ASSERT_TRUE(cluster_.Done(1, 2).ok());
  cluster_.Kill(v1::ROLE_WORKER, 1);  // It had done its part.
  EXPECT_EQ(cluster_.WorkerOf(0).spans_size(), 1);
  cluster_.Kill(v1::ROLE_SERVER, 1);
  ASSERT_TRUE(cluster_.Return(cluster_.NextLifeOf(1, 1, 1)).ok());
  EXPECT_EQ(cluster_.WorkerOf(0).spans_size(), 2);
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).members(1).owes(),
              HasSubstr("gradients of step 2 (micro-batches 0 to 7)"));
}

TEST_F(CoreRejoinTest, AWorkersAnswerFromBeforeTheReturnDoesNotCount) {
  TrainTo(1);
  v1::ReportRequest late = cluster_.Of(cluster_.workers[1]);
  late.mutable_worker_done()->set_timeline(1);
  late.mutable_worker_done()->set_step(2);
  late.mutable_worker_done()->set_number(
      cluster_.NumberOf(cluster_.workers[1]));
  cluster_.Kill(v1::ROLE_SERVER, 1);
  ASSERT_TRUE(cluster_.Return(cluster_.NextLifeOf(1, 1, 1)).ok());
  ASSERT_TRUE(cluster_.Send(late).ok());
  cluster_.Kill(v1::ROLE_WORKER, 1);
  EXPECT_EQ(cluster_.WorkerOf(0).spans_size(), 2);
}

TEST_F(CoreRejoinTest, WhatTheStepLogCannotBridgeIsRefusedWithTheNumbers) {
  TrainTo(3);
  cluster_.Kill(v1::ROLE_SERVER, 1);
  const absl::Status status =
      cluster_.Return(cluster_.NextLifeOf(1, 1, 2)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("server-1 cannot bring chunks"),
                    HasSubstr("to version 3: it holds version 1 of chunk"),
                    HasSubstr("gradients through step 2")));
  // So is one that lost everything.
  EXPECT_EQ(
      cluster_.Return(cluster_.NextLifeOf(v1::ROLE_SERVER, 1)).status().code(),
      absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(phase(), Phase::kTraining);
}

TEST_F(CoreRejoinTest, AnEmptyServerIsWelcomeBeforeTheFirstStep) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.JoinAll();
  cluster_.Kill(v1::ROLE_SERVER, 1);
  const auto life = cluster_.Return(cluster_.NextLifeOf(v1::ROLE_SERVER, 1));
  ASSERT_TRUE(life.ok()) << life.status();
  EXPECT_EQ(cluster_.ServerOf(1).task(), v1::SERVER_LOAD);
  EXPECT_FALSE(cluster_.ServerOf(1).load_own());
  EXPECT_EQ(cluster_.ServerOf(1).load_manifest(), "");
}

TEST_F(CoreRejoinTest, AServerAheadOfTheStepLogEndsTheRunAsDataLoss) {
  TrainTo(1);
  cluster_.Kill(v1::ROLE_SERVER, 1);
  EXPECT_TRUE(cluster_.Return(cluster_.NextLifeOf(1, 1, 2)).ok());
  cluster_.Kill(v1::ROLE_SERVER, 1);
  EXPECT_EQ(cluster_.Return(cluster_.NextLifeOf(1, 1, 3)).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(cluster_.core->failure().code(), absl::StatusCode::kDataLoss);
}

TEST_F(CoreRejoinTest, AnotherRunsDataDirectoryIsRefused) {
  TrainTo(1);
  cluster_.Kill(v1::ROLE_SERVER, 1);
  v1::JoinRequest request = cluster_.NextLifeOf(1, 1, 1);
  request.set_run_id("ffffffffffffffffffffffffffffffff");
  EXPECT_THAT(std::string(cluster_.Return(request).status().message()),
              HasSubstr("holds the run ffff"));
  request.set_run_id(cluster_.options.new_run_id);
  EXPECT_TRUE(cluster_.Return(request).ok());
}

TEST_F(CoreRejoinTest, WhoeverHoldsTheDataDirectoryHasOutlivedTheOther) {
  TrainTo(1);
  const auto life = cluster_.Return(cluster_.NextLifeOf(1, 1, 1));
  ASSERT_TRUE(life.ok()) << life.status();
  EXPECT_EQ(cluster_.LastFault().kind(), "lost");
  EXPECT_EQ(cluster_.LastFault().member(), "server-1");
}

TEST_F(CoreRejoinTest, AServerThatIsNotWantedIsRefused) {
  TrainTo(1);
  const absl::Status status =
      cluster_.TryJoin(cluster_.JoinOf(v1::ROLE_SERVER, 5)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ballast server add"));
}

TEST_F(CoreRejoinTest, ABrokenServerConnectionIsProbed) {
  TrainTo(1);
  cluster_.core->ConnectionLost(cluster_.servers[1], cluster_.now);
  cluster_.core->ConnectionLost(cluster_.servers[1], cluster_.now);
  cluster_.Carry();
  ASSERT_EQ(cluster_.probes.size(), 1u);
  EXPECT_EQ(cluster_.probes[0].address, "127.0.0.1:9001");
  cluster_.core->ProbeResult(cluster_.servers[1], true, cluster_.now);
  cluster_.core->ProbeResult(cluster_.servers[1], false, cluster_.now);
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).faults_size(), 0);
  cluster_.core->ConnectionLost(cluster_.servers[1], cluster_.now);
  cluster_.core->ProbeResult(cluster_.servers[1], false, cluster_.now);
  EXPECT_EQ(cluster_.LastFault().kind(), "lost");
}

TEST_F(CoreRejoinTest, TheWaitForAServerIsBounded) {
  TrainTo(1);
  cluster_.Kill(v1::ROLE_SERVER, 1);
  cluster_.Advance(absl::Milliseconds(100));
  cluster_.Advance(absl::Minutes(10) - absl::Nanoseconds(1));
  EXPECT_EQ(phase(), Phase::kTraining);
  cluster_.Advance(absl::Nanoseconds(1));
  EXPECT_EQ(phase(), Phase::kFailed);
  EXPECT_THAT(std::string(cluster_.core->failure().message()),
              HasSubstr("missing server-1"));
}

TEST_F(CoreRejoinTest, AStuckServerIsBlamedWhenAllWorkersAreDone) {
  TrainTo(1);
  ASSERT_TRUE(cluster_.Done(0, 2).ok());
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  v1::MemberStats stats;
  for (uint64_t unit = 1; unit <= 450; ++unit) {
    cluster_.Advance(absl::Milliseconds(100));
    stats.set_units_done(unit);
    cluster_.Stats(cluster_.workers[1], stats);
  }
  // As long as a worker works nobody else is late.
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).faults_size(), 0);
  ASSERT_TRUE(cluster_.Done(1, 2).ok());
  cluster_.Advance(absl::Seconds(31));
  EXPECT_EQ(cluster_.LastFault().kind(), "stuck");
  EXPECT_EQ(cluster_.LastFault().member(), "server-1");
}

TEST_F(CoreRejoinTest, AServerAtTheEndOfTheChainOfWaitsIsBlamed) {
  TrainTo(1);
  v1::MemberStats waits;
  waits.set_waits_for("server-1: the weights of h.0");
  cluster_.Stats(cluster_.workers[0], waits);
  cluster_.Stats(cluster_.workers[1], waits);
  cluster_.Advance(absl::Seconds(29));
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).faults_size(), 0);
  cluster_.Advance(absl::Seconds(2));
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).faults_size(), 1);
  EXPECT_EQ(cluster_.LastFault().member(), "server-1");
}

TEST_F(CoreRejoinTest, TheStepLogIsKeptFromTheLowestBase) {
  cluster_.job.checkpoint.every = 0;
  cluster_.job.run.steps = 20;
  cluster_.job.checkpoint.keep = 1;
  TrainTo(1);
  const auto confirm = [this](int server, uint64_t step, uint64_t base) {
    v1::ReportRequest request =
        cluster_.Of(cluster_.servers[static_cast<size_t>(server)]);
    request.mutable_confirm()->set_step(step);
    request.mutable_confirm()->set_base_step(base);
    ASSERT_TRUE(cluster_.Send(request).ok());
  };
  for (uint64_t step = 2; step <= 8; ++step) {
    for (const int i : {0, 1}) {
      ASSERT_TRUE(cluster_.Done(i, step).ok());
      ASSERT_TRUE(cluster_.Vote(i, step).ok());
    }
    confirm(0, step, step);
    confirm(1, step, step <= 5 ? 0 : step - 2);
  }
  // No checkpoint stands, so nothing may be forgotten.
  EXPECT_EQ(State().decisions.size(), 8u);
}

TEST_F(CoreRejoinTest, TheStepLogEndsAtTheLowerOfBaseAndCheckpoint) {
  cluster_.job.run.steps = 20;
  cluster_.job.checkpoint.keep = 1;
  cluster_.Train();
  for (uint64_t step = 1; step <= 7; ++step) {
    for (const int i : {0, 1}) {
      ASSERT_TRUE(cluster_.Done(i, step).ok());
      ASSERT_TRUE(cluster_.Vote(i, step).ok());
    }
    for (const int i : {0, 1}) {
      v1::ReportRequest request =
          cluster_.Of(cluster_.servers[static_cast<size_t>(i)]);
      request.mutable_confirm()->set_step(step);
      // server-1 recovers from three steps before.
      request.mutable_confirm()->set_base_step(
          i == 0 ? step : step - std::min<uint64_t>(3, step));
      ASSERT_TRUE(cluster_.Send(request).ok());
      if (step % 2 == 0) {
        ASSERT_TRUE(cluster_.Save(i, step).ok());
      }
    }
  }
  EXPECT_EQ(State().checkpoints.begin()->first, StepKey({1, 6}));
  EXPECT_EQ(State().decisions.begin()->first, StepKey({1, 4}));
  EXPECT_TRUE(CheckChain(State()).ok());
}

TEST_F(CoreRejoinTest, PartsOfACheckpointAreOwedUntilTheyAreThere) {
  TrainTo(1);
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Vote(i, 2).ok());
  }
  ASSERT_TRUE(cluster_.Save(0, 2).ok());
  cluster_.Kill(v1::ROLE_SERVER, 1);
  const auto life = cluster_.Return(cluster_.NextLifeOf(1, 1, 2));
  ASSERT_TRUE(life.ok());
  ASSERT_TRUE(cluster_.Load(*life, 2).ok());
  ASSERT_EQ(cluster_.ServerOf(1).owed_checkpoints_size(), 1);
  EXPECT_EQ(cluster_.ServerOf(1).owed_checkpoints(0).step(), 2u);
  EXPECT_EQ(cluster_.ServerOf(0).owed_checkpoints_size(), 0);
  ASSERT_TRUE(cluster_.Save(1, 2).ok());
  EXPECT_EQ(cluster_.manifests.size(), 1u);
  EXPECT_EQ(cluster_.ServerOf(1).owed_checkpoints_size(), 0);
}

TEST_F(CoreRejoinTest, ACheckpointNobodyCanFinishIsReplaced) {
  cluster_.job.run.steps = 9;
  cluster_.job.checkpoint.every = 4;
  TrainTo(3);
  // The checkpoint of step 4 is on its way when server-1 dies at version 5.
  for (const uint64_t step : {4, 5}) {
    for (const int i : {0, 1}) {
      ASSERT_TRUE(cluster_.Vote(i, step).ok());
    }
    for (const int i : {0, 1}) {
      ASSERT_TRUE(cluster_.Confirm(i, step).ok());
    }
  }
  ASSERT_TRUE(cluster_.Save(0, 4).ok());
  cluster_.Kill(v1::ROLE_SERVER, 1);
  const auto life = cluster_.Return(cluster_.NextLifeOf(1, 5, 5));
  ASSERT_TRUE(life.ok());
  ASSERT_TRUE(cluster_.Load(*life, 5).ok());
  EXPECT_EQ(cluster_.ServerOf(1).owed_checkpoints_size(), 1);
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Vote(i, 6).ok());
  }
  EXPECT_FALSE(cluster_.core->last_decision().checkpoint());
  ASSERT_TRUE(cluster_.Confirm(1, 6).ok());
  EXPECT_EQ(cluster_.ServerOf(1).owed_checkpoints_size(), 0);
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Vote(i, 7).ok());
  }
  EXPECT_TRUE(cluster_.core->last_decision().checkpoint());
}

TEST_F(CoreRejoinTest, AServersFullDiskIsADeathOfThatLifeOnly) {
  TrainTo(1);
  v1::ReportRequest fatal = cluster_.Of(cluster_.servers[1]);
  fatal.mutable_fatal()->set_code(8);
  fatal.mutable_fatal()->set_message("no space left");
  ASSERT_TRUE(cluster_.Send(fatal).ok());
  EXPECT_EQ(phase(), Phase::kTraining);
  EXPECT_EQ(cluster_.LastFault().detail(), "no space left");
  EXPECT_TRUE(cluster_.Return(cluster_.NextLifeOf(1, 1, 1)).ok());
}

TEST_F(CoreRejoinTest, ADrainingServerLeavesAtOnceAndIsWantedBack) {
  TrainTo(1);
  v1::ReportRequest request = cluster_.Of(cluster_.servers[1]);
  request.mutable_draining()->set_reason("SIGTERM");
  ASSERT_TRUE(cluster_.Send(request).ok());
  EXPECT_EQ(cluster_.ServerOf(1).task(), v1::SERVER_EXIT);
  ASSERT_TRUE(cluster_.Leave(cluster_.servers[1]).ok());
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).wanted(),
              ::testing::Contains("server-1"));
  ASSERT_TRUE(cluster_.Return(cluster_.NextLifeOf(1, 1, 1)).ok());
}

class CoreRollbackTest : public CoreRejoinTest {
 protected:
  CoreRollbackTest() {
    cluster_.job.server.durability = Durability::kCheckpoint;
  }
};

TEST_F(CoreRollbackTest, EveryoneGoesBackToTheNewestCheckpoint) {
  TrainTo(3);
  cluster_.Kill(v1::ROLE_SERVER, 1);
  EXPECT_EQ(phase(), Phase::kLoading);
  EXPECT_EQ(cluster_.core->identity().timeline, 2u);
  EXPECT_EQ(cluster_.core->committed(), 2u);
  EXPECT_EQ(cluster_.rollback_to, 2u);
  EXPECT_EQ(State().identity->timeline, 2u);
  EXPECT_EQ(State().branches.at(2).parent, StepKey({1, 2}));
  const v1::ServerDirective load = cluster_.ServerOf(0);
  EXPECT_EQ(load.task(), v1::SERVER_LOAD);
  EXPECT_EQ(load.timeline(), 2u);
  EXPECT_EQ(load.load_step(), 2u);
  EXPECT_EQ(load.load_manifest(), testing::ManifestPath({1, 2}));
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_WAIT);
  EXPECT_EQ(cluster_.WorkerOf(0).timeline(), 2u);
  const auto life = cluster_.Return(cluster_.NextLifeOf(v1::ROLE_SERVER, 1));
  ASSERT_TRUE(life.ok()) << life.status();
  cluster_.LoadAll();
  EXPECT_EQ(phase(), Phase::kTraining);
  EXPECT_EQ(cluster_.WorkerOf(0).step(), 3u);
  cluster_.RunToDone();
  EXPECT_TRUE(CheckChain(State()).ok());
}

TEST_F(CoreRollbackTest, WithoutACheckpointEveryoneBeginsAnew) {
  TrainTo(1);
  cluster_.Kill(v1::ROLE_SERVER, 0);
  EXPECT_EQ(cluster_.core->committed(), 0u);
  EXPECT_EQ(cluster_.rollback_to, 0u);
  EXPECT_EQ(cluster_.ServerOf(1).load_step(), 0u);
  EXPECT_EQ(cluster_.ServerOf(1).load_manifest(), "");
}

TEST_F(CoreRollbackTest, ReportsOfTheAbandonedBranchComeTooLate) {
  TrainTo(3);
  v1::ReportRequest vote = cluster_.Of(cluster_.servers[0]);
  vote.mutable_vote()->set_step(4);
  v1::ReportRequest confirm = cluster_.Of(cluster_.servers[0]);
  confirm.mutable_confirm()->set_step(3);
  cluster_.Kill(v1::ROLE_SERVER, 1);
  EXPECT_TRUE(cluster_.Send(vote).ok());
  EXPECT_TRUE(cluster_.Send(confirm).ok());
  EXPECT_EQ(phase(), Phase::kLoading);
  EXPECT_EQ(cluster_.core->committed(), 2u);
}

TEST_F(CoreRollbackTest, LinesOfAbandonedStepsAreNotWritten) {
  TrainTo(2);
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Vote(i, 3).ok());  // Its line waits for reports.
  }
  cluster_.metrics.clear();
  cluster_.Kill(v1::ROLE_SERVER, 1);
  EXPECT_THAT(cluster_.metrics, IsEmpty());
  ASSERT_TRUE(cluster_.Return(cluster_.NextLifeOf(v1::ROLE_SERVER, 1)).ok());
  cluster_.LoadAll();
  cluster_.Step(3);
  ASSERT_EQ(cluster_.metrics.size(), 1u);
  EXPECT_EQ(cluster_.metrics[0].decision.step(), 3u);
  EXPECT_EQ(cluster_.metrics[0].decision.timeline(), 2u);
}

TEST_F(CoreRollbackTest, ASecondDeathWhileLoadingGoesBackToTheSame) {
  TrainTo(3);
  cluster_.Kill(v1::ROLE_SERVER, 1);
  cluster_.Kill(v1::ROLE_SERVER, 0);
  EXPECT_EQ(cluster_.core->identity().timeline, 3u);
  EXPECT_EQ(cluster_.core->committed(), 2u);
  EXPECT_EQ(State().branches.at(3).parent, StepKey({1, 2}));
}

TEST_F(CoreRollbackTest, ADrainingServerLeavesAfterANewCheckpoint) {
  TrainTo(3);
  v1::ReportRequest request = cluster_.Of(cluster_.servers[1]);
  request.mutable_draining()->set_reason("SIGTERM");
  ASSERT_TRUE(cluster_.Send(request).ok());
  EXPECT_EQ(cluster_.ServerOf(1).task(), v1::SERVER_RUN);
  cluster_.Step(4);
  EXPECT_EQ(cluster_.ServerOf(1).task(), v1::SERVER_EXIT);
  ASSERT_TRUE(cluster_.Leave(cluster_.servers[1]).ok());
  EXPECT_EQ(cluster_.core->committed(), 4u);
}

TEST_F(CoreRollbackTest, WorkersThatDieDoNotCostAStep) {
  TrainTo(3);
  cluster_.Kill(v1::ROLE_WORKER, 1);
  EXPECT_EQ(cluster_.core->identity().timeline, 1u);
  EXPECT_EQ(cluster_.core->committed(), 3u);
}

}  // namespace
}  // namespace ballast
