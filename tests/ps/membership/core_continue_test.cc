// SPDX-License-Identifier: Apache-2.0
// A coordinator that takes over from one that died: same timeline, next term.
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

class CoreContinueTest : public ::testing::Test {
 protected:
  CoreContinueTest() {
    cluster_.job.server.durability = Durability::kStep;
    cluster_.job.eval.every = 0;
    cluster_.options.continue_run = true;
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
  void Restart() {
    cluster_.now += absl::Hours(1);
    ASSERT_TRUE(cluster_.Start().ok());
  }
  CoreHarness cluster_;
};

TEST_F(CoreContinueTest, BeginsARunWhenThereIsNone) {
  TrainTo(1);
  EXPECT_EQ(cluster_.core->identity().timeline, 1u);
  EXPECT_EQ(cluster_.core->committed(), 1u);
}

TEST_F(CoreContinueTest, GoesOnWithItsMembersOnTheSameTimeline) {
  TrainTo(3);
  const uint64_t number = cluster_.NumberOf(cluster_.workers[0]);
  const v1::Placement before = *cluster_.core->GetPlacement();
  Restart();
  EXPECT_EQ(cluster_.core->identity().timeline, 1u);
  EXPECT_EQ(cluster_.core->identity().term, 2u);
  EXPECT_EQ(phase(), Phase::kTraining);
  EXPECT_EQ(cluster_.core->committed(), 3u);
  // Numbers go on, so that nobody takes a directive for an old one.
  EXPECT_GT(cluster_.NumberOf(cluster_.workers[0]), number);
  EXPECT_EQ(cluster_.WorkerOf(0).step(), 4u);
  EXPECT_EQ(cluster_.WorkerOf(1).spans(0).first(), 4u);
  const v1::Placement after = *cluster_.core->GetPlacement();
  EXPECT_EQ(after.placement_version(), before.placement_version());
  EXPECT_GT(after.address_version(), before.address_version());
  EXPECT_EQ(after.layout(), before.layout());
  EXPECT_EQ(after.servers(1).incarnation(), cluster_.servers[1]);
  EXPECT_EQ(after.servers(1).address(), "127.0.0.1:9001");
  // Servers are asked what they have.
  EXPECT_EQ(cluster_.ServerOf(0).task(), v1::SERVER_LOAD);
  ASSERT_TRUE(cluster_.Load(cluster_.servers[0], 3).ok());
  ASSERT_TRUE(cluster_.Load(cluster_.servers[1], 3).ok());
  EXPECT_EQ(cluster_.ServerOf(0).task(), v1::SERVER_RUN);
  cluster_.RunToDone();
  EXPECT_EQ(State().ends.at(1).step, 6u);
  EXPECT_TRUE(CheckChain(State()).ok());
}

TEST_F(CoreContinueTest, LeasesAreFreshAndStillRunOut) {
  TrainTo(1);
  Restart();
  cluster_.Advance(absl::Seconds(4));
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).faults_size(), 0);
  cluster_.AdvanceWithout(cluster_.servers[1], absl::Seconds(5));
  EXPECT_EQ(cluster_.LastFault().kind(), "silent");
  EXPECT_EQ(cluster_.LastFault().member(), "server-1");
}

TEST_F(CoreContinueTest, AServerBehindTheDecisionIsToldItAgain) {
  TrainTo(1);
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Vote(i, 2).ok());
  }
  Restart();
  EXPECT_EQ(cluster_.core->committed(), 2u);
  ASSERT_TRUE(cluster_.Load(cluster_.servers[0], 1).ok());
  ASSERT_EQ(cluster_.ServerOf(0).decisions_size(), 1);
  EXPECT_EQ(cluster_.ServerOf(0).decisions(0).step(), 2u);
}

TEST_F(CoreContinueTest, VotesThatOnlyTheDeadOneHadAreGivenAgain) {
  TrainTo(1);
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  Restart();
  for (const uint64_t server : cluster_.servers) {
    ASSERT_TRUE(cluster_.Load(server, 1).ok());
  }
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  EXPECT_EQ(cluster_.core->committed(), 1u);
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  EXPECT_EQ(cluster_.core->committed(), 2u);
}

TEST_F(CoreContinueTest, ALateCopyOfAnOldAnswerIsOvertaken) {
  TrainTo(5);
  Restart();
  ASSERT_TRUE(cluster_.Load(cluster_.servers[0], 1).ok());
  ASSERT_TRUE(cluster_.Load(cluster_.servers[0], 5).ok());
  EXPECT_EQ(cluster_.ServerOf(0).decisions_size(), 0);
  ASSERT_TRUE(cluster_.Load(cluster_.servers[0], 2).ok());
  EXPECT_EQ(cluster_.ServerOf(0).decisions_size(), 0);
}

