// SPDX-License-Identifier: Apache-2.0
// Marks the places where a rule of docs/PROTOCOL.md is kept, so that a test can
// take one rule away and see the simulator notice. In the product a rule is the
// constant true and costs nothing; only the simulator's own build
// (BALLAST_BREAKABLE_RULES) can break one.
//
//   if (BALLAST_RULE(kOldTimelineRefused) && timeline < view_->timeline) ...

#pragma once

namespace ballast {

// Grouped by the sections of docs/PROTOCOL.md.
enum class Rule {
  kNone = 0,
  // 1 Identity.
  kOldTimelineRefused,     // Gradients of an abandoned branch are not taken.
  kOldIncarnationRefused,  // A fenced life's messages are not taken.
  kAckNamesServerLife,     // An earlier life's acknowledgement frees nothing.
  kDirectiveNumbersGrow,   // A restarted coordinator repeats no number.
  // 2 Names.
  kCoveredSpanDropped,
  kContainingSpanReplaces,
  kUsesHaveTrees,
  // 3 Where gradients wait.
  kBlockedPassIsDropped,
  // 4 Votes and decisions.
  kVoteOnce,  // A repeated vote does not count twice.
  kDecisionLoggedFirst,
  kDecisionRepeated,  // Until every server has confirmed it.
  kStepNumbersContiguous,
  // 5 Durability.
  kSyncBeforeVote,
  kSyncOnOpen,
  kBodyBeforePointer,     // The slab is synced before the index names it.
  kLogKeptUntilBase,      // Redo records stay until the base passes them.
  kExtentKeptWhileHeld,   // No reuse while pinned, read or named.
  kSegmentSerialChecked,  // Recycled bytes never pass for new ones.
  // 6 Joining, leaving, moving.
  kFreshLeasesAfterRestart,
  kHoldingsJudged,  // What the step log cannot bridge is refused.
  kOnlySyncedReplicaMoves,
  // 7 Reading weights.
  kFetchNamesVersion,  // Never another version than the one asked for.
  kEvaluationIsAPass,
};

#ifdef BALLAST_BREAKABLE_RULES
// The rule that does not hold now. Of the simulator's one thread.
inline thread_local Rule broken_rule = Rule::kNone;
#define BALLAST_RULE(name) (::ballast::broken_rule != ::ballast::Rule::name)
#else
#define BALLAST_RULE(name) true
#endif

}  // namespace ballast
