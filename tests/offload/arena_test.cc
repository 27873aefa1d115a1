// SPDX-License-Identifier: Apache-2.0
#include "offload/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace ballast {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<Arena> MakeArena(uint64_t bytes) {
  auto arena = Arena::Create({.name = "worker.memory", .bytes = bytes});
  EXPECT_TRUE(arena.ok()) << arena.status();
  return std::move(arena).value();
}

TEST(ArenaTest, RefusesOneAlignmentPastTheBudgetAndNamesWhatWasLive) {
  const auto arena = MakeArena(1024);
  const auto live = arena->Allocate(960, "weights of h.0");
  ASSERT_TRUE(live.ok());
  ASSERT_TRUE(arena->Allocate(64, "scratch").ok());
  const auto refused = arena->Allocate(65, "gradient of h.0");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string text(refused.status().message());
  EXPECT_THAT(text, HasSubstr("worker.memory is 1024 bytes"));
  EXPECT_THAT(text, HasSubstr("gradient of h.0"));
  EXPECT_THAT(text, HasSubstr("weights of h.0"));
  EXPECT_THAT(text, HasSubstr("at least 1088 bytes"));
}

TEST(ArenaTest, GivesMemoryBackAndMergesNeighbours) {
  const auto arena = MakeArena(256);
  {
    auto a = arena->Allocate(64, "a");
    auto b = arena->Allocate(64, "b");
    auto c = arena->Allocate(128, "c");
    ASSERT_TRUE(a.ok() && b.ok() && c.ok());
    EXPECT_EQ(arena->used_bytes(), 256u);
    b->reset();
    a->reset();
    c->reset();
  }
  EXPECT_EQ(arena->used_bytes(), 0u);
  EXPECT_TRUE(arena->Allocate(256, "all").ok());
  EXPECT_EQ(arena->peak_bytes(), 256u);
}

TEST(ArenaTest, PeakIsTheBudgetThatTheSameCallsNeed) {
  const auto run = [](Arena* arena) {
    auto a = arena->Allocate(100, "a");
    auto b = arena->Allocate(200, "b");
    a->reset();
    auto c = arena->Allocate(300, "c");
    return a.ok() && b.ok() && c.ok();
  };
  const auto plan =
      Arena::CreateWithoutMemory({.name = "plan", .bytes = 1 << 20});
  ASSERT_TRUE(run(plan.get()));
  const auto exact = MakeArena(plan->peak_bytes());
  EXPECT_TRUE(run(exact.get()));
  EXPECT_EQ(exact->peak_bytes(), plan->peak_bytes());
}

TEST(ArenaTest, OffsetsDoNotDependOnTheBudget) {
  const auto run = [](uint64_t bytes) {
    const auto arena =
        Arena::CreateWithoutMemory({.name = "plan", .bytes = bytes});
    std::mt19937_64 random(7);
    std::vector<ArenaBuffer> live;
    for (int round = 0; round < 2000; ++round) {
      if (!live.empty() && (random() % 2 == 0 || live.size() > 8)) {
        live.erase(live.begin());
      }
      auto buffer = arena->Allocate(random() % 4000, "random");
      if (!buffer.ok()) {
        return uint64_t{0};
      }
      live.push_back(std::move(buffer).value());
    }
    return arena->peak_bytes();
  };
  const uint64_t peak = run(1 << 30);
  EXPECT_EQ(run(peak), peak);
  EXPECT_EQ(run(peak - 64), 0u);
}

TEST(ArenaTest, LiveBuffersNeverOverlapInRandomUse) {
  const unsigned seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937_64 random(seed);
  const auto arena = MakeArena(64 << 10);
  std::vector<ArenaBuffer> live;
  uint64_t used = 0;
  for (int round = 0; round < 20000; ++round) {
    if (random() % 2 == 0 || live.empty()) {
      auto buffer = arena->Allocate(random() % 4000, "random");
      if (buffer.ok()) {
        used += buffer->bytes();
        live.push_back(std::move(buffer).value());
      }
    } else {
      const size_t victim = random() % live.size();
      used -= live[victim].bytes();
      std::swap(live[victim], live.back());
      live.pop_back();
    }
    ASSERT_EQ(arena->used_bytes(), used);
    if (round % 100 == 0) {
      std::map<const std::byte*, uint64_t> ranges;
      for (const ArenaBuffer& buffer : live) {
        ASSERT_TRUE(ranges.emplace(buffer.data(), buffer.bytes()).second);
      }
      const std::byte* end = nullptr;
      for (const auto& [begin, bytes] : ranges) {
        ASSERT_GE(begin, end);
        end = begin + bytes;
      }
    }
  }
  live.clear();
  EXPECT_EQ(arena->used_bytes(), 0u);
  EXPECT_TRUE(arena->Allocate(64 << 10, "all").ok());
}

}  // namespace
}  // namespace ballast
