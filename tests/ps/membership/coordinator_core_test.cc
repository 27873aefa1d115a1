// SPDX-License-Identifier: Apache-2.0
// A run without faults, phase by phase.
#include "ps/membership/coordinator_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::ballast::testing::CoreHarness;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::pair<uint32_t, uint32_t>> SpansOf(
    const v1::WorkerDirective& directive) {
  std::vector<std::pair<uint32_t, uint32_t>> spans;
  for (const v1::MicroBatchSpan& span : directive.spans()) {
    spans.emplace_back(span.first(), span.count());
  }
  return spans;
}

class CoordinatorCoreTest : public ::testing::Test {
 protected:
  Phase phase() const { return cluster_.core->phase(); }
  CoreHarness cluster_;
};

TEST_F(CoordinatorCoreTest, FormsWhenTheLastMemberJoins) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.Join(v1::ROLE_SERVER, 0);
  cluster_.Join(v1::ROLE_SERVER, 1);
  cluster_.Join(v1::ROLE_WORKER, 0);
  EXPECT_EQ(phase(), Phase::kForming);
  EXPECT_EQ(cluster_.ServerOf(0).task(), v1::SERVER_WAIT);
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_WAIT);
  EXPECT_EQ(cluster_.core->GetPlacement().status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).waits_for(),
              HasSubstr("1 of 2 workers have joined, missing worker-1"));
  cluster_.Join(v1::ROLE_WORKER, 1);
  EXPECT_EQ(phase(), Phase::kLoading);
}

TEST_F(CoordinatorCoreTest, MembersMayJoinInAnyOrder) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.Join(v1::ROLE_WORKER, 1);
  cluster_.Join(v1::ROLE_SERVER, 1);
  cluster_.Join(v1::ROLE_WORKER, 0);
  cluster_.Join(v1::ROLE_SERVER, 0);
  const v1::Placement placement = *cluster_.core->GetPlacement();
  ASSERT_EQ(placement.servers_size(), 2);
  EXPECT_EQ(placement.servers(0).name(), "server-0");
  EXPECT_EQ(placement.servers(1).name(), "server-1");
}

TEST_F(CoordinatorCoreTest, ThePlacementCoversEveryChunk) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.JoinAll();
  const v1::Placement placement = *cluster_.core->GetPlacement();
  EXPECT_EQ(placement.placement_version(), 1u);
  EXPECT_EQ(placement.timeline(), 1u);
  EXPECT_EQ(placement.optimizer(), "adamw");
  EXPECT_EQ(placement.layout(), cluster_.layout.Encode());
  EXPECT_EQ(placement.chunk_elems(), cluster_.job.server.chunk_elems);
  EXPECT_EQ(static_cast<size_t>(placement.owner_size()),
            cluster_.core->table()->chunks().size());
  EXPECT_EQ(placement.servers(0).address(), "127.0.0.1:9000");
  EXPECT_EQ(placement.servers(0).incarnation(), cluster_.servers[0]);
}

TEST_F(CoordinatorCoreTest, LoadsVersionZeroBeforeTheFirstStep) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.JoinAll();
  const v1::ServerDirective load = cluster_.ServerOf(0);
  EXPECT_EQ(load.task(), v1::SERVER_LOAD);
  EXPECT_EQ(load.load_step(), 0u);
  EXPECT_EQ(load.load_manifest(), "");
  EXPECT_EQ(load.timeline(), 1u);
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_WAIT);
  ASSERT_TRUE(cluster_.Load(cluster_.servers[0], 0).ok());
  ASSERT_TRUE(cluster_.Load(cluster_.servers[0], 0).ok());  // Repeated.
  EXPECT_EQ(phase(), Phase::kLoading);
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).waits_for(),
              HasSubstr("server-1 owes version 0"));
  ASSERT_TRUE(cluster_.Load(cluster_.servers[1], 0).ok());
  EXPECT_EQ(phase(), Phase::kTraining);
}

