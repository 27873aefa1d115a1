// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/step_core.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "ps/membership/schedule.h"
#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::ballast::testing::SmallJob;
using ::ballast::testing::SmallLayout;

v1::Vote VoteOf(uint64_t step, std::initializer_list<double> squares) {
  ExactSum sum;
  for (const double square : squares) {
    sum.Add(square);
  }
  v1::Vote vote;
  vote.set_step(step);
  vote.set_sum_squares(sum.Encode());
  return vote;
}

v1::Vote WithLoss(v1::Vote vote, double loss_sum) {
  vote.set_has_loss(true);
  vote.set_loss_sum(loss_sum);
  return vote;
}

v1::Vote WithNonFinite(v1::Vote vote, uint32_t tensor, uint64_t count) {
  v1::NonFinite* entry = vote.add_non_finite();
  entry->set_tensor(tensor);
  entry->set_count(count);
  return vote;
}

class StepCoreTest : public ::testing::Test {
 protected:
  StepCoreTest() : step_(job_, SmallLayout()) { step_.Begin(1); }

  v1::Decision Decide(const v1::Decision& previous = {}) {
    const absl::StatusOr<v1::Decision> decision = step_.Decide(previous);
    EXPECT_TRUE(decision.ok()) << decision.status();
    return decision.value_or(v1::Decision());
  }

  const Job job_ = SmallJob();  // 256 tokens a step.
  StepCore step_;
};

TEST_F(StepCoreTest, ClipsByTheNormOfTheMeanGradient) {
  // Norm of the sum 1024, of the mean 4, clipped to 1.
  ASSERT_TRUE(step_.AddVote(1, WithLoss(VoteOf(1, {512.0 * 512.0}), 512)).ok());
  ASSERT_TRUE(step_.AddVote(2, VoteOf(1, {3 * 512.0 * 512.0})).ok());
  const v1::Decision decision = Decide();
  EXPECT_DOUBLE_EQ(decision.grad_norm(), 4.0);
  EXPECT_NEAR(decision.grad_norm_clipped(), 1.0, 1e-6);
  EXPECT_EQ(decision.grad_scale(),
            static_cast<float>(ClipFactor(1.0, 4.0) / 256.0));
  EXPECT_DOUBLE_EQ(decision.loss(), 2.0);
  EXPECT_FALSE(decision.skip());
}

TEST_F(StepCoreTest, LeavesASmallGradientAlone) {
  ASSERT_TRUE(step_.AddVote(1, WithLoss(VoteOf(1, {256.0}), 512)).ok());
  const v1::Decision decision = Decide();
  EXPECT_DOUBLE_EQ(decision.grad_norm(), 16.0 / 256.0);
  EXPECT_DOUBLE_EQ(decision.grad_norm_clipped(), 16.0 / 256.0);
  EXPECT_EQ(decision.grad_scale(), 1.0f / 256.0f);
}

TEST_F(StepCoreTest, CountsAndScalarsOfTheFirstStep) {
  ASSERT_TRUE(step_.AddVote(1, WithLoss(VoteOf(1, {1.0}), 512)).ok());
  const v1::Decision decision = Decide();
  EXPECT_EQ(decision.step(), 1u);
  EXPECT_EQ(decision.optimizer_step(), 1u);
  EXPECT_EQ(decision.samples_consumed(), 16u);
  EXPECT_EQ(decision.tokens(), 256u);
  EXPECT_EQ(decision.bias1(), static_cast<float>(1.0 - 0.9));
  EXPECT_EQ(decision.bias2(), static_cast<float>(1.0 - 0.95));
  EXPECT_EQ(
      decision.learning_rate(),
      static_cast<float>(LearningRate(job_.optimizer, job_.schedule, 6, 1)));
}

TEST_F(StepCoreTest, TheOrderAndSplitOfVotesChangeNoBit) {
  const double large = 1e17;
  ASSERT_TRUE(step_.AddVote(1, WithLoss(VoteOf(1, {large, 1.0}), 512)).ok());
  ASSERT_TRUE(step_.AddVote(2, VoteOf(1, {1.0, 1.0})).ok());
  const std::string one = Decide().SerializeAsString();
  step_.Begin(1);
  ASSERT_TRUE(step_.AddVote(2, VoteOf(1, {1.0, large})).ok());
  ASSERT_TRUE(step_.AddVote(1, VoteOf(1, {1.0})).ok());
  ASSERT_TRUE(step_.AddVote(9, WithLoss(VoteOf(1, {1.0}), 512)).ok());
  EXPECT_EQ(Decide().SerializeAsString(), one);
}

TEST_F(StepCoreTest, ASecondVoteOfAServerChangesNothing) {
  ASSERT_TRUE(step_.AddVote(1, WithLoss(VoteOf(1, {4.0}), 512)).ok());
  const std::string before = Decide().SerializeAsString();
  ASSERT_TRUE(step_.AddVote(1, WithLoss(VoteOf(1, {9.0}), 1024)).ok());
  EXPECT_EQ(Decide().SerializeAsString(), before);
}

TEST_F(StepCoreTest, BeginForgetsVotes) {
  ASSERT_TRUE(step_.AddVote(1, VoteOf(1, {4.0})).ok());
  EXPECT_TRUE(step_.HasVote(1));
  step_.Begin(2);
  EXPECT_FALSE(step_.HasVote(1));
}

