// SPDX-License-Identifier: Apache-2.0
// A shard server's one thread and all of its state: directives, streams and the
// disk's completions come in through the mailbox, votes, confirmations and
// replies go out. No lock, and nothing that happens in the middle of something
// else.
//
//   directive LOAD --> loaded --> gradients of step t --> vote
//                        ^                                 |
//                        +-- confirm <-- update <-- decision
//
// Everything is safe to be told twice: a directive repeats what is not yet
// confirmed, a report what was asked for again.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/hash.h"
#include "common/job.h"
#include "common/mutex.h"
#include "proto/ballast.pb.h"
#include "ps/shard/checkpoint_writer.h"
#include "ps/shard/chunk_store.h"
#include "ps/shard/fetch_server.h"
#include "ps/shard/gradient_store.h"
#include "ps/shard/mailbox.h"
#include "ps/shard/push_server.h"
#include "ps/shard/shard_view.h"
#include "ps/shard/update_pass.h"
#include "rpc/member.h"
#include "storage/gradient_log.h"
#include "storage/slab_store.h"

namespace ballast {

class ShardEngine {
 public:
  struct Options {
    Job job;
    std::string name;      // "server-0", as in the placement.
    std::string data_dir;  // Absolute.
  };
  ShardEngine(const Options& options, std::shared_ptr<Mailbox> mailbox);
  ~ShardEngine();

  // Handlers of the service's streams, for MakeShardService.
  BulkStreamHandler* fetch() { return &fetch_; }
  BulkStreamHandler* push() { return &push_; }

  // Thread-safe: callbacks of the session.
  void Deliver(const v1::PollReply& reply);
  void SessionOver(const absl::Status& why);
  v1::MemberStats stats() const;

  // Opens the data directory of the run and works until the coordinator says
  // to leave; OK then. Whatever else ends it was reported as fatal, if anybody
  // listened. Blocks; the caller's thread is the engine's.
  absl::Status Run(MemberSession* session);

 private:
  absl::Status Open();
  void Turn();
  void Obey();
  absl::Status Load();
  absl::Status TakeMemory(const v1::Placement& placement);
  absl::Status MakePlan(const std::vector<uint32_t>& owned);
  void StartCollecting();
  void StartUpdate();
  void FinishUpdate();
  void MaybeVote(bool again);
  void MaybeDigest();
  bool FillDigests(ChunkState* chunk);
  void Confirm(uint64_t step);
  void Report(v1::ReportRequest request);
  void Fail(const absl::Status& status);
  void PublishStats();
  void PublishWhenDue();
  std::string Phase() const;
  // Waits until the disk is done with our memory.
  void Settle();
  void Drain();

  const Options options_;
  const std::shared_ptr<Mailbox> mailbox_;
  MemberSession* session_ = nullptr;
  Hash128 run_;
  absl::Time now_;
  absl::Status failure_;
  bool session_over_ = false;
  bool leave_ = false;

  std::optional<v1::ServerDirective> directive_;
  bool directive_is_new_ = false;
  std::optional<std::pair<uint64_t, uint64_t>> loaded_;  // Timeline, placement.

  ShardView view_;
  std::unique_ptr<SlabStore> slab_;
  std::unique_ptr<GradientLog> log_;
  GradientPool pool_;
  std::unique_ptr<ChunkStore> chunks_;
  std::vector<GradientShape> shapes_;
  std::optional<size_t> loss_position_;
  FetchServer fetch_;
  PushServer push_;

  uint64_t version_ = 0;  // Every chunk is at it, outside of an update.
  std::unique_ptr<StepGradients> collecting_;
  bool voted_ = false;
  std::map<uint64_t, v1::Decision> decisions_;  // Not yet applied.
  std::unique_ptr<UpdatePass> update_;
  double update_seconds_ = 0;
  std::unique_ptr<CheckpointWriter> checkpoints_;
  bool digests_wanted_ = false;

  uint64_t base_bytes_ = 0;
  absl::Time published_;
  mutable Mutex stats_mutex_;
  v1::MemberStats stats_ ABSL_GUARDED_BY(stats_mutex_);
};

}  // namespace ballast
