// SPDX-License-Identifier: Apache-2.0
// Fixed seeds of the simulator. A seed that fails is explained by
// `ballast-sim --seeds SEED`.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_join.h"
#include "tests/sim/cluster.h"

namespace ballast::sim {
namespace {

void ExpectHolds(uint64_t seed, bool calm) {
  const SimResult result = RunSeed({.seed = seed, .calm = calm});
  EXPECT_EQ(result.oracle, "")
      << "seed " << seed << " (" << result.summary << "): " << result.violation;
}

TEST(Sim, ACalmClusterCommitsWhatItsTwinDoes) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    ExpectHolds(seed, /*calm=*/true);
  }
}

TEST(Sim, TheSameSeedIsTheSameWorld) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const SimResult first = RunSeed({.seed = seed, .tracing = true});
    const SimResult second = RunSeed({.seed = seed, .tracing = true});
    EXPECT_GT(first.events, 0u);
    EXPECT_EQ(first.events, second.events) << "seed " << seed;
    EXPECT_EQ(absl::StrJoin(first.trace, "\n"),
              absl::StrJoin(second.trace, "\n"))
        << "seed " << seed;
  }
}

TEST(Sim, WhateverHappensTheRunIsTheUndisturbedOne) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    ExpectHolds(seed, /*calm=*/false);
  }
}

TEST(Sim, WhatOnceFailedHolds) {
  std::ifstream file(BALLAST_SIM_SEEDS);
  ASSERT_TRUE(file.is_open()) << BALLAST_SIM_SEEDS;
  std::string line;
  uint64_t seeds = 0;
  while (std::getline(file, line)) {
    uint64_t seed = 0;
    if (line.empty() || line[0] == '#' || !(std::istringstream(line) >> seed)) {
      continue;
    }
    ++seeds;
    ExpectHolds(seed, /*calm=*/false);
  }
  EXPECT_GT(seeds, 0u);
}

}  // namespace
}  // namespace ballast::sim
