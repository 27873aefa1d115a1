// SPDX-License-Identifier: Apache-2.0
// Who is in: members, their lives, leases and last words, and the rules by
// which a join is admitted or refused.
//
// Pure: time is an argument. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/layout.h"
#include "proto/ballast.pb.h"
#include "ps/membership/lease_table.h"
#include "ps/membership/run_state.h"

namespace ballast {

// INVALID_ARGUMENT when a layout differs from the reference, naming the first
// tensor (or unit) and both descriptions.
absl::Status CheckLayout(const ModelLayout& reference,
                         const ModelLayout& theirs);

// FAILED_PRECONDITION when fields differ, naming each with both values.
// `whose` says whose the reference is. With `extra_allowed` fields that only
// `theirs` has are left out of the comparison.
absl::Status CheckFields(const ConfigFields& reference,
                         const ConfigFields& theirs, const std::string& whose,
                         bool extra_allowed);

// One life of a member. A member that comes back is another entry.
struct Member {
  v1::JoinRequest join;
  uint64_t incarnation = 0;
  bool gone = false;
  v1::MemberStats stats;  // The latest it sent.
  bool is_server() const { return join.role() == v1::ROLE_SERVER; }
  const std::string& name() const { return join.name(); }
  // "server-0 (pid 12 on host)", for messages.
  std::string Describe() const;
};

class MemberTable {
 public:
  struct Limits {
    uint32_t servers = 0;
    uint32_t workers = 0;
    absl::Duration lease;
    ConfigFields numerics;  // What every join must say.
    // A resumed run's layout, which workers must declare too.
    std::optional<ModelLayout> layout;
  };

  // Incarnations are handed out above `first_incarnation`.
  MemberTable(Limits limits, uint64_t first_incarnation);

  // Admits a life, or finds the one that this life_id already is. `open` says
  // whether new lives are taken at all.
  // Errors:
  //   INVALID_ARGUMENT     the request is not whole.
  //   FAILED_PRECONDITION  another life has the name, or fields or layout
  //                        differ; the message names them.
  //   UNAVAILABLE          not open, or the group is full.
  //   ABORTED              this life was admitted and is gone.
  absl::StatusOr<const Member*> Admit(const v1::JoinRequest& request, bool open,
                                      absl::Time now);

  // Renews the lease. Returns whether the stats show work since the last ones.
  // Errors: ABORTED  no such life, or it is gone: join again under a new one.
  absl::StatusOr<bool> Heartbeat(uint64_t incarnation,
                                 const v1::MemberStats* stats, absl::Time now);

  // The member leaves; its name is free. OK when it is gone already.
  void Leave(uint64_t incarnation);
  // Members whose lease ran out; they are gone now.
  std::vector<uint64_t> TakeExpired(absl::Time now);

  // Null when there is no such life.
  const Member* Find(uint64_t incarnation) const;
  // Members that are in, by name ("server-2" before "server-10").
  std::vector<const Member*> Active(v1::Role role) const;
  std::vector<const Member*> All() const;
  absl::Duration Silence(uint64_t incarnation, absl::Time now) const {
    return leases_.Silence(incarnation, now);
  }
  bool Full() const;
  uint32_t wanted(v1::Role role) const {
    return role == v1::ROLE_SERVER ? limits_.servers : limits_.workers;
  }
  absl::Duration lease() const { return leases_.lease(); }
  // Of the model; nullopt before the first worker (and not resumed).
  const std::optional<ModelLayout>& layout() const { return limits_.layout; }
  // Raised by every admission and departure.
  uint64_t generation() const { return generation_; }

 private:
  absl::Status CheckJoin(const v1::JoinRequest& request) const;
  absl::Status CheckName(const v1::JoinRequest& request) const;

  Limits limits_;
  LeaseTable leases_;
  uint64_t last_incarnation_;
  uint64_t generation_ = 0;
  std::map<uint64_t, Member> members_;  // By incarnation.
};

}  // namespace ballast
