// SPDX-License-Identifier: Apache-2.0
// The gradient log's class, which two source files share: gradient_log.cc moves
// records, gradient_log_segments.cc makes, recovers, syncs and drops segments.
// Others include storage/gradient_log.h.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "storage/disk.h"
#include "storage/file.h"
#include "storage/gradient_log.h"
#include "storage/log_scan.h"
#include "storage/log_transfer.h"

namespace ballast {

// Thread-safe.
class GradientLogImpl final : public GradientLog {
 public:
  GradientLogImpl(const Options& options, std::string folder,
                  std::unique_ptr<IoQueue> queue);

  // What an earlier life left: without and with Options::keep.
  absl::Status TakeOver();
  absl::Status Recover();

  const LogContents& contents() const override { return contents_; }
  absl::StatusOr<LogPosition> Append(const GradientName& name,
                                     const std::byte* payload, uint64_t bytes,
                                     Done done) override;
  absl::Status AppendMark(const VoteMark& mark, Done done) override;
  void Sync(Done done) override;
  void Read(const GradientName& name, const LogPosition& position,
            std::byte* payload, Done done) override;
  void DropThrough(uint64_t step) override;
  uint64_t bytes() const override;
  GradientLogStats stats() const override {
    return {bytes_written_.load(std::memory_order_relaxed),
            bytes_read_.load(std::memory_order_relaxed),
            syncs_.load(std::memory_order_relaxed)};
  }

 private:
  using Segment = LogSegment;
  using Transfer = LogTransfer;
  using Piece = LogPiece;
  struct Waiter {
    LogPlace reach;  // What it waits for lies before this.
    Done done;
  };

  std::string SegmentPath(uint64_t serial) const;
  static bool IsSpare(const Segment& segment) {
    return segment.dropped && segment.transfers == 0;
  }
  absl::StatusOr<std::map<uint64_t, std::unique_ptr<DiskFile>>> OpenSegments();
  absl::Status MakeRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::unique_ptr<Segment>> NewSegment(uint64_t serial,
                                                      uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Fills in the place and puts the transfer in the queue.
  absl::StatusOr<LogPosition> Enqueue(std::unique_ptr<Transfer> transfer);
  std::optional<Piece> NextPiece() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Pump();
  void Start(const Piece& piece);
  void Finish(const Piece& piece, absl::Status status);
  void EndTransfer(const Transfer& transfer);
  // Begins a sync when one is wanted and what it must cover is written.
  void PumpSync();
  void FinishSync(Segment* segment, absl::Status status);
  // Waiters that are served now; all of them after a failure.
  std::vector<Waiter> TakeServed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Complete(Done done, absl::Status status);

  const Options options_;
  Disk* const disk_;
  const uint64_t segment_bytes_;
  const uint64_t slot_bytes_;
  const std::string folder_;
  LogContents contents_;

  // Held across the making of a segment: the place of every later record
  // depends on it, and it happens once in segment_bytes.
  mutable Mutex mutex_;
  std::map<uint64_t, std::unique_ptr<Segment>> segments_
      ABSL_GUARDED_BY(mutex_);  // By serial; the last takes appends.
  bool open_ ABSL_GUARDED_BY(mutex_) = false;  // Whether it does already.
  LogPlace end_ ABSL_GUARDED_BY(mutex_);       // Behind the last record.
  std::deque<std::unique_ptr<Transfer>> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<AlignedBuffer*> free_buffers_ ABSL_GUARDED_BY(mutex_);
  std::vector<AlignedBuffer> buffers_;

  // Of a log that is kept.
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::set<LogPlace> appending_ ABSL_GUARDED_BY(mutex_);  // Not yet written.
  LogPlace synced_ ABSL_GUARDED_BY(mutex_);   // All before it is durable.
  LogPlace syncing_ ABSL_GUARDED_BY(mutex_);  // What the sync covers.
  uint32_t sync_files_ ABSL_GUARDED_BY(mutex_) = 0;  // It is waiting for.
  std::vector<Waiter> waiters_ ABSL_GUARDED_BY(mutex_);

  // Plain counters: no other memory hangs on them.
  std::atomic<uint64_t> bytes_written_ = 0;
  std::atomic<uint64_t> bytes_read_ = 0;
  std::atomic<uint64_t> syncs_ = 0;

  // Last: its completions use what stands above.
  const std::unique_ptr<IoQueue> queue_;
};

}  // namespace ballast
