// SPDX-License-Identifier: Apache-2.0
// Makes new bases: writes chunks that only memory holds, chunk by chunk beside
// the training, and names their records in the index, so that the gradient log
// may drop the steps before them. Fuzzy: each chunk gets the version that it
// has when its turn comes, which recovery bridges.
//
// Runs on the engine's thread; the commits run elsewhere.

#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ps/shard/blocking.h"
#include "ps/shard/chunk_store.h"
#include "ps/shard/redo_book.h"
#include "storage/slab_store.h"

namespace ballast {

class BasePass {
 public:
  struct Options {
    SlabStore* slab = nullptr;  // Not owned, as are all.
    ChunkStore* chunks = nullptr;
    BlockingTasks* tasks = nullptr;  // Settles before this goes.
    RedoBook* book = nullptr;        // Told of every base.
    std::function<void()> advanced;  // After each commit.
    // RESOURCE_EXHAUSTED: the disk is full and it will be tried again.
    std::function<void(const absl::Status&)> fail;
  };
  explicit BasePass(const Options& options) : options_(options) {}

  // Whether the base of any chunk is older than the chunk.
  bool IsStale() const;
  // A pass over the chunks of which this is so.
  void Start();
  bool active() const {
    return !pending_.empty() || !ready_.empty() || committing_;
  }
  // Starts writes and commits; before the update has its turn, or a chunk
  // could change each time that it is written.
  void Work();
  // Begins nothing more and tells nothing more.
  void Abandon();
  // Lowest version of a base, of all chunks of the store; 0: one has none.
  uint64_t LowestBase() const;

 private:
  bool IsStale(const ChunkState& chunk) const;
  void Commit();

  const Options options_;
  std::vector<size_t> pending_;  // Places in the store.
  // Written; held until the index names them.
  std::vector<std::pair<CheckpointEntry, SharedExtent>> ready_;
  size_t batch_ = 1;
  bool committing_ = false;
  bool abandoned_ = false;
};

}  // namespace ballast
