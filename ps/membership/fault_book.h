// SPDX-License-Identifier: Apache-2.0
// What went wrong and what it cost: the time from the notice to the next
// committed step. Persisted, so that a list outlives the coordinator; only the
// newest kMax are kept.
//
// Pure: time is an argument. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/ballast.pb.h"
#include "ps/membership/run_state.h"

namespace ballast {

class FaultBook {
 public:
  static constexpr size_t kMax = 1000;

  FaultBook() = default;
  // Those of earlier lives of the coordinator. What has not recovered yet is
  // counted from `now` on.
  FaultBook(const std::map<uint64_t, v1::Fault>& faults, absl::Time now);

  // Returns the fault's number. `incarnation` is the life that it was about; 0:
  // none of ours.
  uint64_t Add(uint64_t incarnation, v1::Fault fault, absl::Time noticed,
               std::vector<StateChange>* changes);
  // A supervisor knows better how that life ended. False: there is no fault
  // of it.
  bool Amend(uint64_t incarnation, const std::string& kind,
             const std::string& detail, std::vector<StateChange>* changes);
  // A step is committed: whatever went wrong before it has been overcome.
  void Committed(absl::Time now, std::vector<StateChange>* changes);

  // By number.
  const std::map<uint64_t, v1::Fault>& faults() const { return faults_; }

 private:
  std::map<uint64_t, v1::Fault> faults_;
  std::map<uint64_t, absl::Time> open_;   // Noticed; by number.
  std::map<uint64_t, uint64_t> of_life_;  // Number by incarnation.
  uint64_t last_ = 0;
};

}  // namespace ballast
