// SPDX-License-Identifier: Apache-2.0
// The update: applies one decision to every chunk in forward order, which is
// the order in which the next step fetches them. Chunks in memory are updated
// in place; others are read ahead, updated in the window and written behind to
// a fresh extent.
//
// Runs on the engine's thread, one chunk per call of Work, so that fetches are
// answered in between.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "common/job.h"
#include "proto/ballast.pb.h"
#include "ps/shard/chunk_store.h"
#include "ps/shard/gradient_store.h"

namespace ballast {

class UpdatePass {
 public:
  struct Options {
    ChunkStore* chunks = nullptr;  // Not owned.
    OptimizerOptions optimizer;
    // Called before a chunk with save_pending is changed; it must start the
    // write that the checkpoint waits for, if it can.
    std::function<void(ChunkState*)> save_now;
    // RESOURCE_EXHAUSTED: the disk is full and it will be tried again.
    std::function<void(const absl::Status&)> fail;
  };
  explicit UpdatePass(const Options& options) : options_(options) {}

  // `gradients` is complete and of the decision's step. With skip it may be
  // null: versions are bumped and nothing moves.
  void Start(const v1::Decision& decision,
             std::unique_ptr<StepGradients> gradients, absl::Time now);
  bool active() const { return decision_.has_value(); }
  const v1::Decision& decision() const { return *decision_; }

  // Updates a chunk if the next one is ready; true when it did.
  bool Work();
  // All chunks are at the decision's version; ends the pass.
  bool IsDone() const { return next_ == options_.chunks->chunks().size(); }
  double Finish(absl::Time now);

  // The gradients that are being used; null outside of a pass.
  StepGradients* gradients() { return gradients_.get(); }
  // The next chunk waits for replies on their way to let go of its memory or
  // of the window's.
  bool blocked() const { return active() && blocked_; }
  // "h.3.attn.c_attn.weight" while it waits, for people.
  std::string NextTensor() const;

 private:
  bool Prepare(size_t position, bool now);
  // No reply on its way points into the chunk.
  bool IsFree(const ChunkState& chunk) const;
  bool IsReady(const ChunkState& chunk) const;
  bool TakeExtent(const ChunkState& chunk);
  void Apply(ChunkState* chunk, const std::shared_ptr<Image>& image);

  const Options options_;
  std::optional<v1::Decision> decision_;
  std::unique_ptr<StepGradients> gradients_;
  size_t next_ = 0;
  absl::Time started_;
  bool blocked_ = false;
  SharedExtent extent_;  // Taken for the next chunk.
};

// Updates `image`, which is the chunk's whole record in memory, from version
// step - 1: fields, versions and the served copy. What was on disk is older
// then. `gradient` is complete and of decision.step().
void ApplyDecision(const v1::Decision& decision,
                   const OptimizerOptions& optimizer,
                   absl::Span<const float> gradient, ChunkState* chunk,
                   const std::shared_ptr<Image>& image);

}  // namespace ballast
