// SPDX-License-Identifier: Apache-2.0
// What the owner of chunks sends to one server that keeps copies of them, and
// what that server has synced: pure decisions, one object for each target.
//
// A chunk's copy begins with its record at some version k (its base), followed
// by the complete gradients of k+1, k+2, ... in order. It is in sync through
// step t when the target has acknowledged the base and every gradient to t, and
// only then may the chunk move with the decision of t. Whatever cannot go on (a
// gradient that is gone, a target that has lost its place) begins again with a
// newer base; a break of the stream goes on from what the target says it has.
//
// Not thread-safe; no clock, no I/O.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace ballast {

class ReplicaSource {
 public:
  // `piece_bytes`: how much of a record goes into one message.
  explicit ReplicaSource(uint64_t piece_bytes) : piece_bytes_(piece_bytes) {}

  // The chunks whose copies are wanted now; of others nothing more is sent or
  // remembered.
  void Order(const std::set<uint32_t>& chunks);
  // These are not ours any more.
  void Forget(const std::vector<uint32_t>& chunks);
  bool IsOrdered(uint32_t chunk) const { return chunks_.contains(chunk); }

  // The stream broke: what was on its way counts as never sent.
  void OnReset();
  // First on a stream: the credit, and through which step the target's copies
  // are synced. Those that gradients at hand can continue are continued.
  void OnHello(uint64_t credit_bytes,
               const std::map<uint32_t, uint64_t>& synced_through);
  // Every message up to `sequence` is synced at the target.
  void OnAck(uint64_t sequence, uint64_t credit_bytes);
  // The target could not use the message: its chunk begins again.
  void OnRefused(uint64_t sequence);

  // The message was not sent after all, because its gradient is gone: its chunk
  // begins again.
  void Withdraw(uint64_t sequence);

  // Gradients of `step` of this chunk can be read from now on ..
  void OnGradient(uint32_t chunk, uint64_t step, uint64_t bytes);
  // .. and none of steps up to `step` any more.
  void OnDropped(uint64_t step);
  // Every gradient of steps up to `step` that there is has been told: a copy
  // that waits for another one of them begins again.
  void OnComplete(uint64_t step);
  // The vote of `step` is whole: its mark goes behind the gradients.
  void OnVote(uint64_t step, uint64_t bytes);

  enum class Kind { kNothing, kOpenBase, kPiece, kGradient, kMark };
  struct Send {
    Kind kind = Kind::kNothing;
    uint64_t sequence = 0;  // Of the message; 0 of kOpenBase.
    uint32_t chunk = 0;
    uint64_t step = 0;    // Of a gradient or mark; of a piece: the base's.
    uint64_t offset = 0;  // Of a piece.
    uint64_t bytes = 0;   // Of the payload.
  };
  // What to do next; it counts as done, the credit as taken. kOpenBase: get
  // hold of the chunk's newest record and call OnBase.
  Send Next();
  // The record to send for the chunk of kOpenBase: `version` of the chunk,
  // `bytes` of the record.
  void OnBase(uint32_t chunk, uint64_t version, uint64_t bytes);
  // It is gone (the chunk is no longer ours); another may be opened.
  void OnNoBase(uint32_t chunk);

  // Chunks whose copies are synced through `step`, ascending.
  std::vector<uint32_t> InSync(uint64_t step) const;
  // Every ordered chunk is, and there is one.
  bool AllInSync(uint64_t step) const;
  // Some copy has its base and lacks gradients up to `step` only: it will soon
  // be in sync if the target is well.
  bool IsClose(uint64_t step) const;
  bool MarkSynced(uint64_t step) const { return mark_synced_ >= step; }
  // Bytes on their way.
  uint64_t unacknowledged_bytes() const;

 private:
  enum class Phase {
    kWanted,  // Needs a base.
    kOpening,
    kBase,       // Pieces are being sent.
    kFollowing,  // Only gradients are left.
  };
  struct Copy {
    Phase phase = Phase::kWanted;
    uint64_t epoch = 0;  // Messages of earlier ones do not count.
    uint64_t base = 0;   // Version.
    uint64_t base_bytes = 0;
    uint64_t offset = 0;  // Sent of the base.
    uint64_t next = 0;    // Step of the next gradient.
    bool base_synced = false;
    uint64_t synced = 0;                     // Through this step, then.
    std::map<uint64_t, uint64_t> gradients;  // At hand: step to bytes.
  };
  struct InFlight {
    uint64_t sequence = 0;
    Kind kind = Kind::kNothing;
    uint32_t chunk = 0;
    uint64_t epoch = 0;
    uint64_t step = 0;
    uint64_t bytes = 0;
    bool last_piece = false;
  };

  void Restart(Copy* copy);
  // A base, sent or being sent, and the step that it goes on with.
  static bool Awaits(const Copy& copy, uint64_t step) {
    return (copy.phase == Phase::kBase || copy.phase == Phase::kFollowing) &&
           copy.next <= step;
  }
  // Sends what may go, if the credit allows it.
  bool Take(uint64_t bytes);
  Send Record(Kind kind, uint32_t chunk, uint64_t step, uint64_t bytes,
              bool last_piece);
  std::optional<Send> NextGradient();
  std::optional<Send> NextMark();
  std::optional<Send> NextPiece();

  const uint64_t piece_bytes_;
  std::map<uint32_t, Copy> chunks_;
  bool open_ = false;  // There is a stream, and its hello came.
  uint64_t credit_ = 0;
  uint64_t sequence_ = 0;  // Of the last message.
  uint64_t epochs_ = 0;
  std::deque<InFlight> in_flight_;
  uint64_t dropped_ = 0;    // Gradients of steps up to it are gone.
  uint64_t mark_step_ = 0;  // Wanted; 0: none yet.
  uint64_t mark_bytes_ = 0;
  uint64_t mark_sent_ = 0;
  uint64_t mark_synced_ = 0;
};

}  // namespace ballast
