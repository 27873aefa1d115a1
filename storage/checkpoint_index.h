// SPDX-License-Identifier: Apache-2.0
// The index of a data directory: which extents each checkpoint consists of.
// Keys and values over a StateStore; a checkpoint is added or removed by one
// synced batch. Keys: docs/FORMATS.md.

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

}  // namespace ballast
