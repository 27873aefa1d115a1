// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/move_planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include "ps/membership/placement.h"
#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::ballast::testing::SmallLayout;

class MovePlannerTest : public ::testing::Test {
 protected:
  explicit MovePlannerTest(uint32_t blocks = 12)
      : table_(*ChunkTable::Build(SmallLayout(blocks), kBlockElems)),
        bytes_(ChunkBytes(table_, OptimizerKind::kAdamW)),
        largest_(*std::max_element(bytes_.begin(), bytes_.end())) {}

  OwnershipPlan Placed(uint32_t servers) const {
    return {bytes_, PlaceChunks(table_, OptimizerKind::kAdamW, servers),
            std::vector<bool>(servers, true)};
  }
  std::vector<uint64_t> PerServer(const std::vector<uint32_t>& owner,
                                  size_t servers) const {
    std::vector<uint64_t> bytes(servers, 0);
    for (size_t chunk = 0; chunk < owner.size(); ++chunk) {
      bytes[owner[chunk]] += bytes_[chunk];
    }
    return bytes;
  }
  uint64_t Slack(const std::vector<bool>& keeps) const {
    uint64_t sum = 0;
    for (const uint64_t bytes : bytes_) {
      sum += bytes;
    }
    const auto count =
        static_cast<uint64_t>(std::count(keeps.begin(), keeps.end(), true));
    return std::max(largest_, sum / count / 20);
  }
  void ExpectBalanced(const std::vector<uint32_t>& owner,
                      const std::vector<bool>& keeps) const {
    const std::vector<uint64_t> bytes = PerServer(owner, keeps.size());
    uint64_t low = ~uint64_t{0};
    uint64_t high = 0;
    for (size_t s = 0; s < keeps.size(); ++s) {
      if (!keeps[s]) {
        EXPECT_EQ(bytes[s], 0u) << "server " << s << " keeps nothing";
        continue;
      }
      low = std::min(low, bytes[s]);
      high = std::max(high, bytes[s]);
    }
    EXPECT_LE(high - low, Slack(keeps));
  }

  const ChunkTable table_;
  const std::vector<uint64_t> bytes_;
  const uint64_t largest_;
};

TEST_F(MovePlannerTest, ABalancedPlacementStaysAsItIs) {
  for (const uint32_t servers : {1u, 2u, 3u, 7u}) {
    const OwnershipPlan now = Placed(servers);
    EXPECT_EQ(TargetOwners(table_, now), now.owner) << servers;
  }
}

TEST_F(MovePlannerTest, AnAddedServerGetsItsShareAndNothingElseMoves) {
  for (const uint32_t servers : {1u, 2u, 3u, 5u}) {
    OwnershipPlan now = Placed(servers);
    now.keeps.push_back(true);
    const std::vector<uint32_t> target = TargetOwners(table_, now);
    ExpectBalanced(target, now.keeps);
    uint64_t moved = 0;
    for (size_t chunk = 0; chunk < target.size(); ++chunk) {
      if (target[chunk] != now.owner[chunk]) {
        EXPECT_EQ(target[chunk], servers) << "chunk " << chunk;
        moved += bytes_[chunk];
      }
    }
    EXPECT_EQ(moved, PerServer(target, servers + 1)[servers]);
    // It stops at the slack; it does not fill the new one to the mean.
    const uint64_t mean =
        PerServer(now.owner, servers + 1)[0] * servers / (servers + 1);
    EXPECT_LE(moved, mean + 2 * largest_) << servers;
    EXPECT_GT(moved, 0u);
  }
}

TEST_F(MovePlannerTest, ADrainedServersChunksGoToTheOthersAndTheirsStay) {
  for (const uint32_t servers : {2u, 3u, 5u}) {
    for (uint32_t drained = 0; drained < servers; ++drained) {
      OwnershipPlan now = Placed(servers);
      now.keeps[drained] = false;
      const std::vector<uint32_t> target = TargetOwners(table_, now);
      ExpectBalanced(target, now.keeps);
      for (size_t chunk = 0; chunk < target.size(); ++chunk) {
        if (now.owner[chunk] != drained) {
          EXPECT_EQ(target[chunk], now.owner[chunk]) << "chunk " << chunk;
        }
      }
    }
  }
}