TEST_F(CoreContinueTest, UnfinishedCheckpointsAreOwedAgain) {
  TrainTo(3);
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Vote(i, 4).ok());
  }
  ASSERT_TRUE(cluster_.Save(0, 4).ok());
  ASSERT_EQ(cluster_.manifests.size(), 1u);
  Restart();
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Load(cluster_.servers[i], 4).ok());
    ASSERT_EQ(cluster_.ServerOf(i).owed_checkpoints_size(), 1);
    EXPECT_EQ(cluster_.ServerOf(i).owed_checkpoints(0).step(), 4u);
    EXPECT_EQ(cluster_.ServerOf(i).keep_checkpoints_size(), 2);
    ASSERT_TRUE(cluster_.Save(i, 4).ok());
  }
  EXPECT_EQ(cluster_.manifests.size(), 2u);
}

TEST_F(CoreContinueTest, AnEvaluationThatWasDoneIsNotDoneAgain) {
  cluster_.job.eval.every = 2;
  TrainTo(2);
  Restart();
  EXPECT_EQ(phase(), Phase::kTraining);
  EXPECT_DOUBLE_EQ(cluster_.core->GetStatus(cluster_.now).validation_loss(),
                   cluster_.evaluations.back().loss);
  for (const uint64_t server : cluster_.servers) {
    ASSERT_TRUE(cluster_.Load(server, 2).ok());
  }
  cluster_.Step(3);
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Vote(i, 4).ok());
  }
  ASSERT_EQ(phase(), Phase::kEvaluating);
  Restart();  // This one was not.
  EXPECT_EQ(phase(), Phase::kEvaluating);
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_EVALUATE);
}

TEST_F(CoreContinueTest, AServerThatDiedMeanwhileIsJudgedByTheStepLog) {
  TrainTo(3);
  Restart();
  cluster_.Kill(v1::ROLE_SERVER, 1);
  EXPECT_EQ(cluster_.Return(cluster_.NextLifeOf(1, 1, 2)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const auto life = cluster_.Return(cluster_.NextLifeOf(1, 1, 3));
  ASSERT_TRUE(life.ok()) << life.status();
  EXPECT_EQ(cluster_.ServerOf(1).decisions_size(), 2);
}

TEST_F(CoreContinueTest, FaultsAndWantedNamesAreRemembered) {
  TrainTo(1);
  v1::ScaleRequest add;
  add.set_role(v1::ROLE_WORKER);
  add.set_add(1);
  ASSERT_TRUE(cluster_.core->Scale(add, cluster_.now).ok());
  cluster_.Kill(v1::ROLE_WORKER, 1);
  Restart();
  v1::ExitReport death;
  death.set_name("coordinator");
  death.set_signal(9);
  death.set_seconds_ago(0.5);
  cluster_.core->ExitReported(death, cluster_.now);
  v1::StatusReply status = cluster_.core->GetStatus(cluster_.now);
  EXPECT_THAT(status.wanted(), ElementsAre("server-0", "server-1", "worker-0",
                                           "worker-1", "worker-2"));
  ASSERT_EQ(status.faults_size(), 2);
  EXPECT_EQ(status.faults(0).member(), "worker-1");
  EXPECT_EQ(status.faults(1).member(), "coordinator");
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Load(cluster_.servers[i], 1).ok());
    ASSERT_TRUE(cluster_.Vote(i, 2).ok());
  }
  status = cluster_.core->GetStatus(cluster_.now);
  EXPECT_GE(status.faults(0).recovered_seconds(), 0.0);
  EXPECT_DOUBLE_EQ(status.faults(1).recovered_seconds(), 0.5);
}

TEST_F(CoreContinueTest, AFormingGroupKeepsWhoHasJoined) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.Join(v1::ROLE_SERVER, 0);
  cluster_.Join(v1::ROLE_WORKER, 0);
  Restart();
  EXPECT_EQ(phase(), Phase::kForming);
  cluster_.Join(v1::ROLE_SERVER, 1);
  cluster_.Join(v1::ROLE_WORKER, 1);
  EXPECT_EQ(phase(), Phase::kLoading);
  Restart();
  EXPECT_EQ(phase(), Phase::kLoading);
  EXPECT_EQ(cluster_.ServerOf(0).load_step(), 0u);
  EXPECT_FALSE(cluster_.ServerOf(0).load_own());
  cluster_.LoadAll();
  EXPECT_EQ(phase(), Phase::kTraining);
}

