// SPDX-License-Identifier: Apache-2.0
// Which bytes of the text a micro-batch reads: a pure function of (seed, epoch,
// step, micro-batch), so that it does not matter which worker asks, nor how
// often. Nothing the size of the data is kept in memory.
//
// A text of B bytes is cut in two: the first part trains, the tail is held out.
// Each part of P bytes holds (P - 1) / context windows that do not overlap; a
// window's targets are its bytes shifted by one, so its last target is the
// first byte of the next window.

#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/job.h"

namespace ballast {

// The image of `index` under a permutation of [0, count) chosen by (seed,
// epoch): a balanced Feistel network over Philox, walked until the image falls
// below `count` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
// 2002, sections 4 and 5). index < count.
uint64_t PermuteSample(uint64_t seed, uint64_t epoch, uint64_t count,
                       uint64_t index);

// Immutable; thread-safe.
class Sampler {
 public:
  // For a text of `text_bytes` bytes.
  //
  // Errors:
  //   INVALID_ARGUMENT  either part of the text is too short for the job.
  static absl::StatusOr<Sampler> Create(const Job& job, uint64_t text_bytes);

  uint64_t train_samples() const { return train_samples_; }
  uint64_t eval_samples() const { return eval_samples_; }

  // First byte of sequence `index` of a training micro-batch; step counts from
  // 1. In every epoch each training window occurs exactly once.
  uint64_t TrainOffset(uint64_t step, uint32_t micro_batch,
                       uint32_t index) const;

  // First byte of sequence `index` of a held-out micro-batch: windows in file
  // order, spread evenly over the tail. Every evaluation reads the same.
  uint64_t EvalOffset(uint32_t micro_batch, uint32_t index) const;

 private:
  Sampler() = default;

  uint64_t seed_ = 0;
  uint64_t context_ = 0;
  uint64_t micro_batches_ = 0;     // In a step.
  uint64_t micro_batch_size_ = 0;  // Sequences.
  uint64_t eval_sequences_ = 0;    // In an evaluation.
  uint64_t train_samples_ = 0;
  uint64_t eval_samples_ = 0;
  uint64_t eval_begin_ = 0;  // First byte of the tail.
};

}  // namespace ballast
