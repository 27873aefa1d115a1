// SPDX-License-Identifier: Apache-2.0
// Makes a version of this server's chunks a checkpoint: chunks on disk are
// there already and only stay held, chunks in memory are written in the
// background, and when all are written the store commits them as one.
//
// Runs on the engine's thread; what blocks (the commit's sync) runs on a thread
// of its own.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "proto/ballast.pb.h"
#include "ps/shard/chunk_store.h"
#include "ps/shard/mailbox.h"
#include "storage/slab_store.h"

namespace ballast {

class CheckpointWriter {
 public:
  struct Options {
    SlabStore* slab = nullptr;  // Not owned.
    std::string data_dir;       // Absolute; told to the coordinator.
    std::shared_ptr<Mailbox> mailbox;
    std::function<void(v1::CheckpointSaved)> saved;
    std::function<void(const absl::Status&)> fail;
  };
  explicit CheckpointWriter(const Options& options);
  ~CheckpointWriter();  // Waits for what blocks now.

  // Every chunk is at version `step`.
  void Start(uint64_t timeline, uint64_t step, ChunkStore* chunks);
  // Starts writes and, when all are done, the commit.
  void Work();
  // Starts the write of a chunk that an update waits to change.
  void SaveNow(ChunkState* chunk);
  bool idle() const { return jobs_.empty() && blocking_ == 0; }

  // Forgets checkpoints that are older than the newest of `kept` and not in
  // it. A newer one may be on its way into the coordinator's log.
  void Prune(const std::vector<v1::CheckpointId>& kept);

 private:
  struct Job {
    uint64_t timeline = 0;
    uint64_t step = 0;
    // By place in `chunks`; an extent is missing until its write has begun.
    std::vector<CheckpointEntry> entries;
    std::vector<SharedExtent> extents;  // Held until the checkpoint does.
    bool committing = false;
  };

  bool IsWritten(const Job& job) const;
  void Commit(Job* job);
  // Runs `work` on the blocking thread, then `then` on the engine's.
  void Block(std::function<absl::Status()> work,
             std::function<void(const absl::Status&)> then);

  const Options options_;
  ChunkStore* chunks_ = nullptr;
  // What a job misses has not changed since, so its write serves those behind
  // it too.
  std::deque<Job> jobs_;
  uint32_t saving_ = 0;
  uint32_t blocking_ = 0;

  Mailbox blocking_mailbox_;
  bool stopped_ = false;  // Of the blocking thread, set by a task on it.
  std::thread thread_;
};

}  // namespace ballast
