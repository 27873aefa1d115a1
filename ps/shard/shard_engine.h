// SPDX-License-Identifier: Apache-2.0
// A shard server's state and what it does: directives, streams and the disk's
// completions come in through the mailbox, votes, confirmations and replies go
// out. No lock, and nothing that happens in the middle of something else.
//
//   directive LOAD --> loaded --> gradients of step t --> vote
//                        ^                                 |
//                        +-- confirm <-- update <-- decision
//
// Everything is safe to be told twice: a directive repeats what is not yet
// confirmed, a report what was asked for again.
//
// Under durability `step` a vote waits until the log has synced what redoes the
// step, and a life begins with what the one before it left: the bases of its
// chunks, brought forward by the decisions that the coordinator sends and the
// gradients in the log (docs/PROTOCOL.md, section 5).
//
// It has no thread, clock or socket of its own: whoever calls Step() is its
// thread. A server calls it in a loop (ps/shard/shard_server.cc), the simulator
// whenever something may have changed.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/hash.h"
#include "common/job.h"
#include "common/mutex.h"
#include "proto/ballast.pb.h"
#include "ps/shard/base_pass.h"
#include "ps/shard/blocking.h"
#include "ps/shard/checkpoint_writer.h"
#include "ps/shard/chunk_store.h"
#include "ps/shard/fetch_server.h"
#include "ps/shard/gradient_store.h"
#include "ps/shard/load_pass.h"
#include "ps/shard/mailbox.h"
#include "ps/shard/push_server.h"
#include "ps/shard/redo_book.h"
#include "ps/shard/redo_pass.h"
#include "ps/shard/replica_dialer.h"
#include "ps/shard/replica_link.h"
#include "ps/shard/replica_target.h"
#include "ps/shard/shard_session.h"
#include "ps/shard/shard_view.h"
#include "ps/shard/update_pass.h"
#include "storage/disk.h"
#include "storage/gradient_log.h"
#include "storage/slab_store.h"

namespace ballast {

// A life of a server: Open, then a join that FillJoin has completed, Start, and
// Step until over(). May be dropped at any moment, as if it were killed.
class ShardEngine {
 public:
  struct Options {
    Job job;
    std::string name;      // "server-0", as in the placement.
    std::string data_dir;  // Absolute.
    Disk* disk = nullptr;  // Not owned; PosixDisk() in a server.
    // Monotonic time.
    std::function<absl::Time()> clock;
    // Runs what blocks: commits and syncs of the index. The engine may run it
    // inline where nothing blocks.
    BlockingExecutor blocking;
    // Not owned; nullptr: copies are never sent to other servers.
    ReplicaDialer* dialer = nullptr;
  };
  ShardEngine(const Options& options, std::shared_ptr<Mailbox> mailbox);
  ~ShardEngine();

  // Handlers of the service's streams, for MakeShardService; called by tasks
  // of the mailbox.
  BulkStreamHandler* fetch() { return &fetch_; }
  BulkStreamHandler* push() { return &push_; }
  BulkStreamHandler* replicate() { return &replica_target_; }

  // Opens the data directory, if there is one, and finds out what it holds.
  // Blocks on the disk. Errors: as of SlabStore::Open and GradientLog::Open;
  // RESOURCE_EXHAUSTED  the disk is full: open again when there is space.
  absl::Status Open();
  // What a join says of it: run and holdings.
  void FillJoin(v1::JoinRequest* join) const;
  // Admitted. `session` outlives the engine's last Step.
  // Errors: FAILED_PRECONDITION  the data directory is of another run; and as
  //         Open, for a folder that was empty.
  absl::Status Start(ShardSession* session);

  // Runs the tasks of the mailbox and does what can be done without waiting.
  // True: there is more to do at once. False: nothing until the mailbox has a
  // task, or some 50 ms have passed (patience runs out with time).
  bool Step();
  // It has left, or cannot go on.
  bool over() const { return leave_ || !failure_.ok(); }
  // OK when the coordinator told it to leave.
  const absl::Status& failure() const { return failure_; }
  // What is left to report when it is over; nullopt: nobody listens.
  std::optional<v1::ReportRequest> LastReport() const;

