// SPDX-License-Identifier: Apache-2.0
// The coordinator's memory: a small ordered map that survives crashes. Two
// stores offer all of it, and one test suite holds both to it: the embedded one
// (RocksDB, every write synced, one process at a time) and etcd
// (storage/etcd_store.h), which several coordinators share.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ballast {

// One change of a batch; no value deletes the key.
struct StateChange {
  std::string key;
  std::optional<std::string> value;
};

// Thread-safe; every call may block on the disk or the network. Besides what is
// listed, calls return DATA_LOSS (the store is damaged), RESOURCE_EXHAUSTED
// (the disk is full; a later call succeeds when there is space again) and, from
// a store behind a network, UNAVAILABLE: it did not answer in time, so whether
// a write took place is unknown; reads and Apply may be repeated.
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

// Ends the watch when it is destroyed: its callback has returned then and is
// not called again. Not to be destroyed from its own callback.
class StoreWatch {
 public:
  virtual ~StoreWatch() = default;
};

// A key that stands only while its holder lives. Destroying the lease gives it
// up: the key goes at once, or after its time when the store does not answer.
class StoreLease {
 public:
  virtual ~StoreLease() = default;
  // Whether the key surely stands. Judged by this process's clock from the
  // moment the last renewal was sent, so a holder that was paused knows before
  // it does anything. Once the key is lost, false for ever.
  virtual bool held() const = 0;
};

// What several processes need in order to agree on one leader.
class SharedStateStore : public StateStore {
 public:
  using OnChange = std::function<void(const StateChange&)>;

  // Tells every key in [begin, end) that changes from now on, on a thread of
  // the watch, in order. A watcher that is slower than the changes may miss
  // values in between, never the newest; one may be told twice.
  virtual absl::StatusOr<std::unique_ptr<StoreWatch>> Watch(
      absl::string_view begin, absl::string_view end, OnChange on_change) = 0;

  // Creates `key` with `value` and keeps it for as long as the lease lives;
  // when the process dies it is gone `ttl` later at the latest (the embedded
  // store: at once, since its lock is the lease). ttl is at least 2 s.
  // Errors: ABORTED  the key exists; whoever made it may be alive.
  virtual absl::StatusOr<std::unique_ptr<StoreLease>> Lease(
      absl::string_view key, absl::string_view value, absl::Duration ttl) = 0;

  // Most changes in one Apply or CompareAndSwap; more are refused with
  // INVALID_ARGUMENT.
  virtual uint64_t batch_max() const = 0;
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
absl::StatusOr<std::unique_ptr<SharedStateStore>> OpenEmbeddedStateStore(
    const std::string& dir, const EmbeddedStoreOptions& options = {});

}  // namespace ballast
