// SPDX-License-Identifier: Apache-2.0
// The hash chain over the step log: each decision carries a hash over the chain
// of the decision before it and over everything else it says. So a record that
// was changed, lost or put in later is found offline, and two histories that
// end in the same chain are the same.
//
// Pure.

#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/ballast.pb.h"
#include "ps/membership/run_state.h"

namespace ballast {

// What `record.chain` has to be: 16 bytes, the XXH3-128 (high, low;
// little-endian) over `previous` and the record serialized without its own
// chain. `previous` is the chain of the decision before it (on the parent's
// timeline for the first of a branch), empty before step 1.
std::string ChainOf(absl::string_view previous, const v1::Decision& record);

struct ChainReport {
  uint64_t records = 0;  // On all timelines.
  uint64_t checked = 0;  // Of them, those whose predecessor is there too.
  uint64_t timelines = 0;
  // Of the current history; 0 when it has no record.
  uint64_t first_step = 0;
  uint64_t last_step = 0;
  std::string head;  // Chain of the last step, 16 bytes.
};

// Checks every decision that the store holds, abandoned branches included, and
// that the current history has no gap. Of a log that was pruned the oldest
// record's own content cannot be checked; all later ones can.
// Errors: DATA_LOSS  a record has no chain, another chain than it must have, or
//         is missing; names timeline and step.
absl::StatusOr<ChainReport> CheckChain(const RunState& state);

}  // namespace ballast
