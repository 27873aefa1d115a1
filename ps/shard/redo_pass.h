// SPDX-License-Identifier: Apache-2.0
// Recovery: brings a server's chunks from their bases to the committed step, by
// applying the decisions that the coordinator sends with the gradients that the
// log holds, chunk by chunk. The same arithmetic as the update, so the same
// bits. A pass that is worked on bit by bit, like LoadPass.
//
// A gradient is found by the (timeline, step) of the decision that asks for it:
// records of abandoned timelines are never read. Runs on the engine's thread.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/job.h"
#include "proto/ballast.pb.h"
#include "ps/shard/chunk_store.h"
#include "ps/shard/gradient_store.h"
#include "ps/shard/redo_book.h"

namespace ballast {

class RedoPass {
 public:
  struct Options {
    uint64_t step = 0;                    // The version that every chunk gets.
    std::vector<v1::Decision> decisions;  // Up to `step`, ascending.
    OptimizerOptions optimizer;
    uint32_t micro_batches = 0;
    ChunkStore* chunks = nullptr;  // Not owned, as are all.
    GradientPool* pool = nullptr;
    const RedoBook* book = nullptr;
  };
  explicit RedoPass(Options options);
  ~RedoPass();

  // `places`: of the chunks in the store, which all have a base.
  // Errors: DATA_LOSS            a gradient that a decision wants is not in the
  //                              log, naming chunk and numbers.
  //         FAILED_PRECONDITION  a base is newer than the step, or a decision
  //                              between them was not sent.
  absl::Status Start(std::vector<size_t> places);

  // Does what can be done; `worked`: there may be more to do at once.
  // Errors: RESOURCE_EXHAUSTED  the disk is full; goes on when asked again.
  absl::Status Work(bool* worked);
  bool IsDone() const;
  uint64_t loaded() const { return begun_ - jobs_.size(); }
  // Gradients to apply in all.
  uint64_t gradients() const { return gradients_; }

 private:
  // A chunk on its way.
  struct Job;

  absl::Status Check(const ChunkState& chunk);
  // Index of the first decision behind a version.
  size_t FirstAfter(uint64_t version) const;
  bool HasUpdates(size_t first) const;
  // False: no room for another chunk now.
  bool Begin(size_t place);
  absl::Status Advance(Job* job, bool* worked);
  void ReadGradient(const std::shared_ptr<Job>& job);
  absl::Status Finish(Job* job, bool* worked);

  const Options options_;
  std::vector<size_t> places_;
  size_t begun_ = 0;  // Of places_.
  uint64_t gradients_ = 0;
  std::vector<std::shared_ptr<Job>> jobs_;
};

}  // namespace ballast