  // Thread-safe: callbacks of the session.
  void Deliver(const v1::PollReply& reply);
  void SessionOver(const absl::Status& why);
  // Asks the coordinator to let it go; it leaves when told to, or after
  // cluster.drain_timeout. Once it has started.
  void Drain(const std::string& reason);
  v1::MemberStats stats() const;

 private:
  // A load in progress, phase by phase.
  enum class LoadPhase {
    kNone,
    kSettling,   // Waits until nothing of the old timeline is in flight.
    kPlacement,  // Waits for the coordinator's answer.
    kChunks,     // From initial values or a manifest.
    kRedo,       // From bases and the log.
    kBases,      // Waits until what is new here is durable.
  };
  enum class VotePhase {
    kGathering,
    kSyncing,  // Its mark and its gradients.
    kReady,    // May be told.
    kTold,
  };

  bool durable() const {
    return options_.job.server.durability != Durability::kCheckpoint;
  }
  absl::Status OpenStore(const Hash128& run);
  // Of run_. A full disk is waited for.
  absl::Status OpenStoreUnlessFull();
  absl::Status OpenLog();
  absl::Status OpenSpill(uint64_t buffer_bytes);
  absl::Status PlanLog();
  bool MayAppend(uint64_t bytes) const;
  void MakeBases();
  void DropLog();
  uint64_t LowestBase() const;
  bool Turn();
  bool Train();
  void Obey();
  void ObeyLoad();
  // Lets go of a timeline: nothing of it is done any more, streams end.
  void Forget();
  bool IsSettled() const;
  absl::Status Load(bool* worked);
  absl::Status BeginLoad();
  absl::Status DivideChunks(LoadPass::Options* load, std::vector<size_t>* own);
  void ShowLoad();
  void FinishLoad();
  void ReportLoaded();
  void AskPlacement();
  absl::Status TakeMemory(const v1::Placement& placement);
  absl::Status MakePlan(const std::vector<uint32_t>& owned, uint32_t servers);
  void MakeParts();
  void StartCollecting();
  // The gradients and the vote of an earlier life, if it had voted.
  std::unique_ptr<StepGradients> RestoreStep(uint64_t step, v1::Vote* vote);
  void StartUpdate();
  void FinishUpdate();
  void FinishStep();
  // Chunks that move between servers (shard_engine_moves.cc).
  void ObeyOrders();
  void PumpCopies();
  void CloseLinks();
  bool AreLinksIdle() const;
  void TellGradient(uint32_t chunk, uint64_t step, uint64_t bytes);
  // Tells all links of every gradient that is complete now.
  void TellGradients();
  std::optional<ReplicaLink::Base> BaseOf(uint32_t chunk);
  bool ReadGradient(uint32_t chunk, uint64_t step, std::byte* out,
                    std::function<void(const absl::Status&)> done);
  std::unique_ptr<ReplicaLink> MakeLink(const v1::ReplicaOrder& order);
  void Remember(const v1::Decision& decision);
  uint64_t HistoryBegin() const;
  bool HoldsVote();
  void AddInSync(v1::Vote* vote) const;
  // Whether chunks come or go with the decision.
  bool BeginMoves(const v1::Decision& decision);
  // What it moves to and from us is moved; false: not yet.
  bool FinishMoves();
  absl::Status TakeIn();
  void GiveAway();
  void DropBases(std::vector<uint32_t> chunks);
  void DropForeignBases();
  void SetShapes();
  v1::Vote MakeVote() const;
  void MaybeVote(bool again);
  void SyncVote();
  void OnVoteSynced(uint64_t round, const VoteMark& mark,
                    const absl::Status& status);
  void MeetOwed();
  void MaybeDigest();
  bool FillDigests(ChunkState* chunk);
  void Confirm(uint64_t step);
  void Report(v1::ReportRequest request);
  void Fail(const absl::Status& status);
  // For what is tried again: a full disk is shown and waited for.
  void FailUnlessFull(const absl::Status& status);
  void PublishStats();
  void PublishWhenDue();
  std::string Phase() const;