TEST_F(CoordinatorCoreTest, DealsAStepToWorkersAsNodes) {
  cluster_.Train();
  const v1::WorkerDirective first = cluster_.WorkerOf(0);
  EXPECT_EQ(first.task(), v1::WORKER_TRAIN);
  EXPECT_EQ(first.step(), 1u);
  EXPECT_EQ(first.timeline(), 1u);
  EXPECT_EQ(first.placement_version(), 1u);
  EXPECT_THAT(SpansOf(first), ElementsAre(std::pair(0u, 4u)));
  EXPECT_THAT(SpansOf(cluster_.WorkerOf(1)), ElementsAre(std::pair(4u, 4u)));
  const v1::ServerDirective server = cluster_.ServerOf(1);
  EXPECT_EQ(server.task(), v1::SERVER_RUN);
  EXPECT_EQ(server.collecting_step(), 1u);
  EXPECT_THAT(server.workers(),
              ElementsAre(cluster_.workers[0], cluster_.workers[1]));
}

TEST_F(CoordinatorCoreTest, ThreeWorkersGetListsOfNodes) {
  cluster_.job.worker.count = 3;
  cluster_.Train();
  EXPECT_THAT(SpansOf(cluster_.WorkerOf(0)), ElementsAre(std::pair(0u, 2u)));
  EXPECT_THAT(SpansOf(cluster_.WorkerOf(1)),
              ElementsAre(std::pair(2u, 2u), std::pair(4u, 1u)));
  EXPECT_THAT(SpansOf(cluster_.WorkerOf(2)),
              ElementsAre(std::pair(5u, 1u), std::pair(6u, 2u)));
}

TEST_F(CoordinatorCoreTest, DecidesWithTheLastVote) {
  cluster_.Train();
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  EXPECT_EQ(cluster_.core->committed(), 0u);
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  EXPECT_EQ(cluster_.core->committed(), 1u);
  const v1::Decision& decision = cluster_.core->last_decision();
  EXPECT_EQ(decision.timeline(), 1u);
  EXPECT_EQ(decision.workers(), 2u);
  EXPECT_EQ(decision.servers(), 2u);
  EXPECT_EQ(decision.generation(), 4u);
  EXPECT_DOUBLE_EQ(decision.loss(), 2.0);
  EXPECT_FALSE(decision.checkpoint());
  // The next step is assigned with it.
  EXPECT_EQ(cluster_.WorkerOf(0).step(), 2u);
  EXPECT_EQ(cluster_.ServerOf(0).collecting_step(), 2u);
}

TEST_F(CoordinatorCoreTest, ADecisionIsToBePersistedBeforeItIsTold) {
  cluster_.Train();
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  const RunState state =
      *ParseRunState({cluster_.pairs.begin(), cluster_.pairs.end()});
  ASSERT_TRUE(state.decisions.contains({1, 1}));
  ASSERT_EQ(cluster_.ServerOf(0).decisions_size(), 1);
  EXPECT_EQ(cluster_.ServerOf(0).decisions(0).SerializeAsString(),
            state.decisions.at({1, 1}).SerializeAsString());
}

TEST_F(CoordinatorCoreTest, ADecisionIsRepeatedToEachServerUntilConfirmed) {
  cluster_.Train();
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  ASSERT_TRUE(cluster_.Confirm(0, 1).ok());
  EXPECT_EQ(cluster_.ServerOf(0).decisions_size(), 0);
  EXPECT_EQ(cluster_.ServerOf(1).decisions_size(), 1);
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  ASSERT_EQ(cluster_.ServerOf(1).decisions_size(), 2);
  EXPECT_EQ(cluster_.ServerOf(1).decisions(0).step(), 1u);
  EXPECT_EQ(cluster_.ServerOf(1).decisions(1).step(), 2u);
  ASSERT_TRUE(cluster_.Confirm(1, 2).ok());  // Covers 1 as well.
  EXPECT_EQ(cluster_.ServerOf(1).decisions_size(), 0);
  ASSERT_TRUE(cluster_.Confirm(1, 1).ok());  // Late.
  EXPECT_EQ(cluster_.ServerOf(1).decisions_size(), 0);
}

TEST_F(CoordinatorCoreTest, RepeatedAndLateVotesChangeNothing) {
  cluster_.Train();
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  ASSERT_TRUE(cluster_.Vote(0, 1, 100.0).ok());
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  const std::string decision =
      cluster_.core->last_decision().SerializeAsString();
  const uint64_t number = cluster_.NumberOf(cluster_.servers[0]);
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  ASSERT_TRUE(cluster_.Vote(1, 0).ok());
  EXPECT_EQ(cluster_.core->last_decision().SerializeAsString(), decision);
  EXPECT_EQ(cluster_.NumberOf(cluster_.servers[0]), number);
  EXPECT_EQ(phase(), Phase::kTraining);
}

