// SPDX-License-Identifier: Apache-2.0
// The gradients of one step on one server: summed as they arrive, in memory
// while there is room and in the gradient log otherwise, until the decision
// lets the update have them (docs/PROTOCOL.md, section 3).
//
// Under durability `step` complete gradients have a log of their own, the redo
// log: each is appended as it completes, and stays in memory too while there is
// room.
//
// Room is made by giving complete gradients to the log first, those that the
// update needs last before others; gradients arrive in backward order and the
// update goes forward, so what stays in memory is what is needed first. A span
// that waits for a sibling may go too, hence any push is taken in the end,
// however small the memory: an arena of one largest gradient and a scratch of
// another are enough.
//
// Runs on the engine's thread; completions of the log come back through the
// mailbox.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/exact_sum.h"
#include "offload/arena.h"
#include "ps/shard/gradient_source.h"
#include "ps/shard/mailbox.h"
#include "ps/shard/span_book.h"
#include "storage/gradient_log.h"

namespace ballast {

// Memory and log that the gradients of all steps share.
struct GradientPool {
  Arena* arena = nullptr;  // Not owned, as below.
  std::byte* scratch =
      nullptr;  // One largest gradient; one addition at a time.
  bool scratch_taken = false;
  GradientLog* log = nullptr;    // Of complete gradients.
  GradientLog* spill = nullptr;  // Of others; may be the same.
  std::shared_ptr<Mailbox> mailbox;
  // RESOURCE_EXHAUSTED: the disk is full and it will be tried again.
  std::function<void(const absl::Status&)> fail;
  uint64_t in_flight = 0;  // Reads, writes and syncs of the log.
  // Whether complete gradients go to the log though there is room.
  bool keep_all = false;
  // Whether a record of so many bytes may be appended now; empty: always.
  std::function<bool(uint64_t bytes)> may_append;
  // A chunk's gradient of `step` is complete; may be empty.
  std::function<void(uint32_t chunk, uint64_t step, uint64_t bytes)> completed;
};

// A chunk as far as its gradient goes.
struct GradientShape {
  uint32_t chunk = 0;
  uint32_t tensor = 0;
  uint32_t uses = 1;
  uint64_t elem_count = 0;
  uint64_t block_elems = 0;
};

class StepGradients {
 public:
  // `shapes` in forward order; both outlive this.
  StepGradients(GradientPool* pool, const std::vector<GradientShape>& shapes,
                uint64_t timeline, uint64_t step, uint32_t micro_batches);

  uint64_t timeline() const { return timeline_; }
  uint64_t step() const { return step_; }

  // Takes the gradients of a vote of an earlier life from the log, which holds
  // them. False: it does not have every chunk, and nothing has changed. Only
  // of a step that has taken nothing.
  bool Restore(const VoteMark& mark);

  enum class Taken {
    kTaken,
    kKnown,   // Nothing new: dropped.
    kNoRoom,  // Offer it again after something changed.
  };
  // `position` is the chunk's place in `shapes`; `offered` a node of its tree.
  Taken Offer(size_t position, const SpanKey& offered,
              std::optional<double> loss, const GradientSource& source);

  // Does what can be done of the additions that wait; true when it did some.
  bool Work();
  // Gives one gradient to the log; true when one is going or went at once.
  bool SpillOne();

  bool IsComplete() const { return complete_ == shapes_.size(); }
  // Every complete gradient is appended (not synced). Of pools that keep all.
  bool IsLogged() const { return logged_ == shapes_.size(); }
  // Where, by chunk in ascending order, once logged.
  std::vector<std::pair<uint32_t, LogPosition>> Logged() const;
  uint64_t logged_bytes() const { return logged_bytes_; }
  // An append waits until the log may take it.
  bool waits_for_log() const { return waits_for_log_; }

