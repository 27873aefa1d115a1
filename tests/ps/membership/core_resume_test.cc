// SPDX-License-Identifier: Apache-2.0
// A run that is taken up again from what the store holds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ps/membership/coordinator_core.h"
#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::ballast::testing::CoreHarness;
using ::testing::HasSubstr;

class CoreResumeTest : public ::testing::Test {
 protected:
  Phase phase() const { return cluster_.core->phase(); }
  // Trains to `step` and forgets the process.
  void CrashAfter(uint64_t step) {
    cluster_.Train();
    for (uint64_t i = 1; i <= step; ++i) {
      cluster_.Step(i);
    }
    cluster_.core.reset();
    cluster_.metrics.clear();
  }
  RunState State() const {
    return *ParseRunState({cluster_.pairs.begin(), cluster_.pairs.end()});
  }
  CoreHarness cluster_;
};

TEST_F(CoreResumeTest, TakesTheNewestCheckpointUnderANewTimeline) {
  CrashAfter(3);
  cluster_.options.resume = true;
  ASSERT_TRUE(cluster_.Start().ok());
  EXPECT_EQ(cluster_.core->identity().timeline, 2u);
  EXPECT_EQ(cluster_.core->identity().run_id, cluster_.options.new_run_id);
  EXPECT_EQ(cluster_.core->committed(), 2u);
  EXPECT_EQ(State().branches.at(2).parent, StepKey({1, 2}));
  cluster_.JoinAll();
  const v1::ServerDirective load = cluster_.ServerOf(0);
  EXPECT_EQ(load.task(), v1::SERVER_LOAD);
  EXPECT_EQ(load.load_step(), 2u);
  EXPECT_EQ(load.load_manifest(), testing::ManifestPath({1, 2}));
  EXPECT_EQ(load.timeline(), 2u);
  ASSERT_EQ(load.keep_checkpoints_size(), 1);
  EXPECT_EQ(load.keep_checkpoints(0).timeline(), 1u);
  cluster_.LoadAll();
  EXPECT_EQ(phase(), Phase::kTraining);
  EXPECT_EQ(cluster_.WorkerOf(0).step(), 3u);
}

TEST_F(CoreResumeTest, CountsGoOnWhereTheCheckpointStands) {
  CoreHarness whole;
  whole.Train();
  whole.RunToDone();
  CrashAfter(3);
  cluster_.options.resume = true;
  cluster_.Train();
  cluster_.RunToDone();
  const v1::Decision& ours = cluster_.core->last_decision();
  const v1::Decision& theirs = whole.core->last_decision();
  EXPECT_EQ(ours.step(), 6u);
  EXPECT_EQ(ours.optimizer_step(), theirs.optimizer_step());
  EXPECT_EQ(ours.samples_consumed(), theirs.samples_consumed());
  EXPECT_EQ(ours.learning_rate(), theirs.learning_rate());
  EXPECT_EQ(ours.bias2(), theirs.bias2());
  EXPECT_EQ(cluster_.metrics.size(), 4u);
  EXPECT_EQ(cluster_.metrics.front().decision.step(), 3u);
  EXPECT_EQ(State().History().back().timeline(), 2u);
}

TEST_F(CoreResumeTest, SkippedStepsBeforeTheCheckpointStayUncounted) {
  cluster_.Train();
  ASSERT_TRUE(cluster_.Vote(0, 1).ok());
  ASSERT_TRUE(cluster_.VoteNonFinite(1, 1, 0, 1).ok());
  cluster_.Step(2);
  cluster_.options.resume = true;
  cluster_.Train();
  cluster_.Step(3);
  EXPECT_EQ(cluster_.core->last_decision().optimizer_step(), 2u);
  EXPECT_EQ(cluster_.core->GetStatus(cluster_.now).skipped_steps(), 1u);
}

TEST_F(CoreResumeTest, NumbersAndIncarnationsAreNeverUsedTwice) {
  cluster_.Train();
  cluster_.Step(1);
  cluster_.Step(2);
  const uint64_t number = cluster_.NumberOf(cluster_.workers[0]);
  const uint64_t incarnation = cluster_.workers[1];
  cluster_.options.resume = true;
  cluster_.Train();
  EXPECT_GT(cluster_.NumberOf(cluster_.workers[0]), number);
  EXPECT_GT(cluster_.servers[0], incarnation);
  EXPECT_EQ(cluster_.core->identity().term, 2u);
}

TEST_F(CoreResumeTest, WorksWithOtherCountsOfMembers) {
  CrashAfter(2);
  cluster_.job.server.count = 3;
  cluster_.job.worker.count = 1;
  cluster_.options.resume = true;
  cluster_.Train();
  cluster_.RunToDone();
  EXPECT_EQ(cluster_.core->last_decision().servers(), 3u);
}

TEST_F(CoreResumeTest, OldCheckpointsAreDroppedAcrossTimelines) {
  CrashAfter(5);  // Checkpoints 2 and 4 stand, 5 was lost.
  cluster_.options.resume = true;
  cluster_.Train();
  EXPECT_EQ(cluster_.core->committed(), 4u);
  cluster_.RunToDone();
  const RunState state = State();
  EXPECT_EQ(state.checkpoints.size(), 2u);
  EXPECT_TRUE(state.checkpoints.contains({1, 4}));
  EXPECT_TRUE(state.checkpoints.contains({2, 6}));
  EXPECT_FALSE(state.decisions.contains({1, 1}));
}