TEST_F(CoordinatorCoreTest, DirectiveNumbersGrowAndOnlyOnChange) {
  cluster_.Train();
  const uint64_t worker = cluster_.workers[0];
  const uint64_t before = cluster_.NumberOf(worker);
  cluster_.Advance(absl::Seconds(1));
  EXPECT_EQ(cluster_.NumberOf(worker), before);
  const v1::PollReply nothing = *cluster_.core->Directive(worker, before);
  EXPECT_FALSE(nothing.has_worker());
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  EXPECT_GT(cluster_.NumberOf(worker), before);
  EXPECT_TRUE(cluster_.core->Directive(worker, before)->has_worker());
}

TEST_F(CoordinatorCoreTest, EvaluatesBeforeTheNextStepIsAssigned) {
  cluster_.Train();
  cluster_.Step(1);
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  ASSERT_EQ(phase(), Phase::kEvaluating);
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_EVALUATE);
  EXPECT_EQ(cluster_.WorkerOf(0).step(), 2u);
  EXPECT_THAT(SpansOf(cluster_.WorkerOf(1)), ElementsAre(std::pair(2u, 2u)));
  // A server without chunks may vote at once; nothing is decided yet.
  ASSERT_TRUE(cluster_.Vote(0, 3).ok());
  ASSERT_TRUE(cluster_.Vote(1, 3).ok());
  EXPECT_EQ(cluster_.core->committed(), 2u);
  ASSERT_TRUE(cluster_.Evaluate(0, 2, 64.0).ok());
  ASSERT_TRUE(cluster_.Evaluate(0, 2, 99.0).ok());
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).waits_for(),
              HasSubstr("worker-1 owes losses of version 2 (micro-batches 2 "
                        "to 3)"));
  cluster_.now += absl::Seconds(3);
  ASSERT_TRUE(cluster_.Evaluate(1, 2, 32.0).ok());
  ASSERT_EQ(cluster_.evaluations.size(), 1u);
  EXPECT_DOUBLE_EQ(cluster_.evaluations[0].loss, 192.0 / (4 * 32));
  EXPECT_DOUBLE_EQ(cluster_.evaluations[0].seconds, 3.0);
  const v1::StatusReply status = cluster_.core->GetStatus(cluster_.now);
  EXPECT_DOUBLE_EQ(status.validation_loss(), 1.5);
  EXPECT_EQ(status.validation_step(), 2u);
  // The early votes counted.
  EXPECT_EQ(cluster_.core->committed(), 3u);
}

TEST_F(CoordinatorCoreTest, ACheckpointExistsWhenAllHaveSavedAndItIsLogged) {
  cluster_.Train();
  cluster_.Step(1);
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  EXPECT_TRUE(cluster_.core->last_decision().checkpoint());
  // Servers must not drop what they are about to save.
  ASSERT_EQ(cluster_.ServerOf(0).keep_checkpoints_size(), 1);
  EXPECT_EQ(cluster_.ServerOf(0).keep_checkpoints(0).step(), 2u);
  ASSERT_TRUE(cluster_.Save(0, 2).ok());
  ASSERT_TRUE(cluster_.Save(0, 2).ok());
  EXPECT_TRUE(cluster_.manifests.empty());
  ASSERT_TRUE(cluster_.Save(1, 2).ok());
  ASSERT_EQ(cluster_.manifests.size(), 1u);
  const CheckpointManifest& manifest = cluster_.manifests.begin()->second;
  EXPECT_EQ(manifest.step, 2u);
  EXPECT_EQ(manifest.run_name, "small");
  EXPECT_EQ(HashHex(manifest.run), cluster_.options.new_run_id);
  EXPECT_EQ(manifest.config, cluster_.options.config);
  EXPECT_EQ(manifest.samples_consumed, 32u);
  const RunState state =
      *ParseRunState({cluster_.pairs.begin(), cluster_.pairs.end()});
  EXPECT_EQ(state.newest_checkpoint(), StepKey({1, 2}));
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).last_checkpoint(),
            testing::ManifestPath({1, 2}));
}

