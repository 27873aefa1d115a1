// SPDX-License-Identifier: Apache-2.0
// Keeps copies of our chunks at one other server: opens the stream, sends what
// ReplicaSource decides, reads it from the disk, hears what is synced. A break
// is mended by dialling again, a little later each time.
//
// Holds the memory of one message at a time. Runs on the engine's thread.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ps/shard/bulk_stream.h"
#include "ps/shard/chunk_store.h"
#include "ps/shard/mailbox.h"
#include "ps/shard/replica_dialer.h"
#include "ps/shard/replica_source.h"
#include "ps/shard/shard_view.h"
#include "storage/file.h"
#include "storage/slab_store.h"

namespace ballast {

class ReplicaLink final : public BulkStreamHandler {
 public:
  // A chunk's record on disk.
  struct Base {
    uint64_t version = 0;  // Of the chunk.
    uint64_t record_version = 0;
    uint64_t record_timeline = 0;
    SharedExtent extent;
  };
  struct Options {
    std::string server;  // "server-2".
    std::string address;
    uint64_t incarnation = 0;  // Of the target: another life, another link.
    bool standing = false;     // Votes wait for it.
    const ShardView* view = nullptr;
    ReplicaDialer* dialer = nullptr;  // Not owned, as are all.
    SlabStore* slab = nullptr;
    std::shared_ptr<Mailbox> mailbox;
    // The newest record; nullopt: it is not on disk yet, ask again.
    std::function<std::optional<Base>(uint32_t chunk)> base;
    // Fills `out` with a complete gradient, then calls `done` on our thread,
    // now or later. False: it is gone.
    std::function<bool(uint32_t chunk, uint64_t step, std::byte* out,
                       std::function<void(const absl::Status&)> done)>
        gradient;
    // Steps behind `step` whose gradients are at hand, without a gap.
    std::function<std::vector<uint64_t>(uint32_t chunk, uint64_t step)> behind;
    std::function<void(const absl::Status&)> fail;
  };
  explicit ReplicaLink(const Options& options);

  const Options& options() const { return options_; }
  // What is told and asked of the decisions directly.
  ReplicaSource* source() { return &source_; }
  const ReplicaSource& source() const { return source_; }
  // The vote whose mark goes behind its gradients; the first of a step counts.
  void OnVote(uint64_t step, const std::string& vote);
  // A step begins: its vote waits for a standing target when everything before
  // it is in sync there.
  void OnStep(uint64_t step) {
    is_binding_ = options_.standing && source_.AllInSync(step - 1);
  }
  bool is_binding() const { return is_binding_; }

  void OnOpen(uint64_t id, std::shared_ptr<BulkStream> stream) override;
  void OnMessage(uint64_t id, absl::StatusOr<BulkMessage> message) override;
  void OnHalfClose(uint64_t id) override;
  void OnWritten(uint64_t id) override;
  void OnGone(uint64_t id) override;

  // Dials, reads and sends what can be; `id` of a stream that it may open.
  // True when it used it.
  bool Pump(uint64_t id, absl::Time now);
  // Breaks the stream off; nothing is called or used any more but for OnGone.
  void Close();
  // Closed, with nothing on its way that uses us.
  bool IsIdle() const { return !dialled_ && reading_ == 0; }

  // Whether it makes sense to let a vote of `step` wait for copies that are
  // nearly in sync. After it was in vain once, not again until they are.
  bool IsWorthWaiting(uint64_t step) const {
    return !late_ && open_ && source_.IsClose(step);
  }
  void WaitedInVain() { late_ = true; }
  // "server-2 to sync copies of 3 chunks" for people, while something is due.
  std::string WaitsFor() const;

 private:
  void OnTextOrAck(const BulkMessage& message);
  void Open(uint32_t chunk);
  void Send(const ReplicaSource::Send& send);
  void SendPiece(const ReplicaSource::Send& send);
  void SendGradient(const ReplicaSource::Send& send);
  void Write(const BulkHeader& header, std::shared_ptr<AlignedBuffer> payload);
  BulkHeader Header(BulkKind kind, const ReplicaSource::Send& send) const;
  void Break(const absl::Status& why);

  const Options options_;
  ReplicaSource source_;
  std::shared_ptr<BulkStream> stream_;
  uint64_t stream_id_ = 0;
  bool dialled_ = false;  // Until OnGone.
  bool open_ = false;     // The hello has come.
  bool closed_ = false;   // For good.
  bool broken_ = false;   // This stream, by us.
  bool writing_ = false;
  uint32_t reading_ = 0;  // Transfers that use our memory.
  uint64_t round_ = 0;    // Grows with every stream.
  bool late_ = false;
  std::optional<uint32_t> opening_;  // The chunk whose base is wanted.
  std::optional<Base> base_;         // What pieces come from.
  std::string vote_;
  uint64_t vote_step_ = 0;
  bool is_binding_ = false;
  absl::Duration backoff_;
  absl::Time dial_at_ = absl::InfinitePast();
  absl::Time heard_at_;  // The last sign of life, while something is due.
  absl::Time now_;
};

}  // namespace ballast
