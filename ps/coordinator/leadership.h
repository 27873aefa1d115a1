// SPDX-License-Identifier: Apache-2.0
// Who may write. The key `leader` of the state store stands only while the
// coordinator that made it lives, and every batch that a leader writes is
// applied only if the key still holds its value. So an old leader that was
// paused and wakes up changes nothing: it learns at its first write that it
// leads no more.
//
// The embedded store's key is a formality: its lock keeps others out. With etcd
// (--state-store) several coordinators run and all but one stand by.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "storage/state_store.h"

namespace ballast {

inline constexpr char kLeaderKey[] = "leader";

// What the key holds: "term=3 address=10.0.0.1:7400 life=1f3c...".
struct LeaderRecord {
  uint64_t term = 0;    // That its first write makes the run's.
  std::string address;  // host:port.
  std::string life;     // Of the process; no two leaders write the same value.

  std::string Encode() const;
  // Errors: DATA_LOSS  it is none.
  static absl::StatusOr<LeaderRecord> Decode(absl::string_view text);
};

// Thread-compatible; calls block on the store.
class Leadership {
 public:
  // Becomes the leader, reachable at `address`. `store` is not owned and
  // outlives the leadership, which ends when it is destroyed, or `ttl` after
  // the process has died.
  // Errors: ABORTED  another leads; the message says "leader is host:port".
  //         Others are the store's.
  static absl::StatusOr<std::unique_ptr<Leadership>> Take(
      SharedStateStore* store, const std::string& address, absl::Duration ttl);

  const LeaderRecord& record() const { return record_; }
  SharedStateStore* store() const { return store_; }
  // Whether this coordinator surely leads now; see StoreLease::held.
  bool sure() const { return lease_->held(); }

  // Writes `changes` if this coordinator leads: all values in one batch, then
  // deletions in as many as the store wants. Without changes it only asks. May
  // be repeated after UNAVAILABLE and RESOURCE_EXHAUSTED.
  // Errors: ABORTED  it leads no more; nothing was written.
  absl::Status Apply(const std::vector<StateChange>& changes);

 private:
  Leadership(SharedStateStore* store, LeaderRecord record,
             std::unique_ptr<StoreLease> lease)
      : store_(store),
        record_(std::move(record)),
        value_(record_.Encode()),
        lease_(std::move(lease)) {}

  SharedStateStore* const store_;
  const LeaderRecord record_;
  const std::string value_;
  const std::unique_ptr<StoreLease> lease_;
};

}  // namespace ballast