TEST_F(CoordinatorCoreTest, TrainingGoesOnWhileACheckpointIsSaved) {
  cluster_.job.eval.every = 0;
  cluster_.Train();
  cluster_.Step(1);
  for (const uint64_t step : {2u, 3u}) {
    ASSERT_TRUE(cluster_.Vote(0, step).ok());
    ASSERT_TRUE(cluster_.Vote(1, step).ok());
  }
  EXPECT_EQ(cluster_.core->committed(), 3u);
  ASSERT_TRUE(cluster_.Save(1, 2).ok());
  ASSERT_TRUE(cluster_.Save(0, 2).ok());
  EXPECT_EQ(cluster_.manifests.size(), 1u);
}

TEST_F(CoordinatorCoreTest, NothingIsDroppedBeforeTheNewerIsLogged) {
  cluster_.job.checkpoint.keep = 1;
  cluster_.Train();
  cluster_.Step(1);
  cluster_.Step(2);
  cluster_.Step(3);
  cluster_.hold_manifests = true;
  cluster_.Step(4);  // Saved by both, but its manifest is not on disk.
  ASSERT_EQ(cluster_.held.size(), 1u);
  EXPECT_EQ(cluster_.ServerOf(0).keep_checkpoints_size(), 2);
  EXPECT_TRUE(cluster_.removed.empty());
  cluster_.core->ManifestWritten({1, 4}, testing::ManifestPath({1, 4}),
                                 cluster_.now);
  cluster_.Carry();
  EXPECT_THAT(cluster_.removed, ElementsAre(testing::ManifestPath({1, 2})));
  ASSERT_EQ(cluster_.ServerOf(0).keep_checkpoints_size(), 1);
  EXPECT_EQ(cluster_.ServerOf(0).keep_checkpoints(0).step(), 4u);
}

TEST_F(CoordinatorCoreTest, TheStepLogIsPrunedBelowTheLowestCheckpoint) {
  cluster_.job.checkpoint.keep = 1;
  cluster_.Train();
  for (uint64_t step = 1; step <= 4; ++step) {
    cluster_.Step(step);
  }
  const RunState state =
      *ParseRunState({cluster_.pairs.begin(), cluster_.pairs.end()});
  EXPECT_EQ(state.decisions.begin()->first, StepKey({1, 4}));
  EXPECT_EQ(state.checkpoints.size(), 1u);
  EXPECT_EQ(cluster_.metrics.size(), 4u);
}

TEST_F(CoordinatorCoreTest, EndsOnlyWhenConfirmedSavedHashedAndEvaluated) {
  cluster_.Train();
  for (uint64_t step = 1; step <= 5; ++step) {
    cluster_.Step(step);
  }
  ASSERT_TRUE(cluster_.Vote(0, 6).ok());
  ASSERT_TRUE(cluster_.Vote(1, 6).ok());
  EXPECT_TRUE(cluster_.core->last_decision().checkpoint());
  EXPECT_EQ(cluster_.ServerOf(0).collecting_step(), 0u);
  cluster_.EvaluateAll(6);
  ASSERT_EQ(phase(), Phase::kFinishing);
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_WAIT);
  EXPECT_TRUE(cluster_.ServerOf(0).state_hash_wanted());
  EXPECT_EQ(cluster_.ServerOf(0).state_hash_step(), 6u);
  for (const int server : {0, 1}) {
    ASSERT_TRUE(cluster_.Confirm(server, 6).ok());
    ASSERT_TRUE(cluster_.Save(server, 6).ok());
  }
  ASSERT_TRUE(cluster_.Digest(0, 6).ok());
  EXPECT_EQ(phase(), Phase::kFinishing);
  EXPECT_THAT(cluster_.core->GetStatus(cluster_.now).waits_for(),
              HasSubstr("server-1 owes its digests of version 6"));
  ASSERT_TRUE(cluster_.Digest(1, 6).ok());
  EXPECT_EQ(phase(), Phase::kDone);
  const RunState state =
      *ParseRunState({cluster_.pairs.begin(), cluster_.pairs.end()});
  EXPECT_EQ(state.ends.at(1).step, 6u);
  EXPECT_EQ(state.ends.at(1).state_hash, cluster_.core->state_hash());
  EXPECT_EQ(cluster_.core->state_hash().size(), 32u);
}

