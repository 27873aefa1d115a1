// SPDX-License-Identifier: Apache-2.0
// Servers added and drained while the run goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ps/membership/coordinator_core.h"
#include "ps/membership/step_chain.h"
#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::ballast::testing::CoreHarness;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CoreMovesTest : public ::testing::Test {
 protected:
  CoreMovesTest() {
    cluster_.job.server.durability = Durability::kStep;
    cluster_.job.eval.every = 0;
    cluster_.job.checkpoint.every = 0;
    cluster_.job.run.steps = 50;
  }
  void TrainTo(uint64_t step) {
    cluster_.Train();
    for (uint64_t i = 1; i <= step; ++i) {
      cluster_.Step(i);
    }
  }
  absl::StatusOr<v1::ScaleReply> Scale(uint32_t add, const std::string& drain) {
    v1::ScaleRequest request;
    request.set_role(v1::ROLE_SERVER);
    request.set_add(add);
    request.set_drain(drain);
    auto reply = cluster_.core->Scale(request, cluster_.now);
    cluster_.Carry();
    return reply;
  }
  void AddServer() {
    ASSERT_TRUE(Scale(1, "").ok());
    const auto life = cluster_.Return(cluster_.JoinOf(v1::ROLE_SERVER, 2));
    ASSERT_TRUE(life.ok()) << life.status();
    ASSERT_TRUE(cluster_.Load(*life, cluster_.core->committed()).ok());
  }
  std::vector<uint32_t> Counts() const {
    const v1::Placement placement = *cluster_.core->GetPlacement();
    std::vector<uint32_t> counts(static_cast<size_t>(placement.servers_size()),
                                 0);
    for (const uint32_t owner : placement.owner()) {
      ++counts[owner];
    }
    return counts;
  }
  // A vote of `server` that says its replicas are in sync.
  absl::Status VoteInSync(int server, uint64_t step) {
    v1::ReportRequest request =
        cluster_.Of(cluster_.servers[static_cast<size_t>(server)]);
    v1::Vote* vote = request.mutable_vote();
    vote->set_step(step);
    vote->set_sum_squares(ExactSum().Encode());
    vote->set_has_loss(server == 0);
    *vote->mutable_in_sync() = cluster_.ServerOf(server).replicate();
    return cluster_.Send(request);
  }
  CoreHarness cluster_;
};

TEST_F(CoreMovesTest, AnAddedServerIsWantedAndJoinsWithNothing) {
  TrainTo(1);
  EXPECT_THAT(Scale(1, "")->names(), ElementsAre("server-2"));
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).wanted(),
              ::testing::Contains("server-2"));
  const auto life = cluster_.Return(cluster_.JoinOf(v1::ROLE_SERVER, 2));
  ASSERT_TRUE(life.ok()) << life.status();
  EXPECT_EQ(cluster_.ServerOf(2).task(), v1::SERVER_LOAD);
  EXPECT_EQ(cluster_.ServerOf(2).load_step(), 1u);
  EXPECT_EQ(cluster_.ServerOf(0).replicate_size(), 0);  // Not loaded yet.
  ASSERT_TRUE(cluster_.Load(*life, 1).ok());
  // Both old servers give it something; the run does not wait for that.
  for (const int i : {0, 1}) {
    ASSERT_EQ(cluster_.ServerOf(i).replicate_size(), 1);
    EXPECT_EQ(cluster_.ServerOf(i).replicate(0).server(), "server-2");
    EXPECT_EQ(cluster_.ServerOf(i).replicate(0).incarnation(), *life);
    EXPECT_EQ(cluster_.ServerOf(i).replicate(0).address(), "127.0.0.1:9002");
    EXPECT_FALSE(cluster_.ServerOf(i).replicate(0).standing());
  }
  ASSERT_EQ(cluster_.ServerOf(2).receive_size(), 2);
  EXPECT_EQ(cluster_.ServerOf(2).receive(1).server(), "server-1");
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Vote(i, 2).ok());
  }
  EXPECT_EQ(cluster_.core->committed(), 2u);
  EXPECT_EQ(cluster_.core->last_decision().moves_size(), 0);
}

