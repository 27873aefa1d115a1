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

// Thread-safe; every call may block on the disk.
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

// Opens (or creates) an embedded store in `dir`, locked by this process.
// Errors: FAILED_PRECONDITION  another process has it open.
//         DATA_LOSS            it is damaged.
absl::StatusOr<std::unique_ptr<StateStore>> OpenEmbeddedStateStore(
    const std::string& dir);

}  // namespace ballast
