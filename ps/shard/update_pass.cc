// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/update_pass.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/crash_point.h"
#include "kernels/update.h"

namespace ballast {
namespace {

// Records and gradients read before their turn; memory stops it earlier.
constexpr size_t kAheadChunks = 8;

template <typename T>
absl::Span<T> FieldOf(const ChunkState& chunk, const Image& image,
                      Field field) {
  const RecordLayout::Place& place = chunk.layout.at(field);
  return {reinterpret_cast<T*>(image.buffer.data() + place.offset),
          place.bytes / sizeof(T)};
}

void Compute(const v1::Decision& decision, const OptimizerOptions& optimizer,
             const ChunkState& chunk, const Image& image,
             absl::Span<const float> gradient) {
  const auto decay =
      static_cast<float>(chunk.tensor->decay ? optimizer.weight_decay : 0.0);
  const auto served = FieldOf<uint16_t>(chunk, image, Field::kServed);
  const auto param = FieldOf<float>(chunk, image, Field::kParam);
  const auto slot0 = FieldOf<float>(chunk, image, Field::kSlot0);
  if (optimizer.kind == OptimizerKind::kSgd) {
    SgdScalars scalars;
    scalars.grad_scale = decision.grad_scale();
    scalars.learning_rate = decision.learning_rate();
    scalars.momentum = static_cast<float>(optimizer.momentum);
    scalars.weight_decay = decay;
    SgdCpu(scalars, gradient, param, slot0, served);
    return;
  }
  AdamWScalars scalars;
  scalars.grad_scale = decision.grad_scale();
  scalars.learning_rate = decision.learning_rate();
  scalars.beta1 = static_cast<float>(optimizer.beta1);
  scalars.beta2 = static_cast<float>(optimizer.beta2);
  scalars.epsilon = static_cast<float>(optimizer.epsilon);
  scalars.weight_decay = decay;
  scalars.bias1 = decision.bias1();
  scalars.bias2 = decision.bias2();
  AdamWCpu(scalars, gradient, param, slot0,
           FieldOf<float>(chunk, image, Field::kSlot1), served);
}

}  // namespace

void UpdatePass::Start(const v1::Decision& decision,
                       std::unique_ptr<StepGradients> gradients,
                       absl::Time now) {
  BALLAST_CHECK(!active());
  decision_ = decision;
  gradients_ = std::move(gradients);
  started_ = now;
  next_ = 0;
  blocked_ = false;
  if (decision.skip()) {
    for (ChunkState& chunk : options_.chunks->chunks()) {
      chunk.version = decision.step();
    }
    next_ = options_.chunks->chunks().size();
  }
}

double UpdatePass::Finish(absl::Time now) {
  BALLAST_CHECK(active() && IsDone());
  decision_.reset();
  gradients_.reset();
  return absl::ToDoubleSeconds(now - started_);
}

std::string UpdatePass::NextTensor() const {
  return active() && !IsDone() ? options_.chunks->chunks()[next_].tensor->name
                               : "";
}

bool UpdatePass::Prepare(size_t position, bool now) {
  ChunkState& chunk = options_.chunks->chunks()[position];
  bool has_room = true;
  if (chunk.tier != Tier::kWhole) {
    // The chunk after the next may push out what was just updated: reading
    // while computing is worth more than keeping it.
    const auto need = now                     ? ChunkStore::Need::kNow
                      : position == next_ + 1 ? ChunkStore::Need::kSoon
                                              : ChunkStore::Need::kAhead;
    has_room = options_.chunks->Bring(&chunk, /*whole=*/true, need);
    if (has_room) {
      chunk.window->claimed = true;
    }
  }
  return gradients_->Bring(position, now) && has_room;
}

bool UpdatePass::IsFree(const ChunkState& chunk) const {
  return (!chunk.resident || chunk.resident->sends == 0) &&
         (!chunk.window || chunk.window->sends == 0);
}

bool UpdatePass::IsReady(const ChunkState& chunk) const {
  const auto image = options_.chunks->Whole(chunk);
  return image && !image->writing && IsFree(chunk) &&
         !gradients_->Ready(next_).empty();
}

bool UpdatePass::Work() {
  if (!active() || IsDone()) {
    return false;
  }
  ChunkState& chunk = options_.chunks->chunks()[next_];
  bool has_room = true;
  const size_t end =
      std::min(next_ + kAheadChunks, options_.chunks->chunks().size());
  for (size_t position = next_; position < end; ++position) {
    if (!Prepare(position, position == next_)) {
      has_room = position != next_;
      break;
    }
  }
  if (chunk.save_pending) {
    options_.save_now(&chunk);
  }
  blocked_ = !has_room || !IsFree(chunk);
  if (!has_room || chunk.save_pending || !IsReady(chunk) ||
      !TakeExtent(chunk)) {
    return false;
  }
  Apply(&chunk, options_.chunks->Whole(chunk));
  if (next_ == options_.chunks->chunks().size() / 2) {
    BALLAST_CRASH_POINT("server.update.middle");
  }
  gradients_->Forget(next_);
  ++next_;
  return true;
}

// Before anything is changed: what is changed must be written.
bool UpdatePass::TakeExtent(const ChunkState& chunk) {
  if (chunk.tier == Tier::kWhole || extent_) {
    return true;
  }
  absl::StatusOr<SharedExtent> extent = options_.chunks->TakeExtent(chunk);
  if (!extent.ok()) {
    options_.fail(extent.status());
    return false;
  }
  extent_ = *std::move(extent);
  return true;
}

void UpdatePass::Apply(ChunkState* chunk, const std::shared_ptr<Image>& image) {
  ApplyDecision(*decision_, options_.optimizer, gradients_->Ready(next_), chunk,
                image);
  image->claimed = false;
  if (chunk->tier == Tier::kWhole) {
    return;
  }
  options_.chunks->Write(chunk, image, std::move(extent_));
  extent_.reset();
  if (chunk->tier == Tier::kWeights) {
    std::memcpy(chunk->resident->buffer.data(), image->buffer.data(),
                chunk->layout.prefix_bytes);
  }
}

void ApplyDecision(const v1::Decision& decision,
                   const OptimizerOptions& optimizer,
                   absl::Span<const float> gradient, ChunkState* chunk,
                   const std::shared_ptr<Image>& image) {
  Compute(decision, optimizer, *chunk, *image, gradient);
  chunk->version = decision.step();
  chunk->data_version = decision.step();
  chunk->data_timeline = decision.timeline();
  chunk->extent.reset();
  chunk->digests.clear();
  image->served = 0;
}

}  // namespace ballast
