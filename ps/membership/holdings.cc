// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/holdings.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

// What of one entry belongs to the current history; nullopt: nothing.
absl::StatusOr<std::optional<Holdings>> Usable(const StepLog& log,
                                               uint64_t committed,
                                               const v1::HeldChunks& held,
                                               const std::string& who) {
  if (!log.Contains({held.timeline(), held.version()})) {
    return std::optional<Holdings>();
  }
  Holdings usable = {held.version(), held.version()};
  const std::optional<uint64_t> left = log.LeftAt(held.redoable_timeline());
  if (left.has_value()) {
    usable.redoable =
        std::max(usable.redoable, std::min(held.redoable(), *left));
  }
  // A vote for the next step may be on its way; nothing beyond.
  if (usable.base > committed || usable.redoable > committed + 1) {
    return absl::DataLossError(absl::StrCat(
        who, " holds version ", usable.base, " and gradients through step ",
        usable.redoable, " of timeline ", log.timeline(),
        ", but the step log ends at ", committed,
        "; the coordinator's state is older than the servers': restore it, or "
        "resume from a checkpoint"));
  }
  return std::optional<Holdings>(usable);
}

bool Better(const Holdings& a, const std::optional<Holdings>& b) {
  return !b.has_value() || a.redoable > b->redoable ||
         (a.redoable == b->redoable && a.base > b->base);
}

}  // namespace

std::vector<v1::ChunkRange> RangesOf(const std::vector<uint32_t>& chunks) {
  std::vector<v1::ChunkRange> ranges;
  for (const uint32_t chunk : chunks) {
    if (ranges.empty() ||
        ranges.back().first() + ranges.back().count() != chunk) {
      ranges.emplace_back().set_first(chunk);
    }
    ranges.back().set_count(ranges.back().count() + 1);
  }
  return ranges;
}

std::string RangesText(const std::vector<uint32_t>& chunks) {
  return absl::StrJoin(RangesOf(chunks), ", ",
                       [](std::string* out, const v1::ChunkRange& range) {
                         absl::StrAppend(out, range.first());
                         if (range.count() > 1) {
                           absl::StrAppend(out, " to ",
                                           range.first() + range.count() - 1);
                         }
                       });
}

absl::StatusOr<Holdings> JudgeHoldings(const StepLog& log, uint64_t committed,
                                       const std::vector<uint32_t>& chunks,
                                       const v1::JoinRequest& join) {
  // Entries are few and ranges long, so chunks are looked up entry by entry.
  std::map<uint32_t, std::optional<Holdings>> best;
  for (const uint32_t chunk : chunks) {
    best[chunk];
  }
  for (const v1::HeldChunks& held : join.held()) {
    BALLAST_ASSIGN_OR_RETURN(const std::optional<Holdings> usable,
                             Usable(log, committed, held, join.name()));
    for (const v1::ChunkRange& range : held.chunks()) {
      const uint64_t end = uint64_t{range.first()} + range.count();
      for (auto place = best.lower_bound(range.first());
           usable.has_value() && place != best.end() && place->first < end;
           ++place) {
        if (Better(*usable, place->second)) {
          place->second = usable;
        }
      }
    }
  }
  Holdings all = {committed, chunks.empty() ? committed : UINT64_MAX};
  std::vector<uint32_t> short_of;
  std::optional<Holdings> first;  // Of the first chunk that falls short.
  for (const auto& [chunk, holdings] : best) {
    if (holdings.has_value() && holdings->redoable >= committed &&
        log.Bridges(holdings->base, committed)) {
      all.base = std::min(all.base, holdings->base);
      all.redoable = std::min(all.redoable, holdings->redoable);
      continue;
    }
    if (short_of.empty()) {
      first = holdings;
    }
    short_of.push_back(chunk);
  }
  if (short_of.empty()) {
    return all;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      join.name(), " cannot bring chunks ", RangesText(short_of),
      " to version ", committed, ": it holds ",
      first.has_value()
          ? absl::StrCat("version ", first->base, " of chunk ",
                         short_of.front(), " and gradients through step ",
                         first->redoable)
          : absl::StrCat("nothing of chunk ", short_of.front(),
                         " that belongs to timeline ", log.timeline()),
      "; start it with the data directory it had, or resume from a "
      "checkpoint"));
}

}  // namespace ballast
