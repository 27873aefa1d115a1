// SPDX-License-Identifier: Apache-2.0
// The decisions that the coordinator remembers, as the history that its current
// timeline makes of them: which decision made version N, and whether a version
// or gradient that a server holds belongs to that history or to an abandoned
// branch. What is appended or dropped here is persisted by the caller.
//
// Pure. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "proto/ballast.pb.h"
#include "ps/membership/run_state.h"

namespace ballast {

class StepLog {
 public:
  // Of a run without steps, on timeline 1.
  StepLog();
  // What the store holds; `timeline` is the current one.
  StepLog(const RunState& state, uint64_t timeline);

  // A new timeline, which continues what `parent` was.
  void Branch(uint64_t timeline, const StepKey& parent);
  // The next decision of the current timeline.
  void Append(const v1::Decision& decision);

  uint64_t timeline() const { return timeline_; }
  // Where the current timeline left its parent.
  const StepKey& base() const { return lineage_.front().parent; }
  // The decision that made version `step` of the current history; null when it
  // is not there.
  const v1::Decision* At(uint64_t step) const;
  // Whether the decisions of all steps after `after` up to `through` are there.
  bool Bridges(uint64_t after, uint64_t through) const;
  // These decisions, ascending; those that are missing are left out.
  std::vector<v1::Decision> Range(uint64_t after, uint64_t through) const;

  // The last step of `timeline` that the current history has: UINT64_MAX for
  // the current one, nullopt when it has none of it.
  std::optional<uint64_t> LeftAt(uint64_t timeline) const;
  // Whether a version made on this timeline is a version of the current
  // history. Initial values are, whoever made them.
  bool Contains(const StepKey& version) const;

  // Drops what is older than the decision of `step` and returns its keys, at
  // most `count` of them, oldest first: ask again for the rest.
  std::vector<StepKey> DropBelow(uint64_t step, size_t count);
  bool empty() const { return decisions_.empty(); }

 private:
  struct Segment {
    uint64_t timeline = 0;
    StepKey parent;
    uint64_t last = 0;  // Step that the child continues; the current: max.
  };
  // Of the step; the current timeline for steps to come.
  StepKey KeyOf(uint64_t step) const;
  void MakeLineage();

  uint64_t timeline_ = 1;
  std::map<uint64_t, StepKey> parents_;  // By timeline.
  std::vector<Segment> lineage_;         // From the current one down.
  std::map<StepKey, v1::Decision> decisions_;
};

}  // namespace ballast
