// SPDX-License-Identifier: Apache-2.0
// The gradient log: where reduced gradients (and spans that wait for a sibling)
// go when RAM does not hold them until the decision, and, under durability
// `step`, the redo log. Sequential segments, each record self-describing
// (docs/PROTOCOL.md, section 5, log tail). Format: docs/FORMATS.md.
//
// A vote for step t is durable when every complete gradient of t is appended,
// its mark is appended, and one Sync that began after both has ended OK.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/hash.h"
#include "common/span.h"
#include "storage/disk.h"

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
  uint64_t segment = 0;  // Serial number; no two records ever share a place.
  uint64_t offset = 0;   // Of the record, 4 KiB aligned.
  uint64_t bytes = 0;    // Of the payload.
  friend bool operator==(const LogPosition&, const LogPosition&) = default;
  friend auto operator<=>(const LogPosition&, const LogPosition&) = default;
};

// A vote that was or may have been given. The gradients alone cannot rebuild
// it, so the mark holds it whole.
struct VoteMark {
  uint64_t timeline = 0;
  uint64_t step = 0;
  std::string owner;  // Slot whose vote it is: a replica keeps its source's.
  std::string vote;   // Serialized; opaque to the log.
  // (chunk, place) of every gradient that the vote vouches for.
  std::vector<std::pair<uint32_t, LogPosition>> gradients;
};

struct GradientLogStats {
  uint64_t bytes_written = 0;
  uint64_t bytes_read = 0;
  uint64_t syncs = 0;
};

// What an earlier life left in the log, all of it durable now.
struct LogContents {
  // In the order of the log. Every gradient that one names is there too, unless
  // its segment was dropped.
  std::vector<VoteMark> marks;
  struct Key {
    uint64_t timeline = 0;
    uint64_t step = 0;
    uint32_t chunk = 0;
    friend bool operator==(const Key&, const Key&) = default;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Gradient {
    GradientName name;  // use == kAllUses.
    LogPosition position;
  };
  // Complete gradients; of one that was appended twice the later record.
  std::map<Key, Gradient> gradients;
  // Bytes behind the last whole record that looked like records: what the last
  // life had appended and never synced.
  uint64_t tail_bytes = 0;
};

// Thread-safe. Completions run on the log's I/O thread and must not block.
class GradientLog {
 public:
  using Done = std::function<void(absl::Status)>;

  struct Options {
    Disk* disk = PosixDisk();  // Not owned.
    std::string dir;           // The server's data directory.
    Hash128 run;
    uint64_t timeline = 0;
    // Whether the log outlives the process (durability `step`, `replica`).
    // Otherwise what an earlier life left is spill that nobody needs.
    bool keep = false;
    uint64_t segment_bytes = 64 << 20;
    uint32_t queue_depth = 8;
    // Aligned bounce buffers, all together; at least 64 KiB. When they are in
    // use, transfers wait in order. A payload on a 4 KiB boundary goes past
    // them.
    uint64_t buffer_bytes = 8 << 20;
    bool use_io_uring = true;
  };

  // Without `keep`: older segments are removed, but for the newest, whose file
  // and number the next one takes over. With it: everything is synced, then
  // scanned; contents() says what is there. Appends always begin a new segment.
  // Errors: INVALID_ARGUMENT  an option is out of its range.
  //         DATA_LOSS         a record below the highest position known to be
  //                           synced is bad (segment, offset), or the sync
  //                           failed. A bad record above it is the tail of
  //                           what nobody was promised.
  static absl::StatusOr<std::unique_ptr<GradientLog>> Open(
      const Options& options);
  virtual ~GradientLog() = default;

  // What Open found; empty without `keep`. Does not change.
  virtual const LogContents& contents() const = 0;

  // Appends a record. `payload` stays valid until `done`. The position may be
  // read after done(OK). With `keep` a failed write is a hole in what a sync
  // would cover: every later Append and Sync fails with it too.
  // Errors: RESOURCE_EXHAUSTED  the disk is full; try again later.
  virtual absl::StatusOr<LogPosition> Append(const GradientName& name,
                                             const std::byte* payload,
                                             uint64_t bytes, Done done) = 0;
  // Appends a mark; copied. The append has an outcome of its own in `done`; a
  // Sync called after this covers it.
  virtual absl::Status AppendMark(const VoteMark& mark, Done done) = 0;
  // done(OK): every record appended before this call is durable. One sync
  // serves all calls that wait for it. Wants `keep`.
  // Errors given to done: DATA_LOSS  a write or fdatasync failed, now or
  //                       earlier: nothing is voted from this log again.
  virtual void Sync(Done done) = 0;
  // Reads a payload back and checks its name and checksum. Errors given to
  // done: DATA_LOSS  another record, damage, or a segment that is gone; names
  //                  segment, offset and gradient.
  virtual void Read(const GradientName& name, const LogPosition& position,
                    std::byte* payload, Done done) = 0;
  // Records of steps up to `step`, marks too, are not needed any more: the
  // oldest segments that hold nothing newer are recycled. With `keep`, call it
  // when the bases that replace them are durable.
  virtual void DropThrough(uint64_t step) = 0;

  // Bytes of records that are kept: what a recovery has to walk. A segment is
  // dropped as a whole, so this falls in lumps.
  virtual uint64_t bytes() const = 0;
  virtual GradientLogStats stats() const = 0;
};

// What a record of so many payload bytes takes of the log.
uint64_t LogRecordBytes(uint64_t payload_bytes);

}  // namespace ballast
