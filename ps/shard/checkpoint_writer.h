// SPDX-License-Identifier: Apache-2.0
// Makes a version of this server's chunks a checkpoint: chunks on disk are
// there already and only stay held, chunks in memory are written in the
// background, and when all are written the store commits them as one.
//
// Runs on the engine's thread; what blocks (the commit's sync) runs elsewhere.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "proto/ballast.pb.h"
#include "ps/shard/blocking.h"
#include "ps/shard/chunk_store.h"
#include "storage/slab_store.h"

namespace ballast {

class CheckpointWriter {
 public:
  struct Options {
    SlabStore* slab = nullptr;       // Not owned.
    std::string data_dir;            // Absolute; told to the coordinator.
    ChunkStore* chunks = nullptr;    // Not owned.
    BlockingTasks* tasks = nullptr;  // Not owned; settles before this goes.
    std::function<void(v1::CheckpointSaved)> saved;
    // RESOURCE_EXHAUSTED: the disk is full and it will be tried again;
    // anything else ends the server.
    std::function<void(const absl::Status&)> fail;
  };
  explicit CheckpointWriter(const Options& options) : options_(options) {}

  // Every chunk is at version `step`.
  void Start(uint64_t timeline, uint64_t step);
  // Whether there is one of this version or one being made; a part that stands
  // is told again.
  bool Repeat(uint64_t timeline, uint64_t step) const;
  // Begins nothing more and reports nothing more.
  void Abandon();
  // Starts writes and, when all are done, the commit.
  void Work();
  // Starts the write of a chunk that an update waits to change.
  void SaveNow(ChunkState* chunk);
  bool idle() const { return jobs_.empty(); }

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
  v1::CheckpointSaved PartOf(const StoredCheckpoint& checkpoint) const;

  const Options options_;
  // What a job misses has not changed since, so its write serves those behind
  // it too.
  std::deque<Job> jobs_;
  bool abandoned_ = false;
};

}  // namespace ballast