TEST_F(MovePlannerTest, UnitsOfADrainedServerAreSpreadOverTheOthers) {
  OwnershipPlan now = Placed(4);
  now.keeps[1] = false;
  const std::vector<uint32_t> target = TargetOwners(table_, now);
  std::map<uint32_t, uint32_t> taken;  // Chunks by new owner.
  for (size_t chunk = 0; chunk < target.size(); ++chunk) {
    if (now.owner[chunk] == 1) {
      ++taken[target[chunk]];
    }
  }
  EXPECT_EQ(taken.size(), 3u);
}

TEST_F(MovePlannerTest, AnyStateIsBroughtIntoTheSlackAndKeptThere) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const auto servers = static_cast<uint32_t>(1 + random() % 6);
    OwnershipPlan now = {bytes_, {}, std::vector<bool>(servers)};
    for (size_t s = 0; s < servers; ++s) {
      now.keeps[s] = random() % 3 != 0;
    }
    now.keeps[random() % servers] = true;
    for (size_t chunk = 0; chunk < bytes_.size(); ++chunk) {
      now.owner.push_back(static_cast<uint32_t>(random() % servers));
    }
    const std::vector<uint32_t> target = TargetOwners(table_, now);
    ExpectBalanced(target, now.keeps);
    EXPECT_EQ(TargetOwners(table_, now), target);  // Nothing else decides.
    now.owner = target;
    EXPECT_EQ(TargetOwners(table_, now), target);
  }
}

TEST_F(MovePlannerTest, BatchesStayWithinTheirBytesAndEndAtTheTarget) {
  OwnershipPlan now = Placed(3);
  now.keeps[0] = false;
  const std::vector<uint32_t> target = TargetOwners(table_, now);
  const uint64_t bytes_max = 3 * largest_;
  std::vector<uint32_t> moved(bytes_.size(), 0);
  int batches = 0;
  while (now.owner != target) {
    const std::vector<PlannedMove> batch = MoveBatch(now, target, bytes_max);
    ASSERT_FALSE(batch.empty());
    std::map<std::pair<uint32_t, uint32_t>, uint64_t> bytes;
    for (const PlannedMove& move : batch) {
      EXPECT_EQ(move.from, now.owner[move.chunk]);
      EXPECT_EQ(move.to, target[move.chunk]);
      bytes[{move.from, move.to}] += bytes_[move.chunk];
    }
    for (const auto& [pair, sum] : bytes) {
      EXPECT_LE(sum, bytes_max);
    }
    // Only the last of the batch is in sync: it alone moves, and the others
    // stay in the next batch.
    const PlannedMove done = batch.back();
    now.owner[done.chunk] = done.to;
    ++moved[done.chunk];
    const std::vector<PlannedMove> next = MoveBatch(now, target, bytes_max);
    for (const PlannedMove& move : batch) {
      EXPECT_EQ(std::count(next.begin(), next.end(), move),
                move == done ? 0 : 1);
    }
    ++batches;
  }
  EXPECT_GT(batches, 3);
  EXPECT_LE(*std::max_element(moved.begin(), moved.end()), 1u);
  EXPECT_TRUE(MoveBatch(now, target, bytes_max).empty());
}

TEST_F(MovePlannerTest, AChunkAboveTheBoundStillMovesAlone) {
  OwnershipPlan now = Placed(2);
  now.keeps[1] = false;
  const std::vector<PlannedMove> batch =
      MoveBatch(now, TargetOwners(table_, now), 1);
  ASSERT_EQ(batch.size(), 1u);
  EXPECT_EQ(batch[0].from, 1u);
  EXPECT_EQ(batch[0].to, 0u);
}

TEST(RingReplicasTest, TheNextServerThatKeepsHoldsTheSecondCopy) {
  using Replicas = std::vector<std::optional<uint32_t>>;
  EXPECT_EQ(RingReplicas({true, true, true}), (Replicas{1, 2, 0}));
  EXPECT_EQ(RingReplicas({true, false, true}), (Replicas{2, std::nullopt, 0}));
  EXPECT_EQ(RingReplicas({false, true}),
            (Replicas{std::nullopt, std::nullopt}));
  EXPECT_EQ(RingReplicas({true}), (Replicas{std::nullopt}));
  EXPECT_TRUE(RingReplicas({}).empty());
}

}  // namespace
}  // namespace ballast
