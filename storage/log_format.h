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

struct LogHeader {
  Hash128 run;
  GradientName name;
  uint64_t segment = 0;  // Where the record lies, so that recycled bytes and
  uint64_t offset = 0;   // misplaced writes never pass for it.
  // Everything before this place was known to be synced when the record was
  // written; 0, 0 when nothing was.
  uint64_t synced_segment = 0;
  uint64_t synced_offset = 0;
  uint64_t payload_bytes = 0;
  Hash128 payload_hash;
  friend bool operator==(const LogHeader&, const LogHeader&) = default;
};

// Pages that a record of so many payload bytes takes, in bytes.
uint64_t LogRecordBytes(uint64_t payload_bytes);

// Exactly one page.
std::string EncodeLogHeader(const LogHeader& header);

// Errors: DATA_LOSS  no header, or damaged; names `where`.
absl::StatusOr<LogHeader> DecodeLogHeader(absl::string_view page,
                                          absl::string_view where);

// "timeline 1 step 5 chunk 7 use 0 span [0, 4)".
std::string DescribeGradient(const GradientName& name);

}  // namespace ballast
