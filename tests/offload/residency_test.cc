// SPDX-License-Identifier: Apache-2.0
#include "offload/residency.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace ballast {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr uint64_t kMiB = 1 << 20;

// AdamW in fp32: parameters and two moments behind a page of header.
ChunkFootprint Chunk(uint64_t elems) {
  const uint64_t page = 4096;
  const uint64_t bytes = (elems * 4 + page - 1) / page * page;
  return {page + 3 * bytes, page + bytes, elems * 4, 1};
}

ResidencyRequest Request(uint64_t budget, uint32_t workers = 2) {
  ResidencyRequest request;
  request.budget_bytes = budget;
  request.workers = workers;
  for (int i = 0; i < 12; ++i) {
    request.chunks.push_back(Chunk(i % 3 == 0 ? 512 : 64 * 1024));
  }
  return request;
}

uint64_t ItemsOf(const ResidencyPlan& plan) {
  return std::accumulate(
      plan.items.begin(), plan.items.end(), uint64_t{0},
      [](uint64_t sum, const BudgetItem& item) { return sum + item.bytes; });
}

TEST(ResidencyTest, AnAmpleBudgetKeepsEverythingInMemory) {
  const auto plan = PlanResidency(Request(64 * kMiB));
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(plan->tiers, Each(Tier::kWhole));
  EXPECT_LE(plan->used_bytes, 64 * kMiB);
  EXPECT_EQ(ItemsOf(*plan), plan->used_bytes);
}

TEST(ResidencyTest, TheSmallestBudgetWorksAndOneBelowDoesNot) {
  for (const uint32_t workers : {1u, 3u}) {
    const auto any = PlanResidency(Request(64 * kMiB, workers));
    ASSERT_TRUE(any.ok());
    const uint64_t smallest = any->smallest_budget_bytes;
    const auto tight = PlanResidency(Request(smallest, workers));
    ASSERT_TRUE(tight.ok()) << tight.status();
    EXPECT_EQ(tight->smallest_budget_bytes, smallest);
    EXPECT_LE(tight->used_bytes, smallest);
    const auto refused = PlanResidency(Request(smallest - 1, workers));
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.status().message()),
                HasSubstr(std::to_string(smallest)));
  }
}

TEST(ResidencyTest, EveryBudgetStaysWithinItselfAndHoldsTheLargestOfEach) {
  const uint64_t smallest =
      PlanResidency(Request(64 * kMiB))->smallest_budget_bytes;
  for (uint64_t budget = smallest; budget < 40 * kMiB; budget += 300 * 1024) {
    const auto plan = PlanResidency(Request(budget));
    ASSERT_TRUE(plan.ok()) << budget << ": " << plan.status();
    EXPECT_LE(plan->used_bytes, budget);
    EXPECT_EQ(ItemsOf(*plan), plan->used_bytes);
    EXPECT_GE(plan->gradient_bytes, 256u * 1024);
    EXPECT_GE(plan->scratch_bytes, 256u * 1024);
    EXPECT_GE(plan->credit_bytes, 256u * 1024);
    uint64_t resident = 0;
    const auto request = Request(budget);
    for (size_t i = 0; i < plan->tiers.size(); ++i) {
      const ChunkFootprint& chunk = request.chunks[i];
      resident += plan->tiers[i] == Tier::kWhole     ? chunk.record_bytes
                  : plan->tiers[i] == Tier::kWeights ? chunk.prefix_bytes
                                                     : 0;
      if (plan->tiers[i] != Tier::kWhole) {
        EXPECT_GE(plan->window_bytes, chunk.record_bytes);
      }
    }
    EXPECT_EQ(resident, plan->resident_bytes);
  }
}

TEST(ResidencyTest, WeightsComeBeforeOptimizerState) {
  const auto plan = PlanResidency(Request(7 * kMiB));
  ASSERT_TRUE(plan.ok());
  EXPECT_NE(plan->tiers.front(), Tier::kStreamed);
  for (const Tier tier : plan->tiers) {
    EXPECT_NE(tier, Tier::kStreamed);
  }
}

TEST(ResidencyTest, AServerWithoutChunksNeedsNoWindow) {
  ResidencyRequest request;
  request.budget_bytes = kMiB;
  const auto plan = PlanResidency(request);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->window_bytes, 0u);
}

}  // namespace
}  // namespace ballast
