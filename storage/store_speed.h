// SPDX-License-Identifier: Apache-2.0
// How fast the slab store moves records beside the file under it: the cycle of
// a server whose state does not fit, which reads every record and writes a new
// version of it. Both are measured in the same call, in turns, because a shared
// disk changes from minute to minute and only the ratio can be kept.

#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace ballast {

struct StoreSpeedOptions {
  std::string dir;                // Must not exist; removed at the end.
  uint64_t body_bytes = 4 << 20;  // Of one record; pages.
  uint64_t record_count = 64;
  uint32_t queue_depth = 4;
  uint32_t rounds = 5;  // Medians are over these.
};

// GB (10^9 bytes) of bodies a second, read + written.
struct StoreSpeed {
  uint64_t bytes = 0;       // That one cycle moves.
  double raw_gbps = 0;      // One file, in place: the ceiling.
  double store_gbps = 0;    // Extents through SlabStore.
  double checked_gbps = 0;  // The same, every record checked and sealed.
  double commit_ms = 0;     // A checkpoint of all records after a cycle.
  uint64_t wrong = 0;       // Records that read back differently.
  bool direct = false;      // O_DIRECT was available.
};

// Blocks for seconds. Errors: whatever the disk says.
absl::StatusOr<StoreSpeed> MeasureStoreSpeed(const StoreSpeedOptions& options);

}  // namespace ballast
