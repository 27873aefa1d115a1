// SPDX-License-Identifier: Apache-2.0
// Every rule of docs/PROTOCOL.md that the simulator can break is needed:
// without it some seed breaks a promise, and soon.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tests/sim/cluster.h"
#include "tests/sim/rule_names.h"

namespace ballast::sim {
namespace {

constexpr uint64_t kSeedsMax = 600;

// Rules whose need another test shows, and why no seed does.
const std::map<Rule, std::string>& ShownElsewhere() {
  static const auto* rules = new std::map<Rule, std::string>{
      // What a fenced life says has the same names and bits as what its
      // successor says, so a seed seldom shows the difference.
      {Rule::kOldIncarnationRefused,
       "MemberTableTest.AStrangersOrDeadLifesHeartbeatIsFenced"},
      // A server takes every span in the end, so a blocked pass costs time
      // only.
      {Rule::kBlockedPassIsDropped,
       "WorkerCoreTest.APassThatStandsStillGivesWayToOneWithTheAddedSpans"},
      // A server that cannot bridge the gap finds out itself when it loads.
      {Rule::kHoldingsJudged,
       "CoreRejoinTest.WhatTheStepLogCannotBridgeIsRefusedWithTheNumbers"},
  };
  return *rules;
}

class BrokenRule
    : public ::testing::TestWithParam<std::pair<std::string, Rule>> {
 protected:
  void TearDown() override { broken_rule = Rule::kNone; }
};

TEST_P(BrokenRule, IsNoticed) {
  const auto& [name, rule] = GetParam();
  const auto elsewhere = ShownElsewhere().find(rule);
  if (elsewhere != ShownElsewhere().end()) {
    GTEST_SKIP() << name << ": " << elsewhere->second;
  }
  broken_rule = rule;
  for (uint64_t seed = 1; seed <= kSeedsMax; ++seed) {
    if (!RunSeed({.seed = seed}).oracle.empty()) {
      return;
    }
  }
  ADD_FAILURE() << kSeedsMax << " seeds held without " << name;
}

INSTANTIATE_TEST_SUITE_P(Rules, BrokenRule, ::testing::ValuesIn(AllRules()),
                         [](const auto& test) { return test.param.first; });

}  // namespace
}  // namespace ballast::sim
