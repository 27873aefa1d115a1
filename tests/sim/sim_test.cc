// SPDX-License-Identifier: Apache-2.0
// Fixed seeds of the simulator. A seed that fails is explained by
// `ballast-sim --seeds SEED`.
#include <gtest/gtest.h>

#include "absl/strings/str_join.h"
#include "tests/sim/cluster.h"

namespace ballast::sim {
namespace {

TEST(Sim, ACalmClusterCommitsWhatItsTwinDoes) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const SimResult result = RunSeed({.seed = seed, .calm = true});
    EXPECT_EQ(result.oracle, "") << "seed " << seed << ": " << result.violation;
    EXPECT_TRUE(result.faults.empty()) << "seed " << seed;
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

}  // namespace
}  // namespace ballast::sim