TEST_F(StepCoreTest, ANonFiniteGradientSkipsAndNamesTheFirstTensor) {
  ASSERT_TRUE(step_.AddVote(1, WithNonFinite(VoteOf(1, {1.0}), 3, 2)).ok());
  ASSERT_TRUE(
      step_.AddVote(2, WithNonFinite(WithLoss(VoteOf(1, {1.0}), 512), 1, 5))
          .ok());
  v1::Decision previous;
  previous.set_optimizer_step(4);
  previous.set_samples_consumed(64);
  const v1::Decision decision = Decide(previous);
  EXPECT_TRUE(decision.skip());
  EXPECT_EQ(decision.skip_reason(),
            "the gradient of h.0.weight has 5 elements that are not finite; "
            "so have 1 more tensors");
  // The data and the schedule go on, the optimizer does not.
  EXPECT_EQ(decision.optimizer_step(), 4u);
  EXPECT_EQ(decision.samples_consumed(), 80u);
  EXPECT_EQ(decision.grad_scale(), 0.0f);
  EXPECT_GT(decision.learning_rate(), 0.0f);
}

TEST_F(StepCoreTest, BiasCorrectionLeavesSkippedStepsOut) {
  step_.Begin(6);
  ASSERT_TRUE(step_.AddVote(1, WithLoss(VoteOf(6, {1.0}), 512)).ok());
  v1::Decision previous;
  previous.set_step(5);
  previous.set_optimizer_step(2);
  const v1::Decision decision = Decide(previous);
  EXPECT_EQ(decision.optimizer_step(), 3u);
  EXPECT_EQ(decision.bias1(), static_cast<float>(BiasCorrection(0.9, 3)));
}

TEST_F(StepCoreTest, AZeroCountIsNotANonFiniteGradient) {
  ASSERT_TRUE(
      step_.AddVote(1, WithNonFinite(WithLoss(VoteOf(1, {1.0}), 512), 1, 0))
          .ok());
  EXPECT_FALSE(Decide().skip());
}

TEST_F(StepCoreTest, ALossThatIsNotFiniteSkips) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  ASSERT_TRUE(step_.AddVote(1, WithLoss(VoteOf(1, {1.0}), nan)).ok());
  EXPECT_EQ(Decide().skip_reason(), "the loss is not finite");
}

TEST_F(StepCoreTest, ASumThatIsNotFiniteSkips) {
  const double infinity = std::numeric_limits<double>::infinity();
  ASSERT_TRUE(step_.AddVote(1, WithLoss(VoteOf(1, {infinity}), 512)).ok());
  EXPECT_EQ(Decide().skip_reason(),
            "the gradient's sum of squares is not finite");
}

TEST_F(StepCoreTest, RefusesADecisionWithoutExactlyOneLoss) {
  ASSERT_TRUE(step_.AddVote(1, VoteOf(1, {1.0})).ok());
  EXPECT_EQ(step_.Decide({}).status().code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(step_.AddVote(2, WithLoss(VoteOf(1, {1.0}), 1)).ok());
  EXPECT_TRUE(step_.Decide({}).ok());
  ASSERT_TRUE(step_.AddVote(3, WithLoss(VoteOf(1, {1.0}), 1)).ok());
  EXPECT_EQ(step_.Decide({}).status().code(), absl::StatusCode::kInternal);
}

TEST_F(StepCoreTest, RefusesADamagedSumAndAnUnknownTensor) {
  v1::Vote damaged = VoteOf(1, {1.0});
  damaged.mutable_sum_squares()->pop_back();
  EXPECT_EQ(step_.AddVote(1, damaged).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(step_.AddVote(1, WithNonFinite(VoteOf(1, {1.0}), 4, 1)).ok());
  EXPECT_EQ(step_.AddVote(2, WithNonFinite(VoteOf(1, {1.0}), 5, 1)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(StepCoreTest, AWithdrawnVoteIsGivenAgain) {
  ASSERT_TRUE(step_.AddVote(1, WithLoss(VoteOf(1, {1.0}), 1)).ok());
  step_.Withdraw(1);
  step_.Withdraw(1);
  EXPECT_FALSE(step_.HasVote(1));
  ASSERT_TRUE(step_.AddVote(1, WithLoss(VoteOf(1, {4.0}), 2)).ok());
  const absl::StatusOr<v1::Decision> decision = step_.Decide({});
  ASSERT_TRUE(decision.ok());
  EXPECT_DOUBLE_EQ(decision->grad_norm(), 2.0 / 256);
}

TEST(StepCoreSgdTest, HasNoBiasCorrection) {
  Job job = SmallJob();
  job.optimizer.kind = OptimizerKind::kSgd;
  StepCore step(job, SmallLayout());
  step.Begin(1);
  ASSERT_TRUE(step.AddVote(1, WithLoss(VoteOf(1, {1.0}), 512)).ok());
  const absl::StatusOr<v1::Decision> decision = step.Decide({});
  ASSERT_TRUE(decision.ok());
  EXPECT_EQ(decision->bias1(), 1.0f);
  EXPECT_EQ(decision->bias2(), 1.0f);
}

}  // namespace
}  // namespace ballast
