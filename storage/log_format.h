// SPDX-License-Identifier: Apache-2.0
// A record of the gradient log: one page of header, then the payload, padded to
// whole pages. Encoding and checking only, no I/O. Format: docs/FORMATS.md.

#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/hash.h"
#include "storage/gradient_log.h"

namespace ballast {

// What a record's payload is.
enum class LogKind : uint32_t { kGradient = 1, kMark = 2 };

struct LogHeader {
  Hash128 run;
  LogKind kind = LogKind::kGradient;
  GradientName name;     // Of a mark only timeline and step.
  uint64_t segment = 0;  // Where the record lies, so that recycled bytes and
  uint64_t offset = 0;   // misplaced writes never pass for it.
  // Everything before this place was known to be synced when the record was
  // written; 0, 0 when nothing was.
  uint64_t synced_segment = 0;
  uint64_t synced_offset = 0;
  // Where the segment before this one ends; 0, 0 for the first of a log. It
  // tells the end of what was taken over from the abandoned bytes behind it.
  uint64_t previous_segment = 0;
  uint64_t previous_end = 0;
  uint64_t payload_bytes = 0;
  Hash128 payload_hash;
  friend bool operator==(const LogHeader&, const LogHeader&) = default;
};

// Exactly one page.
std::string EncodeLogHeader(const LogHeader& header);

// Errors: DATA_LOSS  no header, or damaged; names `where`.
absl::StatusOr<LogHeader> DecodeLogHeader(absl::string_view page,
                                          absl::string_view where);

// The payload of a mark.
std::string EncodeVoteMark(const VoteMark& mark);
// Errors: DATA_LOSS  not a whole mark; names `where`.
absl::StatusOr<VoteMark> DecodeVoteMark(absl::string_view payload,
                                        uint64_t timeline, uint64_t step,
                                        absl::string_view where);

// "timeline 1 step 5 chunk 7 use 0 span [0, 4)".
std::string DescribeGradient(const GradientName& name);

}  // namespace ballast
