// SPDX-License-Identifier: Apache-2.0
#include "kernels/task_pool.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace ballast {
namespace {

class TaskPoolTest : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Threads, TaskPoolTest, ::testing::Values(1, 2, 3, 8));

TEST_P(TaskPoolTest, RunsEveryTaskOnceAndWaitsForAll) {
  TaskPool pool(GetParam());
  for (const uint64_t count : {0, 1, 2, 7, 1000}) {
    for (int round = 0; round < 50; ++round) {
      // Plain integers: a task that outlived Run would be a race.
      std::vector<int> runs(count, 0);
      pool.Run(count, [&](uint64_t i, int) { ++runs[i]; });
      EXPECT_EQ(runs, std::vector<int>(count, 1));
    }
  }
}

TEST_P(TaskPoolTest, GivesEachThreadOneTaskAtATime) {
  TaskPool pool(GetParam());
  std::vector<std::atomic<int>> busy(static_cast<size_t>(pool.threads()));
  std::atomic<bool> clash = false;
  pool.Run(500, [&](uint64_t, int thread) {
    if (busy[static_cast<size_t>(thread)].fetch_add(1) != 0) clash = true;
    std::this_thread::yield();
    busy[static_cast<size_t>(thread)].fetch_sub(1);
  });
  EXPECT_FALSE(clash);
}

TEST_P(TaskPoolTest, PiecesCoverTheRangeWithoutOverlap) {
  TaskPool pool(GetParam());
  for (const uint64_t count : {0, 1, 9, 10, 11, 99}) {
    std::vector<int> covered(count, 0);
    pool.RunPieces(count, 10, [&](uint64_t begin, uint64_t end) {
      EXPECT_LE(end - begin, 10u);
      for (uint64_t i = begin; i < end; ++i) ++covered[i];
    });
    EXPECT_EQ(covered, std::vector<int>(count, 1));
  }
}

TEST(TaskPoolTest, HelpersTakePartWhileTheCallerIsBusy) {
  TaskPool pool(2);
  std::atomic<int> arrived = 0;
  // Each task waits for the other: one thread alone would never finish.
  pool.Run(2, [&](uint64_t, int) {
    arrived.fetch_add(1);
    while (arrived.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

}  // namespace
}  // namespace ballast
