// SPDX-License-Identifier: Apache-2.0
// The gradient log: where reduced gradients (and spans that wait for a sibling)
// go when RAM does not hold them until the decision, and, under durability
// `step`, the redo log. Sequential segments, each record self-describing
// (docs/PROTOCOL.md, section 5, log tail). Format: docs/FORMATS.md.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/hash.h"
#include "common/span.h"

namespace ballast {

// The name of a gradient (docs/PROTOCOL.md, section 2).
struct GradientName {
  uint64_t timeline = 0;
  uint64_t step = 0;
  uint32_t chunk = 0;
  uint32_t use = 0;  // kAllUses for a chunk's complete gradient.
  Span span;
  friend bool operator==(const GradientName&, const GradientName&) = default;
  friend auto operator<=>(const GradientName&, const GradientName&) = default;
};
inline constexpr uint32_t kAllUses = 0xffffffffu;

// Where a record's payload lies.
struct LogPosition {
  uint64_t segment = 0;  // Serial number, never used twice.
  uint64_t offset = 0;   // Of the record, 4 KiB aligned.
  uint64_t bytes = 0;    // Of the payload.
};

struct GradientLogStats {
  uint64_t bytes_written = 0;
  uint64_t bytes_read = 0;
};

// Thread-safe. Completions run on the log's I/O thread and must not block.
class GradientLog {
 public:
  using Done = std::function<void(absl::Status)>;

  struct Options {
    std::string dir;  // The server's data directory.
    Hash128 run;
    uint64_t timeline = 0;
    uint64_t segment_bytes = 64 << 20;
    uint32_t queue_depth = 8;
    // Aligned bounce buffers, all together; at least 64 KiB. When they are in
    // use, transfers wait in order. A payload on a 4 KiB boundary goes past
    // them.
    uint64_t buffer_bytes = 8 << 20;
    bool use_io_uring = true;
  };

  // Starts a log after whatever the directory holds: under durability
  // `checkpoint` older segments are spill of an earlier life. They are removed,
  // but for the newest, whose file and number the next one takes over.
  // Errors: INVALID_ARGUMENT  an option is out of its range.
  static absl::StatusOr<std::unique_ptr<GradientLog>> Open(
      const Options& options);
  virtual ~GradientLog() = default;

  // Appends a record. `payload` stays valid until `done`. The position may be
  // read after done(OK).
  // Errors: RESOURCE_EXHAUSTED  the disk is full.
  virtual absl::StatusOr<LogPosition> Append(const GradientName& name,
                                             const std::byte* payload,
                                             uint64_t bytes, Done done) = 0;
  // Reads a payload back and checks its name and checksum. Errors given to
  // done: DATA_LOSS  another record, damage, or a segment that is gone; names
  //                  segment, offset and gradient.
  virtual void Read(const GradientName& name, const LogPosition& position,
                    std::byte* payload, Done done) = 0;
  // Records of steps up to `step` are not needed any more: segments that hold
  // nothing newer are recycled.
  virtual void DropThrough(uint64_t step) = 0;

  virtual GradientLogStats stats() const = 0;
};

}  // namespace ballast
