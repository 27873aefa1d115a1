// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/step_log.h"

#include <algorithm>

namespace ballast {

StepLog::StepLog() { MakeLineage(); }

StepLog::StepLog(const RunState& state, uint64_t timeline)
    : timeline_(timeline), decisions_(state.decisions) {
  for (const auto& [branch, record] : state.branches) {
    parents_[branch] = record.parent;
  }
  MakeLineage();
}

void StepLog::MakeLineage() {
  lineage_.clear();
  uint64_t timeline = timeline_;
  uint64_t last = UINT64_MAX;
  // Each turn goes to an older timeline.
  while (timeline != 0) {
    const auto found = parents_.find(timeline);
    const StepKey parent = found == parents_.end() ? StepKey{} : found->second;
    lineage_.push_back({timeline, parent, last});
    // A child may continue its parent where that had only just begun.
    last = std::min(last, parent.step);
    timeline = parent.timeline < timeline ? parent.timeline : 0;
  }
}

void StepLog::Branch(uint64_t timeline, const StepKey& parent) {
  timeline_ = timeline;
  parents_[timeline] = parent;
  MakeLineage();
}

void StepLog::Append(const v1::Decision& decision) {
  decisions_[{decision.timeline(), decision.step()}] = decision;
}

StepKey StepLog::KeyOf(uint64_t step) const {
  for (const Segment& segment : lineage_) {
    if (step > segment.parent.step) {
      return {segment.timeline, step};
    }
  }
  return {lineage_.back().timeline, step};
}

const v1::Decision* StepLog::At(uint64_t step) const {
  const auto found = decisions_.find(KeyOf(step));
  return found == decisions_.end() ? nullptr : &found->second;
}

bool StepLog::Bridges(uint64_t after, uint64_t through) const {
  for (uint64_t step = after + 1; step <= through; ++step) {
    if (At(step) == nullptr) {
      return false;
    }
  }
  return true;
}

std::vector<v1::Decision> StepLog::Range(uint64_t after,
                                         uint64_t through) const {
  std::vector<v1::Decision> decisions;
  for (uint64_t step = after + 1; step <= through; ++step) {
    if (const v1::Decision* decision = At(step)) {
      decisions.push_back(*decision);
    }
  }
  return decisions;
}

std::optional<uint64_t> StepLog::LeftAt(uint64_t timeline) const {
  for (const Segment& segment : lineage_) {
    if (segment.timeline == timeline) {
      return segment.last;
    }
  }
  return std::nullopt;
}

bool StepLog::Contains(const StepKey& version) const {
  if (version.step == 0) {
    return true;
  }
  for (const Segment& segment : lineage_) {
    if (segment.timeline == version.timeline) {
      // The parent's last version is also where this timeline begins.
      return version.step >= segment.parent.step &&
             version.step <= segment.last;
    }
  }
  return false;
}

std::vector<StepKey> StepLog::DropBelow(uint64_t step, size_t count) {
  const StepKey lowest = KeyOf(step);
  std::vector<StepKey> dropped;
  while (!decisions_.empty() && decisions_.begin()->first < lowest &&
         dropped.size() < count) {
    dropped.push_back(decisions_.begin()->first);
    decisions_.erase(decisions_.begin());
  }
  return dropped;
}

}  // namespace ballast
