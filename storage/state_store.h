// SPDX-License-Identifier: Apache-2.0
// The coordinator's memory: a small ordered map that survives crashes. This
// interface is what a distributed store offers too (get, compare-and-swap,
// range); the embedded one is RocksDB with every write synced.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast {

// One change of a batch; no value deletes the key.
struct StateChange {
  std::string key;
  std::optional<std::string> value;
};

// Thread-safe; every call may block on the disk. Besides what is listed, calls
// return DATA_LOSS (the store is damaged) and RESOURCE_EXHAUSTED (the disk is
// full; a later call succeeds when there is space again).
class StateStore {
 public:
  virtual ~StateStore() = default;
  // NOT_FOUND when there is no such key.
  virtual absl::StatusOr<std::string> Get(absl::string_view key) = 0;
  // Applies all changes or none, durable on return, if `key` holds `expected`
  // (nullopt: does not exist). Errors: ABORTED  it holds something else.
  virtual absl::Status CompareAndSwap(
      absl::string_view key, const std::optional<std::string>& expected,
      const std::vector<StateChange>& changes) = 0;
  // Applies all changes or none; durable on return.
  virtual absl::Status Apply(const std::vector<StateChange>& changes) = 0;
  // Pairs with begin <= key < end in key order, at most `limit`.
  virtual absl::StatusOr<std::vector<std::pair<std::string, std::string>>>
  Range(absl::string_view begin, absl::string_view end, uint64_t limit) = 0;
};

struct EmbeddedStoreOptions {
  // Memtables and block cache together stay below this. At least 256 KiB.
  uint64_t memory_bytes = 4 << 20;
  // Whether a missing or empty folder becomes a new store.
  bool create = true;
};

// Opens an embedded store in `dir`, locked by this process. What it reads is
// durable: what a former life wrote is synced before this returns.
// Errors: FAILED_PRECONDITION  another process has it open, or the folder
//                              holds something else.
//         DATA_LOSS            it is damaged, or missing and not `create`.
absl::StatusOr<std::unique_ptr<StateStore>> OpenEmbeddedStateStore(
    const std::string& dir, const EmbeddedStoreOptions& options = {});

}  // namespace ballast