TEST_F(CoreMovesTest, OnlyWhatIsInSyncMovesAndWithTheDecision) {
  TrainTo(1);
  const uint64_t version = cluster_.core->GetPlacement()->placement_version();
  AddServer();
  ASSERT_TRUE(VoteInSync(0, 2).ok());
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  const v1::Decision decision = cluster_.core->last_decision();
  ASSERT_EQ(decision.step(), 2u);
  ASSERT_EQ(decision.moves_size(), 1);
  EXPECT_EQ(decision.moves(0).from(), 0u);
  EXPECT_EQ(decision.moves(0).to(), 2u);
  EXPECT_EQ(decision.placement_version(), version + 1);
  EXPECT_EQ(cluster_.WorkerOf(0).placement_version(), version + 1);
  EXPECT_GT(Counts()[2], 0u);
  EXPECT_EQ(cluster_.ServerOf(0).replicate_size(), 0);
  EXPECT_EQ(cluster_.ServerOf(1).replicate_size(), 1);
  // From now on its vote is needed.
  ASSERT_TRUE(cluster_.Vote(0, 3).ok());
  ASSERT_TRUE(cluster_.Vote(1, 3).ok());
  EXPECT_EQ(cluster_.core->committed(), 2u);
  ASSERT_TRUE(cluster_.Vote(2, 3).ok());
  EXPECT_EQ(cluster_.core->committed(), 3u);
  const RunState state =
      *ParseRunState({cluster_.pairs.begin(), cluster_.pairs.end()});
  EXPECT_EQ(state.placement->placement_version(), version + 1);
  EXPECT_TRUE(CheckChain(state).ok());
}

TEST_F(CoreMovesTest, AReplicaAtALifeThatDiedDoesNotMove) {
  TrainTo(1);
  AddServer();
  ASSERT_TRUE(VoteInSync(0, 2).ok());
  cluster_.Kill(v1::ROLE_SERVER, 2);
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  EXPECT_EQ(cluster_.core->last_decision().moves_size(), 0);
  EXPECT_EQ(cluster_.core->committed(), 2u);
}

TEST_F(CoreMovesTest, ADrainedServerLeavesWhenItsChunksHave) {
  TrainTo(1);
  AddServer();
  ASSERT_TRUE(Scale(0, "server-1").ok());
  EXPECT_EQ(cluster_.ServerOf(1).task(), v1::SERVER_RUN);
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).wanted(),
              ::testing::Contains("server-1"));  // Started again if it dies.
  ASSERT_TRUE(VoteInSync(0, 2).ok());
  ASSERT_TRUE(VoteInSync(1, 2).ok());
  EXPECT_EQ(Counts()[1], 0u);
  EXPECT_EQ(cluster_.ServerOf(1).task(), v1::SERVER_EXIT);
  EXPECT_EQ(cluster_.ServerOf(1).reason(), "drained");
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).wanted(),
              ::testing::Not(::testing::Contains("server-1")));
  ASSERT_TRUE(cluster_.Leave(cluster_.servers[1]).ok());
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).faults_size(), 0);
  ASSERT_TRUE(cluster_.Vote(0, 3).ok());
  ASSERT_TRUE(cluster_.Vote(2, 3).ok());
  EXPECT_EQ(cluster_.core->committed(), 3u);
}

TEST_F(CoreMovesTest, TheOwnerAfterTheFlipSavesTheCheckpoint) {
  cluster_.job.checkpoint.every = 2;
  TrainTo(1);
  AddServer();
  ASSERT_TRUE(Scale(0, "server-1").ok());
  ASSERT_TRUE(VoteInSync(0, 2).ok());
  ASSERT_TRUE(VoteInSync(1, 2).ok());
  ASSERT_TRUE(cluster_.core->last_decision().checkpoint());
  EXPECT_EQ(cluster_.ServerOf(1).owed_checkpoints_size(), 0);
  EXPECT_EQ(cluster_.ServerOf(2).owed_checkpoints_size(), 1);
  ASSERT_TRUE(cluster_.Save(0, 2).ok());
  EXPECT_TRUE(cluster_.manifests.empty());
  ASSERT_TRUE(cluster_.Save(2, 2).ok());
  EXPECT_EQ(cluster_.manifests.size(), 1u);
}

