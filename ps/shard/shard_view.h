// SPDX-License-Identifier: Apache-2.0
// What a shard server knows of the run around it: who it is, which messages it
// takes, and the memory that everything lives in.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>

#include "common/layout.h"
#include "offload/arena.h"
#include "offload/residency.h"

namespace ballast {

// shared: replies on their way keep the memory they point into.
struct ShardMemory {
  std::unique_ptr<Arena> resident;
  std::unique_ptr<Arena> window;
  std::unique_ptr<Arena> gradients;
  ArenaBuffer scratch;  // Of `gradients`: one that is added from the log.
};

// Plain data of the engine's thread; the parts read it, the engine writes it.
struct ShardView {
  uint64_t incarnation = 0;  // Ours.
  uint64_t timeline = 0;
  uint64_t placement_version = 0;
  bool loaded = false;
  std::optional<ChunkTable> table;
  ResidencyPlan plan;
  uint32_t micro_batches = 0;
  uint32_t workers_planned = 1;  // Share the credit and the window.
  std::set<uint64_t> workers;    // Incarnations whose pushes are accepted.
  uint64_t collecting_step = 0;  // 0: none.
  uint64_t decided_step = 0;     // Gradients up to it are not wanted any more.
  // Chunks that come to us with the decision being applied: they are fetched
  // by the new placement, once they are here.
  std::set<uint32_t> incoming;
  std::shared_ptr<ShardMemory> memory;
};

}  // namespace ballast