TEST_F(CoordinatorCoreTest, ARunIsNotDoneWhileAServerHasNotConfirmed) {
  cluster_.Train();
  for (uint64_t step = 1; step <= 5; ++step) {
    cluster_.Step(step);
  }
  ASSERT_TRUE(cluster_.Vote(0, 6).ok());
  ASSERT_TRUE(cluster_.Vote(1, 6).ok());
  cluster_.EvaluateAll(6);
  for (const int server : {0, 1}) {
    ASSERT_TRUE(cluster_.Save(server, 6).ok());
    ASSERT_TRUE(cluster_.Digest(server, 6).ok());
  }
  ASSERT_TRUE(cluster_.Confirm(0, 6).ok());
  EXPECT_EQ(phase(), Phase::kFinishing);
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_WAIT);
  ASSERT_TRUE(cluster_.Confirm(1, 6).ok());
  EXPECT_EQ(phase(), Phase::kDone);
}

TEST_F(CoordinatorCoreTest, WorkersExitBeforeServers) {
  cluster_.Train();
  cluster_.RunToDone();
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_EXIT);
  EXPECT_EQ(cluster_.ServerOf(0).task(), v1::SERVER_RUN);
  ASSERT_TRUE(cluster_.Leave(cluster_.workers[0]).ok());
  EXPECT_EQ(cluster_.ServerOf(0).task(), v1::SERVER_RUN);
  ASSERT_TRUE(cluster_.Leave(cluster_.workers[1]).ok());
  EXPECT_EQ(cluster_.ServerOf(0).task(), v1::SERVER_EXIT);
  ASSERT_TRUE(cluster_.Leave(cluster_.servers[1]).ok());
  EXPECT_FALSE(cluster_.core->ended());
  ASSERT_TRUE(cluster_.Leave(cluster_.servers[0]).ok());
  EXPECT_TRUE(cluster_.core->ended());
  EXPECT_TRUE(cluster_.core->failure().ok());
}

TEST_F(CoordinatorCoreTest, MembersThatDoNotLeaveAreNotWaitedForForever) {
  cluster_.Train();
  cluster_.RunToDone();
  cluster_.Advance(absl::Seconds(9));
  EXPECT_EQ(cluster_.ServerOf(0).task(), v1::SERVER_RUN);
  cluster_.Advance(absl::Seconds(1));
  EXPECT_EQ(cluster_.ServerOf(0).task(), v1::SERVER_EXIT);
  cluster_.Advance(absl::Seconds(9));
  EXPECT_FALSE(cluster_.core->ended());
  cluster_.Advance(absl::Seconds(1));
  EXPECT_TRUE(cluster_.core->ended());
}

TEST_F(CoordinatorCoreTest, KeepHoldsTheClusterUntilStop) {
  cluster_.options.keep_up = true;
  cluster_.Train();
  cluster_.RunToDone();
  cluster_.Advance(absl::Hours(1));
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_WAIT);
  EXPECT_EQ(cluster_.ServerOf(0).task(), v1::SERVER_RUN);
  cluster_.core->Stop(v1::StopRequest(), cluster_.now);
  EXPECT_EQ(cluster_.WorkerOf(0).task(), v1::WORKER_EXIT);
  EXPECT_FALSE(cluster_.core->ended());
}

TEST_F(CoordinatorCoreTest, EveryStepHasOneLineOfMetrics) {
  cluster_.Train();
  cluster_.RunToDone();
  ASSERT_EQ(cluster_.metrics.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(cluster_.metrics[i].decision.step(), i + 1);
    EXPECT_EQ(cluster_.metrics[i].pushed_bytes, 200u);
    EXPECT_EQ(cluster_.metrics[i].forward_seconds, 2.0);
    EXPECT_EQ(cluster_.metrics[i].state_hash, "");
  }
}

TEST_F(CoordinatorCoreTest, AMissingReportDoesNotHoldADecision) {
  cluster_.job.eval.every = 0;
  cluster_.Train();
  for (const uint64_t step : {1u, 2u}) {
    ASSERT_TRUE(cluster_.Vote(0, step).ok());
    ASSERT_TRUE(cluster_.Vote(1, step).ok());
  }
  EXPECT_EQ(cluster_.core->committed(), 2u);
  EXPECT_TRUE(cluster_.metrics.empty());
  cluster_.Advance(MetricsCollector::kPatience);
  EXPECT_EQ(cluster_.metrics.size(), 2u);
}

