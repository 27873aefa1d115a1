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
  // Lives that are gone and still remembered, so that late copies of their
  // joins are known for what they are.
  static constexpr size_t kGoneMax = 64;

  struct Limits {
    uint32_t max_workers = 0;
    absl::Duration lease;
    ConfigFields numerics;  // What every join must say.
    // What workers must declare; the first one's when it is not given.
    std::optional<ModelLayout> layout;
  };

  // Incarnations are handed out above `first_incarnation`, generations above
  // `generation`.
  MemberTable(Limits limits, uint64_t first_incarnation, uint64_t generation);

  // A life that an earlier coordinator admitted is in, with a fresh lease.
  void Restore(uint64_t incarnation, const v1::JoinRequest& join,
               absl::Time now);

  // The life that this join's life_id already is, with its lease renewed; null
  // when it is a new one. Errors: ABORTED  this life was admitted and is gone.
  absl::StatusOr<const Member*> FindLife(const v1::JoinRequest& request,
                                         absl::Time now);
  // Whether a new life may come in, as far as names, settings and numbers go.
  // Errors:
  //   INVALID_ARGUMENT     the request is not whole.
  //   FAILED_PRECONDITION  fields or layout differ, or another life has its
  //                        address, or has its name and lives: it was heard of
  //                        a second after this one had first asked.
  //   UNAVAILABLE          another life has the name, perhaps a dead one; or
  //                        there are enough workers.
  absl::Status Check(const v1::JoinRequest& request, absl::Time now);
  // Takes in a life that Check has passed.
  const Member* Admit(const v1::JoinRequest& request, absl::Time now);

  // Renews the lease. Returns whether the stats show work since the last ones.
  // Errors: ABORTED  no such life, or it is gone: join again under a new one.
  absl::StatusOr<bool> Heartbeat(uint64_t incarnation,
                                 const v1::MemberStats* stats, absl::Time now);

  // The member leaves; its name is free. OK when it is gone already. It stays
  // to be found until kGoneMax later ones are gone too.
  void Leave(uint64_t incarnation);
  // Members whose lease ran out; the caller lets them leave.
  std::vector<uint64_t> TakeExpired(absl::Time now);
  // Fresh leases for everyone: time went by in which nobody could be heard.
  void RenewAll(absl::Time now);

  // Null when there is no such life.
  const Member* Find(uint64_t incarnation) const;
  // The life that is in under this name; null: none.
  const Member* FindName(absl::string_view name) const;
  // The newest life under this name, gone or not; null: none is remembered.
  const Member* FindLast(absl::string_view name) const;
  // Members that are in, by name ("server-2" before "server-10").
  std::vector<const Member*> Active(v1::Role role) const;
  std::vector<const Member*> All() const;
  absl::Duration Silence(uint64_t incarnation, absl::Time now) const {
    return leases_.Silence(incarnation, now);
  }
  absl::Duration lease() const { return leases_.lease(); }
  uint32_t max_workers() const { return limits_.max_workers; }
  void set_layout(const ModelLayout& layout) { limits_.layout = layout; }
  // Of the model; nullopt before the first worker (and not resumed).
  const std::optional<ModelLayout>& layout() const { return limits_.layout; }
  // Raised by every admission and departure.
  uint64_t generation() const { return generation_; }

 private:
  absl::Status CheckName(const v1::JoinRequest& request, absl::Time now);
  absl::Status CheckSettings(const v1::JoinRequest& request) const;
  absl::Status CheckModel(const v1::JoinRequest& request) const;

  Limits limits_;
  LeaseTable leases_;
  uint64_t last_incarnation_;
  uint64_t generation_ = 0;
  std::map<uint64_t, Member> members_;  // By incarnation.
  // Lives that asked for a name that is taken: since when, by life id.
  std::map<uint64_t, absl::Time> contenders_;
};

}  // namespace ballast
