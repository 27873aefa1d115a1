// SPDX-License-Identifier: Apache-2.0
// What a gradient log holds after a crash: which records are whole, where the
// tail of what nobody was promised begins, and what is damage
// (docs/PROTOCOL.md, section 5, log tail). Reads only.
//
// Every record says where the segment before its own one ends, so the newest
// segment with a record leads back to the oldest, past whatever an earlier life
// has left behind its end. Where a segment on that way has no record left, what
// follows it is a tail, and the search begins again in front of it. Along the
// chain records must follow without a gap. The highest position that any of
// them calls synced divides: a bad record below it is damage, one above it the
// end.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/hash.h"
#include "storage/disk.h"
#include "storage/gradient_log.h"

namespace ballast {

// A place in the log; ordered.
struct LogPlace {
  uint64_t segment = 0;
  uint64_t offset = 0;
  friend bool operator==(const LogPlace&, const LogPlace&) = default;
  friend auto operator<=>(const LogPlace&, const LogPlace&) = default;
};

struct LogScan {
  struct Segment {
    uint64_t used_bytes = 0;
    uint64_t step_end = 0;  // Above the steps of its records.
  };
  LogContents contents;
  std::map<uint64_t, Segment> segments;  // Those that are kept, by serial.
  LogPlace end;                          // Behind the last whole record.
};

// `files` by serial; all of them synced, if what is found is to be believed.
// Errors: DATA_LOSS  as GradientLog::Open; whatever reading says.
absl::StatusOr<LogScan> ScanLog(
    const Hash128& run,
    const std::map<uint64_t, std::unique_ptr<DiskFile>>& files);

}  // namespace ballast
