// SPDX-License-Identifier: Apache-2.0
// A rehearsal: when `ballast train --chaos` kills or stops a process of its own
// run, and which. The same seed chooses the same members, as far as the same
// ones are up.
//
// Pure: time is an argument. Not thread-safe.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ballast {

enum class ChaosKind {
  kKill,  // SIGKILL.
  kStop,  // SIGSTOP for twice cluster.lease, then SIGCONT.
};

// One clause: again and again, every `period`.
struct ChaosRule {
  ChaosKind kind = ChaosKind::kKill;
  std::string role;  // worker | server | coordinator.
  absl::Duration period;
  friend bool operator==(const ChaosRule&, const ChaosRule&) = default;
};

struct ChaosPlan {
  uint64_t seed = 0;
  std::vector<ChaosRule> rules;  // Empty: no chaos.
};

// How --chaos is written, for help and errors.
inline constexpr char kChaosGrammar[] =
    "seed=N,kill=ROLE:PERIOD[,kill=ROLE:PERIOD...][,stop=ROLE:PERIOD...] with "
    "ROLE worker, server or coordinator and PERIOD a time from 100ms on, such "
    "as 20s or 1m30s";

// Errors: INVALID_ARGUMENT  names what is wrong, and the grammar.
absl::StatusOr<ChaosPlan> ParseChaos(absl::string_view text);

class ChaosSchedule {
 public:
  // The first fault of a rule is due one period after `start`.
  ChaosSchedule(ChaosPlan plan, absl::Time start);

  // When the next fault is due; infinite without rules.
  absl::Time next_at() const;
  // The rules due by `now`, in the order in which they fell due. Periods that
  // were slept through count once.
  std::vector<ChaosRule> Take(absl::Time now);
  // One of `names`, not empty, as the seed says; another draw each time.
  const std::string& Choose(const ChaosRule& rule,
                            const std::vector<std::string>& names);

 private:
  struct Entry {
    ChaosRule rule;
    absl::Time due;
    uint64_t draws = 0;
  };

  const uint64_t seed_;
  std::vector<Entry> entries_;
};

}  // namespace ballast