  // Of a vote, once complete; not of a restored step.
  const ExactSum& sum_squares() const { return sum_squares_; }
  const std::map<uint32_t, uint64_t>& non_finite() const { return non_finite_; }
  std::optional<double> Loss(size_t position) const {
    return chunks_[position].book.Loss();
  }
  // "tensor position of the first chunk that misses something", for people.
  std::optional<size_t> FirstIncomplete() const;

  // The complete gradient, if it is in memory; empty otherwise.
  absl::Span<const float> Ready(size_t position) const;
  // Reads it back. With `now` others are given to the log for it, and it stays
  // until Forget. False: no room yet.
  bool Bring(size_t position, bool now);
  // The update has used it.
  void Forget(size_t position);
  bool IsComplete(size_t position) const { return chunks_[position].complete; }
  // Copies a complete gradient, from memory at once or when the log has been
  // read. `done` runs on the engine's thread. False: it was used, or is not
  // complete.
  bool Copy(size_t position, std::byte* out,
            std::function<void(const absl::Status&)> done);

 private:
  // One node's bytes. shared: reads and writes on their way outlive its place.
  struct Piece {
    ArenaBuffer ram;
    std::optional<LogPosition> log;
    GradientName name;     // In the log.
    bool writing = false;  // ram is going to the log; only read meanwhile.
    bool reading = false;  // ram is coming from the log.
    bool adding = false;   // Part of the addition in flight.
    bool kept = false;     // For the update.
    bool in_memory() const { return static_cast<bool>(ram) && !reading; }
    bool idle() const { return !writing && !reading && !adding; }
  };
  using PiecePointer = std::shared_ptr<Piece>;
  struct ChunkGradient {
    SpanBook book;
    std::map<SpanKey, PiecePointer> pieces;
    bool complete = false;
  };
  struct Addition {
    size_t position = 0;
    SpanKey key;
  };

  absl::Span<float> Floats(size_t position, const Piece& piece) const;
  GradientLog* LogOf(const Piece& piece) const {
    return piece.name.use == kAllUses ? pool_->log : pool_->spill;
  }
  uint64_t Bytes(size_t position) const {
    return shapes_[position].elem_count * sizeof(float);
  }
  // Allocates, giving others to the log when there is no room.
  bool TakeRam(size_t position, bool make_room, ArenaBuffer* ram);
  void CountTwice(size_t position, const SpanKey& key,
                  const GradientSource& source);
  // Adds what lies in memory, upwards from `key`; queues what does not.
  void Climb(size_t position, SpanKey key);
  void Join(size_t position, const SpanBook::Merge& merge,
            const PiecePointer& sum);
  // True when the addition made progress or is over.
  bool Advance(const Addition& addition, bool* over);
  void AddFromLog(size_t position, const SpanBook::Merge& merge,
                  const PiecePointer& in_ram, const PiecePointer& in_log);
  void Completed(size_t position);
  // Appends complete gradients that are not in the log yet.
  bool LogSome();
  // Gives memory back, to the log if need be; false: the log takes nothing now.
  bool Spill(size_t position, const SpanKey& key, const PiecePointer& piece);
  // Appends; the memory stays if `stay`.
  bool Append(size_t position, const SpanKey& key, const PiecePointer& piece,
              bool stay);
  void ReadBack(const PiecePointer& piece);

  GradientPool* const pool_;
  const std::vector<GradientShape>& shapes_;
  const uint64_t timeline_;
  const uint64_t step_;
  std::vector<ChunkGradient> chunks_;
  std::deque<Addition> additions_;
  size_t complete_ = 0;
  uint32_t spilling_ = 0;
  std::deque<size_t> unlogged_;  // Complete; of pools that keep all.
  size_t logged_ = 0;
  uint32_t logging_ = 0;  // Appends in flight.
  uint64_t logged_bytes_ = 0;
  bool waits_for_log_ = false;
  ExactSum sum_squares_;
  std::map<uint32_t, uint64_t> non_finite_;  // By tensor.
  // For callbacks: expired when the step is over.
  std::shared_ptr<StepGradients*> self_;
};

}  // namespace ballast
