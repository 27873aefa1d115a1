// SPDX-License-Identifier: Apache-2.0
// The copies that this server keeps of other servers' chunks: takes what comes
// on Replicate streams, makes it durable, acknowledges it
// (ps/shard/replica_source.h is the other end).
//
// A copy is a base and the gradients behind it, both where recovery looks for
// those of our own chunks: the record in the slab and its index, the gradients
// in the log under a mark that names their owner. Nothing of a copy is computed
// or kept in memory. When the chunk becomes ours, or we come back from a death,
// the same redo that recovers our own chunks brings it to the present.
//
// Only what is synced is acknowledged, in the order of the messages. Without
// `durable` (durability `checkpoint`) written is enough: there a death of any
// server takes everyone back anyhow.
//
// A copy that nobody orders any more is let go when it is of no use: when every
// decision that could have made it ours is known. Runs on the engine's thread.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/hash.h"
#include "common/job.h"
#include "ps/shard/blocking.h"
#include "ps/shard/bulk_stream.h"
#include "ps/shard/chunk_store.h"
#include "ps/shard/mailbox.h"
#include "ps/shard/redo_book.h"
#include "ps/shard/shard_view.h"
#include "storage/gradient_log.h"
#include "storage/slab_store.h"

namespace ballast {

class ReplicaTarget final : public BulkStreamHandler {
 public:
  // Of a load; all outlive the next Reset and what is in flight then.
  struct Parts {
    Hash128 run;
    OptimizerKind optimizer = OptimizerKind::kAdamW;
    bool durable = true;
    SlabStore* slab = nullptr;
    GradientLog* log = nullptr;
    ChunkStore* chunks = nullptr;  // Lends memory to check a record in.
    RedoBook* book = nullptr;      // Told of every base and gradient.
    BlockingTasks* tasks = nullptr;
    std::shared_ptr<Mailbox> mailbox;
    // Whether the log may take a record of so many bytes now.
    std::function<bool(uint64_t bytes)> may_append;
    // RESOURCE_EXHAUSTED: the disk is full and it will be tried again.
    std::function<void(const absl::Status&)> fail;
  };
  // Who sends a chunk.
  struct Source {
    std::string name;
    uint64_t incarnation = 0;
    friend bool operator==(const Source&, const Source&) = default;
  };

  explicit ReplicaTarget(const ShardView* view) : view_(view) {}

  void Start(Parts parts);
  // Ends all streams and forgets all copies. What is durable of them stays in
  // index and book until ForgetUnowned.
  void Reset(const absl::Status& why);
  // I/O on its way that uses our memory.
  uint64_t in_flight() const { return *in_flight_; }

  // From a directive: whose copies are wanted. Others are not taken any more.
  void Order(const std::map<uint32_t, Source>& sources);

  void OnOpen(uint64_t id, std::shared_ptr<BulkStream> stream) override;
  void OnMessage(uint64_t id, absl::StatusOr<BulkMessage> message) override;
  void OnHalfClose(uint64_t id) override;
  void OnWritten(uint64_t id) override;
  void OnGone(uint64_t id) override;

  // Takes, syncs and acknowledges what can be. `version` is what our own
  // chunks are at, `history` the first decision that we still have (version + 1
  // if none): an older base would be of no use.
  void Pump(uint64_t version, uint64_t history, absl::Time now);

  // The copy is complete through `step`.
  bool IsSynced(uint32_t chunk, uint64_t step) const;
  // It is ours now: gives away the base's extent, whose record the book names.
  SharedExtent Release(uint32_t chunk);
  // Lets go of copies that are not synced through a step beyond `version`, so
  // that their bases do not hold up the log; they begin again.
  void GiveUpStale(uint64_t version);
  // Lowest version of a record that is or may become a base; UINT64_MAX: there
  // is none. Redo needs the decisions behind it.
  uint64_t LowestBase() const;
  // Of the mark of a source's vote; empty when it is not synced.
  std::string VoteOf(const std::string& source, uint64_t step) const;
  const std::map<uint32_t, Source>& ordered() const { return ordered_; }

  size_t copies() const { return copies_.size(); }
  uint64_t taken_bytes() const { return taken_bytes_; }

