// SPDX-License-Identifier: Apache-2.0
// Which chunks change their server when one is added or drained, in which order
// they travel, and which server keeps the second copy of another's chunks under
// durability `replica`.
//
// Only what must move moves: every chunk of a server that leaves, and from
// servers that are too full as much as brings them all within the slack of
// PlaceChunks. Everything else stays where it is. Pure functions of their
// arguments: the same question has the same answer on every machine and after
// every restart, and asked again in the middle of a move they go on with it.
// Thread-safe.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/job.h"
#include "common/layout.h"

namespace ballast {

// Servers are indices of the placement's list, as in `owner`.
struct OwnershipPlan {
  std::vector<uint64_t> chunk_bytes;  // Of state, by chunk; see ChunkBytes.
  std::vector<uint32_t> owner;        // Now, by chunk.
  std::vector<bool> keeps;            // By server: false, it is to own nothing.
};

// Bytes of state of every chunk.
std::vector<uint64_t> ChunkBytes(const ChunkTable& table,
                                 OptimizerKind optimizer);

// The owner that each chunk should have: only servers that keep, the fullest
// and the emptiest of them apart by at most 5 % of the mean or the largest
// chunk, whichever is more. At least one server keeps.
std::vector<uint32_t> TargetOwners(const ChunkTable& table,
                                   const OwnershipPlan& now);

struct PlannedMove {
  uint32_t chunk = 0;
  uint32_t from = 0;
  uint32_t to = 0;
  friend bool operator==(const PlannedMove&, const PlannedMove&) = default;
};

// The moves to be under way now: chunks whose owner is not their target,
// ascending, as many as keep each pair of servers within `bytes_max`, and at
// least one for each pair. A chunk stays in the batch until it has moved, so
// chunks that follow do not push out those that travel.
std::vector<PlannedMove> MoveBatch(const OwnershipPlan& now,
                                   const std::vector<uint32_t>& target,
                                   uint64_t bytes_max);

// By server: who keeps the second copy of its chunks, the next in the ring of
// servers that `keep`; none for one that does not keep, or keeps alone.
std::vector<std::optional<uint32_t>> RingReplicas(
    const std::vector<bool>& keeps);

}  // namespace ballast