  const Options options_;
  const std::shared_ptr<Mailbox> mailbox_;
  ShardSession* session_ = nullptr;
  std::optional<Hash128> run_;  // Of the data directory, once there is one.
  absl::Time now_;
  absl::Status failure_;
  std::string disk_full_;
  absl::Time disk_full_at_ = absl::InfinitePast();
  absl::Time open_again_at_ = absl::InfinitePast();
  bool session_over_ = false;
  bool leave_ = false;
  std::optional<absl::Time> draining_since_;

  std::optional<v1::ServerDirective> directive_;
  bool directive_is_new_ = false;
  std::optional<uint64_t> loaded_;  // The timeline. Once a life.
  LoadPhase load_phase_ = LoadPhase::kNone;
  v1::ServerDirective load_directive_;
  uint64_t placement_asked_ = 0;  // Answers to earlier questions are ignored.
  std::optional<absl::StatusOr<v1::Placement>> placement_answer_;
  std::unique_ptr<LoadPass> load_;
  std::unique_ptr<RedoPass> redo_;
  absl::Time load_began_;
  absl::Time load_shown_;

  ShardView view_;
  // Of the memory of an abandoned timeline, which replies may still hold.
  std::weak_ptr<ShardMemory> old_memory_;
  std::unique_ptr<SlabStore> slab_;
  std::unique_ptr<GradientLog> log_;  // Under durability `step`.
  std::unique_ptr<GradientLog> spill_;
  GradientPool pool_;
  std::unique_ptr<ChunkStore> chunks_;
  std::vector<GradientShape> shapes_;
  std::optional<size_t> loss_position_;
  FetchServer fetch_;
  PushServer push_;
  // Copies of others' chunks here, of ours elsewhere (by server).
  ReplicaTarget replica_target_;
  std::map<std::string, std::unique_ptr<ReplicaLink>> links_;
  std::vector<std::unique_ptr<ReplicaLink>> closed_links_;  // Until idle.
  uint64_t dialled_ = 0;
  std::optional<absl::Time> vote_held_since_;
  uint32_t self_ = 0;  // Our place in the placement's list of servers.
  // Decisions made lately, without a gap: what brings a copy up to date.
  std::map<uint64_t, v1::Decision> history_;
  // The decision that was applied last while its step is not over: chunks that
  // come or go with it are on their way.
  std::optional<v1::Decision> made_;
  std::vector<uint32_t> coming_;
  std::vector<uint32_t> going_;
  std::unique_ptr<RedoPass> taking_in_;

  uint64_t version_ = 0;  // Every chunk is at it, outside of an update.
  std::unique_ptr<StepGradients> collecting_;
  VotePhase vote_phase_ = VotePhase::kGathering;
  v1::Vote vote_;            // Of collecting_, from kSyncing on.
  uint64_t vote_round_ = 0;  // Grows with every change of collecting_.
  std::optional<absl::Time> gathered_at_;  // The last gradient of collecting_.
  uint64_t vote_log_bytes_ = 0;            // What the last vote cost.
  double vote_log_seconds_ = 0;
  std::map<uint64_t, v1::Decision> decisions_;  // Not yet applied.
  std::unique_ptr<UpdatePass> update_;
  double update_seconds_ = 0;
  std::unique_ptr<CheckpointWriter> checkpoints_;
  RedoBook book_;  // Under durability `step`, as the next.
  std::unique_ptr<BasePass> bases_;
  uint64_t log_limit_ = 0;
  bool digests_wanted_ = false;

  uint64_t base_bytes_ = 0;
  absl::Time published_;
  mutable Mutex stats_mutex_;
  v1::MemberStats stats_ ABSL_GUARDED_BY(stats_mutex_);

  // Last: what it runs uses what stands above.
  BlockingTasks blocking_;
};

}  // namespace ballast
