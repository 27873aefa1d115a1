// SPDX-License-Identifier: Apache-2.0
// The rules of common/rule.h by name, for command lines and tests.

#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/rule.h"

namespace ballast::sim {

inline const std::vector<std::pair<std::string, Rule>>& AllRules() {
#define BALLAST_NAMED_RULE(name) \
  { #name, Rule::name }
  static const auto* rules = new std::vector<std::pair<std::string, Rule>>{
      BALLAST_NAMED_RULE(kOldTimelineRefused),
      BALLAST_NAMED_RULE(kOldIncarnationRefused),
      BALLAST_NAMED_RULE(kAckNamesServerLife),
      BALLAST_NAMED_RULE(kDirectiveNumbersGrow),
      BALLAST_NAMED_RULE(kCoveredSpanDropped),
      BALLAST_NAMED_RULE(kContainingSpanReplaces),
      BALLAST_NAMED_RULE(kUsesHaveTrees),
      BALLAST_NAMED_RULE(kBlockedPassIsDropped),
      BALLAST_NAMED_RULE(kVoteOnce),
      BALLAST_NAMED_RULE(kDecisionLoggedFirst),
      BALLAST_NAMED_RULE(kDecisionRepeated),
      BALLAST_NAMED_RULE(kStepNumbersContiguous),
      BALLAST_NAMED_RULE(kSyncBeforeVote),
      BALLAST_NAMED_RULE(kSyncOnOpen),
      BALLAST_NAMED_RULE(kBodyBeforePointer),
      BALLAST_NAMED_RULE(kLogKeptUntilBase),
      BALLAST_NAMED_RULE(kExtentKeptWhileHeld),
      BALLAST_NAMED_RULE(kSegmentSerialChecked),
      BALLAST_NAMED_RULE(kFreshLeasesAfterRestart),
      BALLAST_NAMED_RULE(kHoldingsJudged),
      BALLAST_NAMED_RULE(kOnlySyncedReplicaMoves),
      BALLAST_NAMED_RULE(kFetchNamesVersion),
      BALLAST_NAMED_RULE(kEvaluationIsAPass),
  };
#undef BALLAST_NAMED_RULE
  return *rules;
}

// kNone: no such name.
inline Rule RuleOfName(absl::string_view name) {
  for (const auto& [text, rule] : AllRules()) {
    if (text == name) {
      return rule;
    }
  }
  return Rule::kNone;
}

}  // namespace ballast::sim