TEST_F(CoreResumeTest, ASecondCrashBeforeACheckpointBranchesAtTheSamePlace) {
  CrashAfter(3);
  cluster_.options.resume = true;
  cluster_.Train();
  cluster_.Step(3);
  cluster_.Train();
  EXPECT_EQ(cluster_.core->identity().timeline, 3u);
  EXPECT_EQ(cluster_.core->committed(), 2u);
  EXPECT_EQ(State().branches.at(3).parent, StepKey({1, 2}));
  cluster_.Step(3);
  const std::vector<v1::Decision> history = State().History();
  ASSERT_EQ(history.size(), 2u);  // Step 1 lies below the checkpoint.
  EXPECT_EQ(history[0].timeline(), 1u);
  EXPECT_EQ(history[1].timeline(), 3u);
}

TEST_F(CoreResumeTest, WithoutACheckpointItStartsAnewUnderANewTimeline) {
  CrashAfter(1);
  cluster_.options.resume = true;
  cluster_.Train();
  EXPECT_EQ(cluster_.core->committed(), 0u);
  EXPECT_EQ(cluster_.core->identity().timeline, 2u);
  EXPECT_EQ(State().branches.at(2).parent, StepKey({0, 0}));
  cluster_.RunToDone();
}

TEST_F(CoreResumeTest, AfterStopAfterTheRunGoesOnToItsEnd) {
  cluster_.options.stop_after = 3;
  cluster_.Train();
  cluster_.RunToDone();
  cluster_.options.stop_after.reset();
  cluster_.options.resume = true;
  cluster_.Train();
  EXPECT_EQ(cluster_.core->committed(), 3u);
  cluster_.RunToDone();
  EXPECT_EQ(cluster_.core->committed(), 6u);
}

TEST_F(CoreResumeTest, AFinishedRunIsEvaluatedHashedAndEndsAgain) {
  cluster_.Train();
  cluster_.RunToDone();
  const std::string hash = cluster_.core->state_hash();
  cluster_.options.resume = true;
  cluster_.Train();
  EXPECT_EQ(phase(), Phase::kEvaluating);
  cluster_.EvaluateAll(6);
  ASSERT_TRUE(cluster_.Digest(0, 6).ok());
  ASSERT_TRUE(cluster_.Digest(1, 6).ok());
  EXPECT_EQ(phase(), Phase::kDone);
  EXPECT_EQ(cluster_.core->state_hash(), hash);
}

TEST_F(CoreResumeTest, AStopAfterThatLiesBehindEndsAtOnce) {
  CrashAfter(4);
  cluster_.options.resume = true;
  cluster_.options.stop_after = 2;
  cluster_.Train();
  EXPECT_EQ(phase(), Phase::kEvaluating);
  EXPECT_EQ(cluster_.core->committed(), 4u);
}

TEST_F(CoreResumeTest, AStoredRunIsNotOverwrittenWithoutResume) {
  CrashAfter(2);
  const absl::Status status = cluster_.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("holds the run 'small' at step 2; pass --resume"));
}

TEST_F(CoreResumeTest, ARunThatNeverStartedMayBeStartedAgain) {
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.options.new_run_id = "ffffffffffffffffffffffffffffffff";
  cluster_.options.numerics[0].second = "64";
  ASSERT_TRUE(cluster_.Start().ok());
  // Data directories may carry the first name already.
  EXPECT_EQ(cluster_.core->identity().run_id,
            "00112233445566778899aabbccddeeff");
}

TEST_F(CoreResumeTest, NothingCannotBeResumed) {
  cluster_.options.resume = true;
  EXPECT_EQ(cluster_.Start().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(CoreResumeTest, OtherNumericsAreRefusedByName) {
  CrashAfter(2);
  cluster_.options.resume = true;
  cluster_.options.numerics[1].second = "0.002";
  const absl::Status status = cluster_.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("optimizer.lr is 0.002; the run to resume has 0.001"));
}

TEST_F(CoreResumeTest, AnotherRunsNameIsRefused) {
  CrashAfter(2);
  cluster_.options.resume = true;
  cluster_.job.run.name = "other";
  EXPECT_EQ(cluster_.Start().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(CoreResumeTest, AManifestOfAnotherRunIsDataLoss) {
  CrashAfter(2);
  cluster_.options.resume = true;
  cluster_.manifests.begin()->second.run.low ^= 1;
  EXPECT_EQ(cluster_.Start().code(), absl::StatusCode::kDataLoss);
}

TEST_F(CoreResumeTest, WorkersMustHaveTheCheckpointsModel) {
  CrashAfter(2);
  cluster_.options.resume = true;
  ASSERT_TRUE(cluster_.Start().ok());
  cluster_.layout = testing::SmallLayout(3);
  const absl::Status status =
      cluster_.TryJoin(cluster_.JoinOf(v1::ROLE_WORKER, 0)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("h.2.weight"));
}

}  // namespace
}  // namespace ballast
