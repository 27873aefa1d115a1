// SPDX-License-Identifier: Apache-2.0
// Whether a server that joins can go on with the run: what it holds of its
// chunks, against what the step log remembers.
//
// A server brings a chunk from the version of its record to any version up to
// `redoable` with gradients of its own log and decisions of ours. Records and
// gradients of an abandoned branch are worth nothing.
//
// Pure functions. Thread-safe.

#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/ballast.pb.h"
#include "ps/membership/step_log.h"

namespace ballast {

struct Holdings {
  uint64_t base = 0;      // Lowest record that a recovery begins from.
  uint64_t redoable = 0;  // Every chunk can be brought to this version.
  friend bool operator==(const Holdings&, const Holdings&) = default;
};

// Of `chunks` (ascending), to be brought to version `committed` at least. A
// server without chunks holds what is wanted.
// Errors:
//   FAILED_PRECONDITION  a chunk cannot be brought there; the message names the
//                        first such range and both sides' numbers.
//   DATA_LOSS            the server holds steps of this timeline that the step
//                        log does not know.
absl::StatusOr<Holdings> JudgeHoldings(const StepLog& log, uint64_t committed,
                                       const std::vector<uint32_t>& chunks,
                                       const v1::JoinRequest& join);

// As ranges, ascending.
std::vector<v1::ChunkRange> RangesOf(const std::vector<uint32_t>& chunks);
// "0 to 7, 12".
std::string RangesText(const std::vector<uint32_t>& chunks);

}  // namespace ballast