TEST_F(CoreMovesTest, ADrainedServerStaysUntilItsPartsAreSaved) {
  cluster_.job.checkpoint.every = 2;
  TrainTo(1);
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Vote(i, 2).ok());
  }
  for (const int i : {0, 1}) {
    ASSERT_TRUE(cluster_.Confirm(i, 2).ok());
  }
  AddServer();
  ASSERT_TRUE(Scale(0, "server-1").ok());
  const v1::Placement before = *cluster_.core->GetPlacement();
  ASSERT_TRUE(VoteInSync(0, 3).ok());
  ASSERT_TRUE(VoteInSync(1, 3).ok());
  EXPECT_EQ(Counts()[1], 0u);
  EXPECT_EQ(cluster_.ServerOf(1).task(), v1::SERVER_RUN);
  ASSERT_EQ(cluster_.ServerOf(1).owed_checkpoints_size(), 1);
  v1::ReportRequest saved = cluster_.Of(cluster_.servers[1]);
  saved.mutable_checkpoint_saved()->set_timeline(1);
  saved.mutable_checkpoint_saved()->set_step(2);
  saved.mutable_checkpoint_saved()->set_data_dir("/data/server-1");
  for (int i = 0; i < before.owner_size(); ++i) {
    if (before.owner(i) == 1) {
      v1::SavedRecord* record = saved.mutable_checkpoint_saved()->add_records();
      record->set_chunk(static_cast<uint32_t>(i));
      record->set_timeline(1);
      record->set_version(2);
    }
  }
  ASSERT_TRUE(cluster_.Send(saved).ok());
  EXPECT_EQ(cluster_.ServerOf(1).task(), v1::SERVER_EXIT);
}

TEST_F(CoreMovesTest, MovesGoOnUnderTheNextCoordinator) {
  cluster_.options.continue_run = true;
  TrainTo(1);
  AddServer();
  ASSERT_TRUE(VoteInSync(0, 2).ok());
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  const std::vector<uint32_t> counts = Counts();
  ASSERT_TRUE(cluster_.Start().ok());
  EXPECT_EQ(Counts(), counts);
  for (const uint64_t server : cluster_.servers) {
    ASSERT_TRUE(cluster_.Load(server, 2).ok());
  }
  ASSERT_EQ(cluster_.ServerOf(1).replicate_size(), 1);
  ASSERT_TRUE(cluster_.Vote(0, 3).ok());
  ASSERT_TRUE(VoteInSync(1, 3).ok());
  ASSERT_TRUE(cluster_.Vote(2, 3).ok());
  EXPECT_GT(Counts()[2], counts[2]);
}

TEST_F(CoreMovesTest, TheLastServerCannotBeDrained) {
  TrainTo(1);
  ASSERT_TRUE(Scale(0, "server-1").ok());
  EXPECT_THAT(std::string(Scale(0, "server-0").status().message()),
              HasSubstr("has 1 servers and needs 1"));
}

TEST_F(CoreMovesTest, ThereAreNoMoreServersThanChunks) {
  TrainTo(1);
  const auto chunks =
      static_cast<uint32_t>(cluster_.core->table()->chunks().size());
  EXPECT_EQ(Scale(chunks - 1, "").status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Scale(chunks - 2, "").ok());
}

