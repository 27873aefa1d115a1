// SPDX-License-Identifier: Apache-2.0
// Who has been heard of lately. A member that is silent for a whole lease is
// taken for dead; the table only keeps time, what follows is the core's matter.
//
// Pure: time is an argument. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/time/time.h"

namespace ballast {

class LeaseTable {
 public:
  explicit LeaseTable(absl::Duration lease) : lease_(lease) {}

  absl::Duration lease() const { return lease_; }

  // Starts or extends the lease of a member, known by its incarnation. An
  // earlier time than the last one changes nothing.
  void Renew(uint64_t incarnation, absl::Time now);
  // OK when there is no such member.
  void Remove(uint64_t incarnation);

  // Members silent for a whole lease, ascending. They leave the table, so each
  // is named once.
  std::vector<uint64_t> TakeExpired(absl::Time now);

  // Since the last renewal; zero for an unknown member.
  absl::Duration Silence(uint64_t incarnation, absl::Time now) const;

 private:
  const absl::Duration lease_;
  std::map<uint64_t, absl::Time> renewed_;
};

}  // namespace ballast
