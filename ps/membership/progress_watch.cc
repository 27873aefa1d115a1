// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/progress_watch.h"

#include <algorithm>

namespace ballast {

bool ShowsWork(const v1::MemberStats& before, const v1::MemberStats& after) {
  return before.step() != after.step() ||
         before.units_done() != after.units_done() ||
         before.fetched_bytes() != after.fetched_bytes() ||
         before.pushed_bytes() != after.pushed_bytes() ||
         before.spilled_bytes_written() != after.spilled_bytes_written() ||
         before.spilled_bytes_read() != after.spilled_bytes_read() ||
         before.chunks_resident() != after.chunks_resident() ||
         before.log_bytes() != after.log_bytes() ||
         before.loaded_chunks() != after.loaded_chunks();
}

void ProgressWatch::Observe(uint64_t member, const v1::MemberStats& stats,
                            bool owes, absl::Time now) {
  Watched& watched = watched_[member];
  const bool further = ShowsWork(watched.stats, stats);
  const bool works = owes && stats.waits_for().empty();
  if (further && watched.works) {
    watched.observed = true;
    watched.slowest = std::max(watched.slowest, now - watched.since);
  }
  if (further || !works || !watched.works) {
    watched.since = now;
  }
  watched.works = works;
  watched.stats = stats;
}

void ProgressWatch::Restart(absl::Time now) {
  for (auto& [member, watched] : watched_) {
    watched.since = now;
  }
}

absl::Duration ProgressWatch::Stalled(uint64_t member, absl::Time now) const {
  const auto place = watched_.find(member);
  return place == watched_.end() || !place->second.works
             ? absl::ZeroDuration()
             : now - place->second.since;
}

absl::Duration ProgressWatch::LimitOf(uint64_t member) const {
  const auto place = watched_.find(member);
  if (place == watched_.end() || !place->second.observed) {
    return 10 * limit_;
  }
  return std::max(limit_, 8 * place->second.slowest);
}

}  // namespace ballast