TEST_F(CoordinatorCoreTest, WithAHashEveryStepTheNextDecisionWaitsForIt) {
  cluster_.job.run.state_hash_every = true;
  cluster_.Train();
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  ASSERT_TRUE(cluster_.Vote(1, 1).ok());
  EXPECT_EQ(cluster_.ServerOf(0).state_hash_step(), 1u);
  ASSERT_TRUE(cluster_.Vote(0, 2).ok());
  ASSERT_TRUE(cluster_.Vote(1, 2).ok());
  EXPECT_EQ(cluster_.core->committed(), 1u);
  ASSERT_TRUE(cluster_.Digest(0, 1).ok());
  EXPECT_EQ(cluster_.core->committed(), 1u);
  ASSERT_TRUE(cluster_.Digest(1, 1).ok());
  EXPECT_EQ(cluster_.core->committed(), 2u);
}

TEST_F(CoordinatorCoreTest, WithAHashEveryStepEveryLineHasOne) {
  cluster_.job.run.state_hash_every = true;
  cluster_.Train();
  for (uint64_t step = 1; step <= 6; ++step) {
    cluster_.Step(step);
  }
  EXPECT_EQ(phase(), Phase::kDone);
  ASSERT_EQ(cluster_.metrics.size(), 6u);
  for (const StepMetrics& line : cluster_.metrics) {
    EXPECT_EQ(line.state_hash.size(), 32u);
  }
  EXPECT_NE(cluster_.metrics[0].state_hash, cluster_.metrics[1].state_hash);
  EXPECT_EQ(cluster_.metrics[5].state_hash, cluster_.core->state_hash());
}

TEST_F(CoordinatorCoreTest, TheHashDoesNotDependOnServersOrChunks) {
  cluster_.Train();
  cluster_.RunToDone();
  CoreHarness other;
  other.job.server.count = 3;
  other.job.worker.count = 1;
  other.job.server.chunk_elems = kBlockElems;
  other.Train();
  other.RunToDone();
  EXPECT_EQ(other.core->state_hash(), cluster_.core->state_hash());
}

TEST_F(CoordinatorCoreTest, MoreServersThanChunksWork) {
  cluster_.layout = testing::SmallLayout(0);
  cluster_.job.server.count = 3;
  cluster_.Train();
  cluster_.RunToDone();
  EXPECT_EQ(cluster_.core->committed(), 6u);
}

TEST_F(CoordinatorCoreTest, StopAfterEndsEarlyWithACheckpoint) {
  cluster_.options.stop_after = 3;
  cluster_.Train();
  cluster_.RunToDone();
  EXPECT_EQ(cluster_.core->committed(), 3u);
  EXPECT_TRUE(cluster_.manifests.contains(testing::ManifestPath({1, 3})));
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).steps(), 3u);
  // The schedule's horizon stays: the rate is that of step 3 of 6.
  CoreHarness whole;
  whole.Train();
  for (uint64_t step = 1; step <= 3; ++step) {
    whole.Step(step);
  }
  EXPECT_EQ(cluster_.core->last_decision().learning_rate(),
            whole.core->last_decision().learning_rate());
}

TEST_F(CoordinatorCoreTest, StatusCountsStateAndSkippedSteps) {
  cluster_.Train();
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  ASSERT_TRUE(cluster_.VoteNonFinite(1, 1, 0, 3).ok());
  const v1::StatusReply status = cluster_.core->GetStatus(cluster_.now);
  EXPECT_EQ(status.skipped_steps(), 1u);
  EXPECT_EQ(status.step(), 1u);
  EXPECT_EQ(status.parameters(), cluster_.layout.parameter_count());
  EXPECT_EQ(status.state_bytes(), cluster_.layout.parameter_count() * 12);
  EXPECT_EQ(status.phase(), "training");
  EXPECT_EQ(status.members_size(), 4);
  EXPECT_EQ(status.members(0).state(), "active");
  EXPECT_TRUE(std::isnan(status.validation_loss()));
}

TEST_F(CoordinatorCoreTest, SpeedIsThatOfTheLastSteps) {
  cluster_.job.eval.every = 0;
  cluster_.Train();
  for (uint64_t step = 1; step <= 3; ++step) {
    cluster_.now += absl::Seconds(2);
    cluster_.Step(step);
  }
  const v1::StatusReply status = cluster_.core->GetStatus(cluster_.now);
  EXPECT_DOUBLE_EQ(status.tokens_per_s(), 128.0);
  EXPECT_DOUBLE_EQ(status.elapsed_seconds(), 6.0);
  EXPECT_DOUBLE_EQ(cluster_.metrics[1].step_seconds, 2.0);
}

}  // namespace
}  // namespace ballast
