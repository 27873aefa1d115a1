// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/run_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::Decision DecisionOf(uint64_t timeline, uint64_t step) {
  v1::Decision decision;
  decision.set_timeline(timeline);
  decision.set_step(step);
  decision.set_loss(static_cast<double>(step) + 0.5);
  return decision;
}

class RunStateTest : public ::testing::Test {
 protected:
  RunStateTest() {
    identity_.run_id = "0123456789abcdef0123456789abcdef";
    identity_.name = "austen";
    identity_.timeline = 1;
    identity_.term = 3;
    identity_.numerics = {{"model.width", "128"}};
    Put(PutIdentity(identity_));
  }
  void Put(const StateChange& change) {
    if (change.value.has_value()) {
      pairs_[change.key] = *change.value;
    } else {
      pairs_.erase(change.key);
    }
  }
  absl::StatusOr<RunState> Parse() const {
    return ParseRunState({pairs_.begin(), pairs_.end()});
  }
  RunIdentity identity_;
  std::map<std::string, std::string> pairs_;
};

TEST_F(RunStateTest, ReadsBackTheGroup) {
  v1::Placement placement;
  placement.set_layout("large");
  placement.set_placement_version(3);
  placement.add_owner(1);
  v1::JoinRequest join;
  join.set_name("worker-0");
  join.set_layout("large");
  v1::Fault fault;
  fault.set_kind("killed");
  Put(PutLayout("large"));
  Put(PutPlacement(placement));
  Put(PutWanted({{"server-0", v1::ROLE_SERVER, true},
                 {"worker-0", v1::ROLE_WORKER, false}}));
  Put(PutDurability("step"));
  Put(PutMember(uint64_t{1} << 32, join));
  Put(PutFault(7, fault));
  const absl::StatusOr<RunState> state = Parse();
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(state->layout, "large");
  EXPECT_EQ(state->placement->placement_version(), 3u);
  EXPECT_EQ(state->placement->layout(), "");  // Kept once.
  EXPECT_THAT(state->wanted,
              ElementsAre(WantedMember{"server-0", v1::ROLE_SERVER, true},
                          WantedMember{"worker-0", v1::ROLE_WORKER, false}));
  EXPECT_EQ(state->durability, "step");
  EXPECT_EQ(state->members.at(uint64_t{1} << 32).name(), "worker-0");
  EXPECT_EQ(state->members.at(uint64_t{1} << 32).layout(), "");
  EXPECT_EQ(state->faults.at(7).kind(), "killed");
  Put(DeleteMember(uint64_t{1} << 32));
  Put(DeleteFault(7));
  Put(DeletePlacement());
  EXPECT_TRUE(Parse()->members.empty());
  EXPECT_TRUE(Parse()->faults.empty());
  EXPECT_FALSE(Parse()->placement.has_value());
}

