// SPDX-License-Identifier: Apache-2.0
// The index of a data directory: which extents each checkpoint consists of, and
// the base of each chunk. Keys and values over a StateStore; every change is
// one synced batch. Keys: docs/FORMATS.md.

#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/slab_store.h"
#include "storage/state_store.h"

namespace ballast {

// All checkpoints, by timeline, then step.
// Errors: DATA_LOSS  an entry is damaged or missing, naming the checkpoint.
absl::StatusOr<std::vector<StoredCheckpoint>> ReadCheckpoints(
    StateStore* store);

// Durable on return; all or nothing.
absl::Status AddCheckpoint(const StoredCheckpoint& checkpoint,
                           StateStore* store);
absl::Status RemoveCheckpoint(const StoredCheckpoint& checkpoint,
                              StateStore* store);

// The base of every chunk that has one, by chunk.
// Errors: DATA_LOSS  an entry is damaged, naming the chunk.
absl::StatusOr<std::vector<CheckpointEntry>> ReadBases(StateStore* store);

// Sets the bases `put` and forgets those of the chunks `removed`. Durable on
// return; all or nothing.
absl::Status ChangeBases(const std::vector<CheckpointEntry>& put,
                         const std::vector<uint32_t>& removed,
                         StateStore* store);

}  // namespace ballast
