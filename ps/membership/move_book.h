// SPDX-License-Identifier: Apache-2.0
// Chunks that are on their way from one server to another, and how far copies
// of chunks are: a chunk's new server holds a replica of it first, and only
// what is in sync through a step may change hands with that step's decision.
//
// Pure. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "ps/membership/move_planner.h"
#include "ps/membership/server_table.h"

namespace ballast {

class MoveBook {
 public:
  // The moves to be under way from now on. What is known of those that were so
  // before stays.
  void SetPlan(std::vector<PlannedMove> plan) { plan_ = std::move(plan); }
  bool empty() const { return plan_.empty(); }
  void Clear();

  // The replica of `chunk` that life `life` of place `to` holds is synced
  // through `step`.
  void Synced(uint32_t chunk, uint32_t to, uint64_t life, uint64_t step);
  bool IsSynced(uint32_t chunk, uint32_t to, uint64_t life,
                uint64_t step) const;
  // Planned moves whose replica is in sync through `step`, at the life that is
  // in now and has loaded.
  std::vector<PlannedMove> Ready(uint64_t step,
                                 const ServerTable& servers) const;

  // Chunks by the other side's place.
  std::map<uint32_t, std::vector<uint32_t>> From(uint32_t slot) const;
  std::map<uint32_t, std::vector<uint32_t>> To(uint32_t slot) const;

 private:
  struct Replica {
    uint64_t life = 0;
    uint64_t step = 0;
  };
  std::vector<PlannedMove> plan_;
  // By chunk and the place that has the copy.
  std::map<std::pair<uint32_t, uint32_t>, Replica> synced_;
};

}  // namespace ballast
