// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/step_chain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ballast {
namespace {

using ::testing::HasSubstr;

class StepChainTest : public ::testing::Test {
 protected:
  StepChainTest() {
    state_.identity.emplace();
    state_.identity->timeline = 1;
    state_.branches[1] = {};
  }

  // Steps [first, last] of a timeline, chained to `previous`; returns the last
  // chain.
  std::string Add(uint64_t timeline, uint64_t first, uint64_t last,
                  std::string previous) {
    for (uint64_t step = first; step <= last; ++step) {
      v1::Decision decision;
      decision.set_timeline(timeline);
      decision.set_step(step);
      decision.set_loss(1.0 / static_cast<double>(step));
      previous = ChainOf(previous, decision);
      decision.set_chain(previous);
      state_.decisions[{timeline, step}] = decision;
    }
    return previous;
  }
  void Branch(uint64_t timeline, StepKey parent) {
    state_.identity->timeline = timeline;
    state_.branches[timeline] = {parent};
  }
  std::string Error() const {
    const absl::Status status = CheckChain(state_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    return std::string(status.message());
  }

  RunState state_;
};

TEST_F(StepChainTest, DependsOnEverythingButTheRecordsOwnChain) {
  v1::Decision record;
  record.set_step(3);
  const std::string chain = ChainOf("before", record);
  EXPECT_EQ(chain.size(), 16u);
  record.set_chain("anything");
  EXPECT_EQ(ChainOf("before", record), chain);
  EXPECT_NE(ChainOf("befora", record), chain);
  record.set_bias2(1e-30f);
  EXPECT_NE(ChainOf("before", record), chain);
}

TEST_F(StepChainTest, AWholeLogIsCheckedFromItsFirstStep) {
  const std::string head = Add(1, 1, 5, "");
  const auto report = CheckChain(state_);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->records, 5u);
  EXPECT_EQ(report->checked, 5u);
  EXPECT_EQ(report->timelines, 1u);
  EXPECT_EQ(report->first_step, 1u);
  EXPECT_EQ(report->last_step, 5u);
  EXPECT_EQ(report->head, head);
}

TEST_F(StepChainTest, AnEmptyLogIsWhole) {
  const auto report = CheckChain(state_);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->records, 0u);
  EXPECT_EQ(report->head, "");
}

TEST_F(StepChainTest, OfAPrunedLogTheOldestRecordIsTakenOnTrust) {
  Add(1, 1, 9, "");
  for (uint64_t step = 1; step < 7; ++step) {
    state_.decisions.erase({1, step});
  }
  auto report = CheckChain(state_);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->records, 3u);
  EXPECT_EQ(report->checked, 2u);
  EXPECT_EQ(report->first_step, 7u);
  // The next one tells when even that was changed.
  state_.decisions[{1, 7}].set_chain(std::string(16, 'x'));
  EXPECT_THAT(Error(), HasSubstr("step 8 of timeline 1"));
}

TEST_F(StepChainTest, NamesTheStepThatWasChanged) {
  Add(1, 1, 5, "");
  state_.decisions[{1, 3}].set_loss(0.5);
  EXPECT_THAT(Error(), HasSubstr("step 3 of timeline 1"));
}

TEST_F(StepChainTest, NamesTheStepThatIsMissing) {
  Add(1, 1, 5, "");
  state_.decisions.erase({1, 4});
  EXPECT_THAT(Error(), HasSubstr("no record of step 4"));
}

TEST_F(StepChainTest, NamesARecordWithoutAChain) {
  Add(1, 1, 2, "");
  state_.decisions[{1, 2}].clear_chain();
  EXPECT_THAT(Error(), HasSubstr("step 2 of timeline 1 has no chain"));
}

TEST_F(StepChainTest, ABranchGoesOnFromWhereItLeftItsParent) {
  Add(1, 1, 8, "");
  Branch(2, {1, 5});
  const std::string at_5 = state_.decisions[{1, 5}].chain();
  Add(2, 6, 7, at_5);
  auto report = CheckChain(state_);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->records, 10u);
  EXPECT_EQ(report->checked, 10u);
  EXPECT_EQ(report->timelines, 2u);
  EXPECT_EQ(report->last_step, 7u);
  // Continued from the abandoned step instead.
  Add(2, 6, 7, state_.decisions[{1, 8}].chain());
  EXPECT_THAT(Error(), HasSubstr("step 6 of timeline 2"));
}

TEST_F(StepChainTest, ABranchOfABranchThatMadeNoStepFindsItsParent) {
  Add(1, 1, 5, "");
  Branch(2, {1, 5});
  Branch(3, {2, 5});
  Add(3, 6, 6, state_.decisions[{1, 5}].chain());
  const auto report = CheckChain(state_);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->checked, 6u);
}

TEST_F(StepChainTest, ABranchFromTheVeryBeginningStartsEmpty) {
  Add(1, 1, 3, "");
  Branch(2, {1, 0});
  Add(2, 1, 2, "");
  const auto report = CheckChain(state_);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->checked, 5u);
  // An abandoned record is checked too.
  state_.decisions[{1, 2}].set_loss(7);
  EXPECT_THAT(Error(), HasSubstr("step 2 of timeline 1"));
}

}  // namespace
}  // namespace ballast
