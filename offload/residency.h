// SPDX-License-Identifier: Apache-2.0
// Where a shard server keeps what: decided once, before the first step, from
// sizes alone, so that it can be printed (`ballast plan`) and cannot break
// later.
//
// Access is a cycle over all chunks in forward order, for which LRU is the
// worst policy: a fixed set stays in memory, the rest streams through a window.
// Weights are kept before optimizer state: a byte of weights saves a read by
// every worker in both passes, a byte of optimizer state one read and one
// write a step. Pure; thread-safe.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast {

// Of one chunk that the server owns; bytes.
struct ChunkFootprint {
  uint64_t record_bytes = 0;    // The whole image.
  uint64_t prefix_bytes = 0;    // Header and what workers fetch.
  uint64_t gradient_bytes = 0;  // fp32.
  uint32_t uses = 1;
};

enum class Tier : uint8_t {
  kStreamed = 0,  // On disk; passes through the window.
  kWeights = 1,   // The prefix stays in memory, the rest streams.
  kWhole = 2,     // In memory; on disk only in checkpoints.
};

struct BudgetItem {
  std::string what;
  uint64_t bytes = 0;
};

struct ResidencyPlan {
  std::vector<Tier> tiers;        // Of each chunk of the request.
  uint64_t index_bytes = 0;       // RocksDB.
  uint64_t tables_bytes = 0;      // What the server knows of each chunk.
  uint64_t log_buffer_bytes = 0;  // Of the gradient log.
  uint64_t credit_bytes = 0;      // Of each worker: pushed, not yet taken.
  uint64_t resident_bytes = 0;    // Chunks of kWhole and prefixes of kWeights.
  // Records and prefixes on their way, and copies for queries.
  uint64_t window_bytes = 0;
  uint64_t gradient_bytes = 0;  // Gradients being summed or waiting.
  // One gradient read back from the log to be added to another.
  uint64_t scratch_bytes = 0;
  // Of one message of a copy that comes from or goes to another server; and how
  // many servers may send at a time.
  uint64_t copy_bytes = 0;
  uint64_t copy_sources = 0;

  // What every item is and takes; they add up to what is used of the budget.
  std::vector<BudgetItem> items;
  uint64_t used_bytes = 0;
  // The smallest budget with which PlanResidency succeeds.
  uint64_t smallest_budget_bytes = 0;
};

struct ResidencyRequest {
  std::vector<ChunkFootprint> chunks;  // In forward order.
  uint64_t budget_bytes = 0;           // server.memory.
  uint32_t workers = 1;                // At least 1.
  // Chunks may come from or go to other servers: what the largest of all chunks
  // takes, and how many servers send at a time. None: nothing moves.
  ChunkFootprint largest;
  uint32_t copy_sources = 0;
};

// What RocksDB may take of a budget: it is opened before the chunks are known.
uint64_t IndexBytes(uint64_t budget_bytes);

// Errors: RESOURCE_EXHAUSTED  the budget does not hold the largest chunk's
//         window; the message names the items and the smallest budget.
absl::StatusOr<ResidencyPlan> PlanResidency(const ResidencyRequest& request);

}  // namespace ballast