TEST_F(CoreContinueTest, ARunThatHasEndedLetsItsMembersGo) {
  TrainTo(5);
  cluster_.Step(6);
  cluster_.EvaluateAll(6);
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Digest(i, 6).ok());
  }
  ASSERT_EQ(phase(), Phase::kDone);
  const std::string hash = cluster_.core->state_hash();
  Restart();
  EXPECT_EQ(phase(), Phase::kDone);
  EXPECT_EQ(cluster_.core->state_hash(), hash);
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_EXIT);
}

TEST_F(CoreContinueTest, AnotherJobIsRefused) {
  TrainTo(1);
  cluster_.options.numerics[0].second = "64";
  const absl::Status status = cluster_.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("model.width is 64"));
}

TEST_F(CoreContinueTest, ARollbackGoesOnToo) {
  cluster_.job.server.durability = Durability::kCheckpoint;
  TrainTo(3);
  cluster_.Kill(v1::ROLE_SERVER, 1);
  Restart();
  EXPECT_EQ(phase(), Phase::kLoading);
  EXPECT_EQ(cluster_.core->identity().timeline, 2u);
  EXPECT_EQ(cluster_.core->committed(), 2u);
  EXPECT_EQ(cluster_.ServerOf(0).load_manifest(),
            testing::ManifestPath({1, 2}));
  ASSERT_TRUE(cluster_.Return(cluster_.NextLifeOf(v1::ROLE_SERVER, 1)).ok());
  cluster_.LoadAll();
  EXPECT_EQ(cluster_.WorkerOf(0).step(), 3u);
}

// --- Resuming under durability step. ---

TEST_F(CoreContinueTest, ResumeTakesTheNewestCommittedStep) {
  TrainTo(3);
  cluster_.options.continue_run = false;
  cluster_.options.resume = true;
  const v1::Placement before = *cluster_.core->GetPlacement();
  ASSERT_TRUE(cluster_.Start().ok());
  EXPECT_EQ(cluster_.core->identity().timeline, 2u);
  EXPECT_EQ(cluster_.core->committed(), 3u);
  EXPECT_EQ(State().branches.at(2).parent, StepKey({1, 3}));
  EXPECT_TRUE(State().members.empty());
  EXPECT_EQ(phase(), Phase::kForming);
  // They hold what they held on timeline 1.
  for (const int i : {1, 0}) {
    v1::JoinRequest join = cluster_.NextLifeOf(v1::ROLE_SERVER, i);
    v1::HeldChunks* held = join.add_held();
    held->set_timeline(1);
    held->set_version(2);
    held->set_redoable(4);  // Voted for 4, which was never decided.
    held->set_redoable_timeline(1);
    held->add_chunks()->set_count(100);
    ASSERT_TRUE(cluster_.Return(join).ok());
  }
  cluster_.Join(v1::ROLE_WORKER, 0);
  cluster_.Join(v1::ROLE_WORKER, 1);
  const v1::ServerDirective load = cluster_.ServerOf(1);
  EXPECT_TRUE(load.load_own());
  EXPECT_EQ(load.load_step(), 3u);
  ASSERT_EQ(load.decisions_size(), 1);
  EXPECT_EQ(load.decisions(0).timeline(), 1u);
  cluster_.LoadAll();
  EXPECT_EQ(cluster_.WorkerOf(0).step(), 4u);
  EXPECT_EQ(cluster_.WorkerOf(0).voted_size(), 0);
  const v1::Placement after = *cluster_.core->GetPlacement();
  EXPECT_THAT(std::vector<uint32_t>(after.owner().begin(), after.owner().end()),
              ::testing::ElementsAreArray(before.owner()));
  cluster_.RunToDone();
  EXPECT_TRUE(CheckChain(State()).ok());
}

TEST_F(CoreContinueTest, ResumeAfterDurabilityCheckpointTakesTheCheckpoint) {
  cluster_.job.server.durability = Durability::kCheckpoint;
  TrainTo(3);
  cluster_.options.continue_run = false;
  cluster_.options.resume = true;
  cluster_.job.server.durability = Durability::kStep;
  ASSERT_TRUE(cluster_.Start().ok());
  EXPECT_EQ(cluster_.core->committed(), 2u);
  cluster_.JoinAll();
  EXPECT_EQ(cluster_.ServerOf(0).load_manifest(),
            testing::ManifestPath({1, 2}));
}

TEST_F(CoreContinueTest, ResumeWithFewerServersStartsThoseOfThePlacement) {
  TrainTo(3);
  cluster_.options.continue_run = false;
  cluster_.options.resume = true;
  cluster_.job.server.count = 1;
  ASSERT_TRUE(cluster_.Start().ok());
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).wanted(),
              ElementsAre("server-0", "worker-0", "worker-1", "server-1"));
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).waits_for(),
              HasSubstr("missing server-0, server-1"));
}

}  // namespace
}  // namespace ballast
