// SPDX-License-Identifier: Apache-2.0
#include "storage/extent_map.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

TEST(ExtentMapTest, TakesTheSmallestRangeThatFitsAndTheLowestOfEquals) {
  ExtentMap map(100);
  std::vector<Extent> held;
  for (int i = 0; i < 10; ++i) {
    held.push_back(*map.Allocate(10));
  }
  map.Release(held[1]);  // [10, 20)
  map.Release(held[4]);  // [40, 60)
  map.Release(held[5]);
  map.Release(held[8]);  // [80, 90)

  EXPECT_EQ(map.Allocate(10), (Extent{10, 10}));
  EXPECT_EQ(map.Allocate(10), (Extent{80, 10}));
  EXPECT_EQ(map.Allocate(5), (Extent{40, 5}));
  EXPECT_EQ(map.Allocate(15), (Extent{45, 15}));
  EXPECT_FALSE(map.Allocate(1));
}

TEST(ExtentMapTest, MergesFreeNeighboursOnBothSides) {
  for (const bool middle_last : {false, true}) {
    ExtentMap map(30);
    const Extent a = *map.Allocate(10);
    const Extent b = *map.Allocate(10);
    const Extent c = *map.Allocate(10);
    map.Release(a);
    map.Release(middle_last ? c : b);
    map.Release(middle_last ? b : c);
    EXPECT_EQ(map.free_range_count(), 1u);
    EXPECT_EQ(map.Allocate(30), (Extent{0, 30}));
  }
}

TEST(ExtentMapTest, GrowsIntoTheFreeTail) {
  ExtentMap map(10);
  ASSERT_TRUE(map.Allocate(6));
  EXPECT_EQ(map.free_tail_bytes(), 4u);
  map.Grow(4);
  EXPECT_EQ(map.free_tail_bytes(), 8u);
  EXPECT_EQ(map.Allocate(8), (Extent{6, 8}));
  EXPECT_EQ(map.free_tail_bytes(), 0u);
}

TEST(ExtentMapTest, IsFreeOnlyWhenNoOwnerAndNoPinIsLeft) {
  ExtentMap map(10);
  const Extent extent = *map.Allocate(10);
  EXPECT_TRUE(map.Adopt(extent));
  EXPECT_TRUE(map.Pin(extent));
  EXPECT_TRUE(map.Pin(extent));
  map.Release(extent);
  map.Unpin(extent);
  EXPECT_FALSE(map.Allocate(10));
  map.Unpin(extent);
  EXPECT_FALSE(map.Allocate(10));  // The second owner.
  map.Release(extent);
  EXPECT_EQ(map.Allocate(10), extent);
}

TEST(ExtentMapTest, PinsAFreeRangeButNothingThatOverlapsOrLiesOutside) {
  ExtentMap map(100);
  EXPECT_TRUE(map.Pin({40, 20}));
  EXPECT_FALSE(map.Pin({40, 19}));
  EXPECT_FALSE(map.Pin({39, 2}));
  EXPECT_FALSE(map.Pin({59, 2}));
  EXPECT_FALSE(map.Pin({0, 100}));
  EXPECT_FALSE(map.Pin({90, 11}));
  EXPECT_FALSE(map.Pin({100, 1}));
  EXPECT_FALSE(map.Pin({101, 1}));
  EXPECT_FALSE(map.Pin({1, ~uint64_t{0}}));
  EXPECT_FALSE(map.Pin({10, 0}));
  EXPECT_TRUE(map.Pin({60, 40}));
  EXPECT_TRUE(map.Pin({0, 40}));
  EXPECT_EQ(map.free_bytes(), 0u);
}

TEST(ExtentMapTest, AdoptsOnlyWhatIsHeld) {
  ExtentMap map(10);
  EXPECT_FALSE(map.Adopt({0, 5}));
  ASSERT_TRUE(map.Allocate(5));
  EXPECT_FALSE(map.Adopt({0, 4}));
  EXPECT_TRUE(map.Adopt({0, 5}));
}

TEST(ExtentMapDeathTest, RefusesToReleaseWhatHasNoOwner) {
  ExtentMap map(10);
  EXPECT_TRUE(map.Pin({0, 5}));
  EXPECT_DEATH(map.Release({0, 5}), "owners");
  EXPECT_DEATH(map.Unpin({5, 5}), "pins");
}

// The model: one holder count a byte, free ranges found by scanning.
class Model {
 public:
  explicit Model(uint64_t bytes) : holds_(bytes, 0) {}
  std::optional<Extent> Allocate(uint64_t bytes) {
    std::optional<Extent> best;
    for (uint64_t at = 0; at < holds_.size();) {
      uint64_t end = at;
      while (end < holds_.size() && holds_[end] == 0) {
        ++end;
      }
      if (end - at >= bytes && (!best || end - at < best->bytes)) {
        best = Extent{at, end - at};
      }
      at = end + 1;
    }
    if (best) {
      best->bytes = bytes;
      Add(*best, 1);
    }
    return best;
  }
  void Add(const Extent& extent, int holds) {
    for (uint64_t i = 0; i < extent.bytes; ++i) {
      holds_[extent.offset + i] += holds;
    }
  }
  void Grow(uint64_t bytes) { holds_.resize(holds_.size() + bytes, 0); }
  uint64_t size() const { return holds_.size(); }
  uint64_t free_bytes() const {
    return static_cast<uint64_t>(std::count(holds_.begin(), holds_.end(), 0));
  }

 private:
  std::vector<int> holds_;
};

TEST(ExtentMapTest, AgreesWithAByteMapUnderRandomUse) {
  std::mt19937_64 random(testing::Seed());
  for (int round = 0; round < 50; ++round) {
    const uint64_t start = random() % 64;
    ExtentMap map(start);
    Model model(start);
    struct Hold {
      Extent extent;
      bool pin = false;
    };
    std::vector<Hold> holds;
    for (int i = 0; i < 400; ++i) {
      const uint64_t choice = random() % 10;
      if (choice < 4) {
        const uint64_t bytes = 1 + random() % 12;
        const auto extent = map.Allocate(bytes);
        ASSERT_EQ(extent, model.Allocate(bytes));
        if (extent) {
          holds.push_back({*extent, false});
        }
      } else if (choice < 8 && !holds.empty()) {
        std::swap(holds[random() % holds.size()], holds.back());
        const Hold hold = holds.back();
        holds.pop_back();
        hold.pin ? map.Unpin(hold.extent) : map.Release(hold.extent);
        model.Add(hold.extent, -1);
      } else if (choice == 8 && !holds.empty()) {
        const Hold hold = {holds[random() % holds.size()].extent,
                           random() % 2 == 0};
        ASSERT_TRUE(hold.pin ? map.Pin(hold.extent) : map.Adopt(hold.extent));
        model.Add(hold.extent, 1);
        holds.push_back(hold);
      } else if (model.size() < 200) {
        const uint64_t bytes = random() % 8;
        map.Grow(bytes);
        model.Grow(bytes);
      }
      ASSERT_EQ(map.free_bytes(), model.free_bytes());
      ASSERT_EQ(map.size_bytes(), model.size());
    }
  }
}

}  // namespace
}  // namespace ballast
