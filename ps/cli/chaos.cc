// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/chaos.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/random.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

constexpr absl::Duration kShortestPeriod = absl::Milliseconds(100);

absl::Status Wrong(absl::string_view clause, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("--chaos: `", clause, "` ", what, "; want ", kChaosGrammar));
}

absl::StatusOr<ChaosRule> ParseRule(absl::string_view clause,
                                    absl::string_view verb,
                                    absl::string_view value) {
  ChaosRule rule;
  if (verb != "kill" && verb != "stop") {
    return Wrong(clause, "is no seed=, kill= or stop=");
  }
  rule.kind = verb == "kill" ? ChaosKind::kKill : ChaosKind::kStop;
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(value, absl::MaxSplits(':', 1));
  rule.role = parts.first;
  if (rule.role != "worker" && rule.role != "server" &&
      rule.role != "coordinator") {
    return Wrong(clause, "names no role");
  }
  if (!absl::ParseDuration(parts.second, &rule.period) ||
      rule.period < kShortestPeriod ||
      rule.period == absl::InfiniteDuration()) {
    return Wrong(clause, "has no such period");
  }
  return rule;
}

}  // namespace

absl::StatusOr<ChaosPlan> ParseChaos(absl::string_view text) {
  ChaosPlan plan;
  bool seeded = false;
  for (const absl::string_view clause : absl::StrSplit(text, ',')) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(clause, absl::MaxSplits('=', 1));
    if (parts.first == "seed") {
      if (seeded) {
        return Wrong(clause, "is a second seed");
      }
      // Digits alone: SimpleAtoi would also take signs and blanks.
      if (parts.second.empty() ||
          parts.second.find_first_not_of("0123456789") != std::string::npos ||
          !absl::SimpleAtoi(parts.second, &plan.seed)) {
        return Wrong(clause, "is no number from 0 to 2^64 - 1");
      }
      seeded = true;
      continue;
    }
    BALLAST_ASSIGN_OR_RETURN(const ChaosRule rule,
                             ParseRule(clause, parts.first, parts.second));
    for (const ChaosRule& other : plan.rules) {
      if (other.kind == rule.kind && other.role == rule.role) {
        return Wrong(clause, "says its role a second time");
      }
    }
    plan.rules.push_back(rule);
  }
  if (!seeded) {
    return Wrong(text, "has no seed");
  }
  if (plan.rules.empty()) {
    return Wrong(text, "has no kill= or stop=");
  }
  return plan;
}

ChaosSchedule::ChaosSchedule(ChaosPlan plan, absl::Time start)
    : seed_(plan.seed) {
  for (ChaosRule& rule : plan.rules) {
    const absl::Time due = start + rule.period;
    entries_.push_back({std::move(rule), due});
  }
}

absl::Time ChaosSchedule::next_at() const {
  absl::Time next = absl::InfiniteFuture();
  for (const Entry& entry : entries_) {
    next = std::min(next, entry.due);
  }
  return next;
}

std::vector<ChaosRule> ChaosSchedule::Take(absl::Time now) {
  std::vector<std::pair<absl::Time, ChaosRule>> due;
  for (Entry& entry : entries_) {
    if (entry.due > now) {
      continue;
    }
    due.emplace_back(entry.due, entry.rule);
    const absl::Duration late = now - entry.due;
    entry.due += entry.rule.period * (1 + late / entry.rule.period);
  }
  std::stable_sort(due.begin(), due.end(), [](const auto& a, const auto& b) {
    return a.first < b.first;
  });
  std::vector<ChaosRule> rules;
  for (auto& [at, rule] : due) {
    rules.push_back(std::move(rule));
  }
  return rules;
}

const std::string& ChaosSchedule::Choose(
    const ChaosRule& rule, const std::vector<std::string>& names) {
  const auto entry =
      std::find_if(entries_.begin(), entries_.end(),
                   [&rule](const Entry& other) { return other.rule == rule; });
  const auto index = static_cast<uint64_t>(entry - entries_.begin());
  const uint64_t draw = entry->draws++;
  return names[Philox(seed_, draw, index)[0] % names.size()];
}

}  // namespace ballast