 private:
  struct Copy {
    Source source;
    bool has_base = false;  // Durable, as is `through`.
    uint64_t base = 0;      // The version that the record stands for.
    CheckpointEntry entry;  // Of the base.
    SharedExtent extent;    // Of the base.
    uint64_t received = 0;  // The next gradient is of the step behind it.
    uint64_t through = 0;
    std::map<uint64_t, LogPosition> gradients;  // Synced.
  };
  // A record that is arriving.
  struct Assembly {
    uint32_t chunk = 0;
    uint64_t base = 0;
    CheckpointEntry entry;
    SharedExtent extent;
    uint64_t next = 0;     // Offset of the next piece.
    uint32_t writing = 0;  // Pieces.
    uint64_t last_sequence = 0;
    bool failed = false;
    std::shared_ptr<Image> image;  // While it is checked.
  };
  struct Ack {
    uint64_t sequence = 0;
    uint64_t bytes = 0;
    bool done = false;
  };
  struct Stream {
    uint64_t id = 0;
    std::shared_ptr<BulkStream> link;
    std::deque<BulkMessage> messages;
    std::deque<grpc::ByteBuffer> replies;
    std::deque<Ack> acks;
    uint64_t last = 0;  // Sequence of the newest message.
    std::deque<std::shared_ptr<Assembly>> assemblies;  // Oldest first.
    std::optional<absl::Time> early_since;
    uint64_t held = 0;       // Payload bytes of what is not acknowledged.
    uint32_t appending = 0;  // Gradients on their way to the log.
    bool greeted = false;
    bool writing = false;
    bool half_closed = false;
    bool finished = false;
  };
  // What waits for a sync.
  struct Unsynced {
    uint64_t stream = 0;
    uint64_t sequence = 0;
    std::string source;
    uint64_t step = 0;
    std::optional<uint32_t> chunk;  // None: a mark.
    LogPosition position;
    std::string vote;
  };
  enum class Verdict { kTake, kEarly, kRefuse };

  void Greet(Stream* stream);
  void PumpStream(Stream* stream, absl::Time now);
  // False: not now.
  bool Process(Stream* stream, absl::Time now);
  Verdict Judge(const BulkHeader& header, absl::Status* why) const;
  absl::Status CheckPiece(const Stream& stream, const BulkHeader& header) const;
  absl::Status CheckGradient(const BulkItem& item, uint64_t step) const;
  bool TakePiece(Stream* stream);
  bool BeginAssembly(Stream* stream, const BulkHeader& header);
  void WritePiece(Stream* stream, const std::shared_ptr<Assembly>& assembly);
  void CheckAssemblies(Stream* stream);
  void OnChecked(uint64_t stream, const std::shared_ptr<Assembly>& assembly,
                 const absl::Status& status);
  void CommitBases();
  void OnCommit(const absl::Status& status);
  void OnCommitted(uint64_t stream, const std::shared_ptr<Assembly>& assembly);
  bool TakeGradient(Stream* stream);
  bool TakeMark(Stream* stream);
  void Sync();
  void OnSynced(const std::vector<Unsynced>& batch,
                const std::vector<VoteMark>& marks);
  std::vector<VoteMark> MarksOf(const std::vector<Unsynced>& batch) const;
  void Advance(Copy* copy);
  void Refuse(Stream* stream, uint64_t sequence, const absl::Status& why);
  void Settle(uint64_t stream, uint64_t sequence);
  void LetGo(uint32_t chunk);
  void DropBases();
  // Runs `then` on the engine's thread, unless a Reset came between.
  std::function<void(absl::Status)> Later(
      std::function<void(const absl::Status&)> then);

  const ShardView* const view_;
  std::optional<Parts> parts_;
  // shared: completions outlive a Reset. Counts what is on its way.
  std::shared_ptr<uint64_t> in_flight_ = std::make_shared<uint64_t>(0);
  uint64_t round_ = 0;  // Grows with every Reset.
  uint64_t version_ = 0;
  uint64_t history_ = 1;
  std::map<uint32_t, Source> ordered_;
  std::map<uint64_t, Stream> streams_;
  std::map<uint32_t, Copy> copies_;
  // Checked, and waiting for the index; and those that it is given now.
  std::vector<std::pair<uint64_t, std::shared_ptr<Assembly>>> to_commit_;
  std::vector<std::pair<uint64_t, std::shared_ptr<Assembly>>> committing_;
  std::vector<uint32_t> to_drop_;  // Chunks whose bases the index may forget.
  std::vector<Unsynced> unsynced_;
  bool syncing_ = false;
  uint64_t taken_bytes_ = 0;
};

}  // namespace ballast
