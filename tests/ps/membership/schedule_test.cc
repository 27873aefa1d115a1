// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace ballast {
namespace {

OptimizerOptions Lr(double lr) {
  OptimizerOptions optimizer;
  optimizer.lr = lr;
  return optimizer;
}

TEST(ScheduleTest, WarmsUpLinearlyFromTheFirstStep) {
  const ScheduleOptions schedule = {ScheduleKind::kCosine, 10, 0.1};
  EXPECT_DOUBLE_EQ(LearningRate(Lr(2.0), schedule, 110, 1), 0.2);
  EXPECT_DOUBLE_EQ(LearningRate(Lr(2.0), schedule, 110, 9), 1.8);
  EXPECT_DOUBLE_EQ(LearningRate(Lr(2.0), schedule, 110, 10), 2.0);
}

TEST(ScheduleTest, TheCosineFallsFromTheFullRateToTheRatio) {
  const ScheduleOptions schedule = {ScheduleKind::kCosine, 10, 0.1};
  EXPECT_LT(LearningRate(Lr(2.0), schedule, 110, 11), 2.0);
  // Half way: the mean of both ends.
  EXPECT_DOUBLE_EQ(LearningRate(Lr(2.0), schedule, 110, 60), 1.1);
  EXPECT_NEAR(LearningRate(Lr(2.0), schedule, 110, 110), 0.2, 1e-15);
  // Never below, should a step beyond the horizon be asked for.
  EXPECT_NEAR(LearningRate(Lr(2.0), schedule, 110, 150), 0.2, 1e-15);
}

TEST(ScheduleTest, WithoutWarmUpTheFirstStepIsAlreadyOnTheCosine) {
  const ScheduleOptions schedule = {ScheduleKind::kCosine, 0, 0.0};
  EXPECT_DOUBLE_EQ(LearningRate(Lr(1.0), schedule, 2, 1), 0.5);
  EXPECT_NEAR(LearningRate(Lr(1.0), schedule, 2, 2), 0.0, 1e-16);
}

TEST(ScheduleTest, AConstantRateStaysAfterWarmUp) {
  const ScheduleOptions schedule = {ScheduleKind::kConstant, 2, 0.1};
  EXPECT_DOUBLE_EQ(LearningRate(Lr(1.0), schedule, 100, 1), 0.5);
  EXPECT_DOUBLE_EQ(LearningRate(Lr(1.0), schedule, 100, 2), 1.0);
  EXPECT_DOUBLE_EQ(LearningRate(Lr(1.0), schedule, 100, 100), 1.0);
}

TEST(ScheduleTest, AWarmUpAsLongAsTheRunEndsAtTheFullRate) {
  const ScheduleOptions schedule = {ScheduleKind::kCosine, 4, 0.1};
  EXPECT_DOUBLE_EQ(LearningRate(Lr(1.0), schedule, 4, 4), 1.0);
  EXPECT_DOUBLE_EQ(LearningRate(Lr(1.0), schedule, 4, 3), 0.75);
}

TEST(ScheduleTest, BiasCorrectionCountsFromOne) {
  EXPECT_DOUBLE_EQ(BiasCorrection(0.9, 1), 1.0 - 0.9);
  EXPECT_DOUBLE_EQ(BiasCorrection(0.5, 3), 0.875);
  EXPECT_DOUBLE_EQ(BiasCorrection(0.0, 1), 1.0);
}

TEST(ScheduleTest, ClipsOnlyNormsAboveTheLimit) {
  EXPECT_EQ(ClipFactor(1.0, 0.0), 1.0);
  EXPECT_EQ(ClipFactor(1.0, 1.0 - 2e-6), 1.0);
  EXPECT_LT(ClipFactor(1.0, 1.0), 1.0);  // As PyTorch: 1 / (1 + 1e-6).
  EXPECT_DOUBLE_EQ(ClipFactor(1.0, 4.0), 1.0 / (4.0 + 1e-6));
}

TEST(ScheduleTest, AClipNormOfZeroTurnsClippingOff) {
  EXPECT_EQ(ClipFactor(0.0, 1e30), 1.0);
}

}  // namespace
}  // namespace ballast
