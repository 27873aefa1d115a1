// SPDX-License-Identifier: Apache-2.0
// Who is stuck: has what it needs, owes something, is heard of, and gets no
// further. Silence is the leases' matter (ps/membership/lease_table.h).
//
// A member that waits for another is not late, and what it has shown to be
// slow at is its own measure: a unit may take eight times as long as its
// slowest so far, and ten limits before the first.
//
// Pure: time is an argument. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>

#include "absl/time/time.h"
#include "proto/ballast.pb.h"

namespace ballast {

// Whether the numbers that grow with work differ. The phase is left out: a
// member that tries in vain changes it too.
bool ShowsWork(const v1::MemberStats& before, const v1::MemberStats& after);

class ProgressWatch {
 public:
  explicit ProgressWatch(absl::Duration limit) : limit_(limit) {}

  // What the member says now, and whether the run waits for it. To be called
  // every few hundred milliseconds: times are no finer than that.
  void Observe(uint64_t member, const v1::MemberStats& stats, bool owes,
               absl::Time now);
  void Forget(uint64_t member) { watched_.erase(member); }
  // Time went by in which nothing could be observed: it counts for nobody.
  void Restart(absl::Time now);

  // How long it has owed, with its inputs, without getting further.
  absl::Duration Stalled(uint64_t member, absl::Time now) const;
  // How long that may be.
  absl::Duration LimitOf(uint64_t member) const;
  bool IsStuck(uint64_t member, absl::Time now) const {
    return Stalled(member, now) >= LimitOf(member);
  }

 private:
  struct Watched {
    v1::MemberStats stats;
    bool works = false;  // Owes and has its inputs.
    absl::Time since;    // With `works`: it last got further.
    bool observed = false;
    absl::Duration slowest;
  };
  const absl::Duration limit_;
  std::map<uint64_t, Watched> watched_;
};

}  // namespace ballast