TEST_F(RunStateTest, TheLeadersKeyIsNoneOfTheRuns) {
  pairs_["leader"] = "here:7400";
  EXPECT_TRUE(Parse().ok());
  const auto alone = ParseRunState({{"leader", "here:7400"}});
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_FALSE(alone->identity.has_value());
  pairs_["wanted"] = "damaged";
  EXPECT_EQ(Parse().status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(RunStateTest, ReadsBackWhatItWrote) {
  Put(PutBranch(1, {{0, 0}}));
  Put(PutDecision(DecisionOf(1, 1)));
  Put(PutCheckpoint({1, 1}, "/run/checkpoints/step-1/manifest.json"));
  Put(PutEvaluation({1, 1}, 1.75));
  Put(PutEnd(1, {1, "abcd"}));
  const absl::StatusOr<RunState> state = Parse();
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(state->identity, identity_);
  EXPECT_EQ(state->decisions.at({1, 1}).loss(), 1.5);
  EXPECT_EQ(state->checkpoints.at({1, 1}),
            "/run/checkpoints/step-1/manifest.json");
  EXPECT_EQ(state->evaluations.at({1, 1}), 1.75);
  EXPECT_EQ(state->ends.at(1).step, 1u);
  EXPECT_EQ(state->ends.at(1).state_hash, "abcd");
  EXPECT_EQ(state->branches.at(1).parent, StepKey({0, 0}));
}

TEST_F(RunStateTest, AnEmptyStoreIsNoRun) {
  const absl::StatusOr<RunState> state = ParseRunState({});
  ASSERT_TRUE(state.ok());
  EXPECT_FALSE(state->identity.has_value());
  EXPECT_TRUE(state->History().empty());
  EXPECT_FALSE(state->newest_checkpoint().has_value());
}

TEST_F(RunStateTest, KeysSortLikeTheirNumbers) {
  EXPECT_LT(PutDecision(DecisionOf(2, 9)).key,
            PutDecision(DecisionOf(2, 10)).key);
  EXPECT_LT(PutDecision(DecisionOf(2, 999)).key,
            PutDecision(DecisionOf(10, 1)).key);
}

TEST_F(RunStateTest, DeletionsNameTheSameKeys) {
  EXPECT_EQ(DeleteDecision({1, 7}).key, PutDecision(DecisionOf(1, 7)).key);
  EXPECT_FALSE(DeleteDecision({1, 7}).value.has_value());
  EXPECT_EQ(DeleteCheckpoint({1, 7}).key, PutCheckpoint({1, 7}, "x").key);
}

TEST_F(RunStateTest, HistoryLeavesAbandonedBranchesOut) {
  // Timeline 1 made 1 to 4; 2 left it at 2 and made 3; 3 left that same
  // checkpoint at 2 again and made 3 and 4.
  for (uint64_t step = 1; step <= 4; ++step) {
    Put(PutDecision(DecisionOf(1, step)));
  }
  Put(PutDecision(DecisionOf(2, 3)));
  Put(PutDecision(DecisionOf(3, 3)));
  Put(PutDecision(DecisionOf(3, 4)));
  Put(PutBranch(1, {{0, 0}}));
  Put(PutBranch(2, {{1, 2}}));
  Put(PutBranch(3, {{1, 2}}));
  identity_.timeline = 3;
  Put(PutIdentity(identity_));
  const absl::StatusOr<RunState> state = Parse();
  ASSERT_TRUE(state.ok());
  std::vector<StepKey> keys;
  for (const v1::Decision& decision : state->History()) {
    keys.push_back({decision.timeline(), decision.step()});
  }
  EXPECT_THAT(keys, ElementsAre(StepKey{1, 1}, StepKey{1, 2}, StepKey{3, 3},
                                StepKey{3, 4}));
}

TEST_F(RunStateTest, HistoryGoesThroughATimelineWithoutSteps) {
  Put(PutDecision(DecisionOf(1, 1)));
  Put(PutBranch(2, {{1, 1}}));
  identity_.timeline = 2;
  Put(PutIdentity(identity_));
  EXPECT_EQ(Parse()->History().size(), 1u);
}

TEST_F(RunStateTest, TheNewestCheckpointIsOfTheNewestTimeline) {
  Put(PutCheckpoint({1, 9}, "a"));
  Put(PutCheckpoint({2, 10}, "b"));
  EXPECT_EQ(Parse()->newest_checkpoint(), StepKey({2, 10}));
}

TEST_F(RunStateTest, RefusesForeignAndDamagedRecords) {
  for (const auto& [key, value] : std::map<std::string, std::string>{
           {"stranger", "x"},
           {"step/1", "x"},
           {"step/x/1", "x"},
           {"step/00000000000000000001/00000000000000000001", "\xff\xff"},
           {"step/1/1/1", "x"},
           {"evaluation/00000000000000000001/00000000000000000001", "short"},
           {"branch/00000000000000000001", "short"},
           {"end/00000000000000000001", "short"},
           {"run", "short"}}) {
    auto pairs = pairs_;
    pairs[key] = value;
    const absl::Status status =
        ParseRunState({pairs.begin(), pairs.end()}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << key;
    EXPECT_THAT(std::string(status.message()), HasSubstr("'" + key + "'"));
  }
}

TEST_F(RunStateTest, ADecisionUnderAnotherKeyIsDamage) {
  pairs_[PutDecision(DecisionOf(1, 2)).key] =
      DecisionOf(1, 3).SerializeAsString();
  EXPECT_EQ(Parse().status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(RunStateTest, RecordsWithoutARunAreDamage) {
  pairs_.erase("run");
  Put(PutDecision(DecisionOf(1, 1)));
  EXPECT_EQ(Parse().status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace ballast