class CoreReplicaTest : public CoreMovesTest {
 protected:
  CoreReplicaTest() {
    cluster_.job.server.durability = Durability::kReplica;
    cluster_.job.server.count = 3;
  }
  void StepInSync(uint64_t step) {
    for (const int i : {0, 1}) {
      ASSERT_TRUE(cluster_.Done(i, step).ok());
    }
    for (const int i : {0, 1, 2}) {
      ASSERT_TRUE(VoteInSync(i, step).ok());
    }
    for (const int i : {0, 1, 2}) {
      ASSERT_TRUE(cluster_.Confirm(i, step).ok());
    }
    ASSERT_EQ(cluster_.core->committed(), step);
  }
};

TEST_F(CoreReplicaTest, EveryServerKeepsACopyAtTheNextInTheRing) {
  cluster_.Train();
  for (int i = 0; i < 3; ++i) {
    const v1::ServerDirective directive = cluster_.ServerOf(i);
    ASSERT_EQ(directive.replicate_size(), 1);
    EXPECT_EQ(directive.replicate(0).server(),
              "server-" + std::to_string((i + 1) % 3));
    EXPECT_TRUE(directive.replicate(0).standing());
    ASSERT_EQ(directive.receive_size(), 1);
    EXPECT_EQ(directive.receive(0).server(),
              "server-" + std::to_string((i + 2) % 3));
  }
}

TEST_F(CoreReplicaTest, AServerThatStaysAwayIsReplacedByItsCopy) {
  cluster_.Train();
  StepInSync(1);
  cluster_.Kill(v1::ROLE_SERVER, 1);
  cluster_.Advance(absl::Seconds(10) - absl::Nanoseconds(1));
  EXPECT_GT(Counts()[1], 0u);
  const uint64_t version = cluster_.core->GetPlacement()->placement_version();
  const uint32_t total = Counts()[1] + Counts()[2];
  cluster_.Advance(absl::Nanoseconds(1));
  EXPECT_EQ(Counts()[1], 0u);
  EXPECT_EQ(Counts()[2], total);
  EXPECT_EQ(cluster_.core->GetPlacement()->placement_version(), version + 1);
  // The heir is to begin a new life, with the copies among what it holds.
  EXPECT_EQ(cluster_.core->Directive(cluster_.servers[2], 0).status().code(),
            absl::StatusCode::kAborted);
  const auto life = cluster_.Return(cluster_.NextLifeOf(2, 0, 2));
  ASSERT_TRUE(life.ok()) << life.status();
  EXPECT_EQ(cluster_.ServerOf(2).load_step(), 1u);
  EXPECT_EQ(cluster_.WorkerOf(0).voted_size(), 0);
  ASSERT_TRUE(cluster_.Load(*life, 1).ok());
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  EXPECT_EQ(cluster_.core->committed(), 1u);
  ASSERT_TRUE(cluster_.Vote(2, 2).ok());
  EXPECT_EQ(cluster_.core->committed(), 2u);
}

TEST_F(CoreReplicaTest, ACopyThatIsBehindReplacesNobody) {
  cluster_.Train();
  StepInSync(1);
  for (const int i : {0, 1, 2}) {
    ASSERT_TRUE(cluster_.Vote(i, 2).ok());  // Nothing is in sync through 2.
  }
  cluster_.Kill(v1::ROLE_SERVER, 1);
  cluster_.Advance(absl::Minutes(1));
  EXPECT_GT(Counts()[1], 0u);
}

TEST_F(CoreReplicaTest, AServerThatComesBackInTimeIsNotReplaced) {
  cluster_.Train();
  StepInSync(1);
  cluster_.Kill(v1::ROLE_SERVER, 1);
  cluster_.Advance(absl::Seconds(9));
  const auto life = cluster_.Return(cluster_.NextLifeOf(1, 0, 1));
  ASSERT_TRUE(life.ok()) << life.status();
  cluster_.Advance(absl::Seconds(9));
  EXPECT_GT(Counts()[1], 0u);
}

TEST_F(CoreReplicaTest, TwoServersAreTheLeast) {
  cluster_.job.server.count = 2;
  cluster_.Train();
  EXPECT_THAT(std::string(Scale(0, "server-1").status().message()),
              HasSubstr("has 2 servers and needs 2"));
}

}  // namespace
}  // namespace ballast
