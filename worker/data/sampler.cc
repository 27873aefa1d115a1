// SPDX-License-Identifier: Apache-2.0
#include "worker/data/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/hash.h"
#include "common/random.h"

namespace ballast {
namespace {

constexpr uint32_t kRounds = 6;

uint64_t WindowCount(uint64_t bytes, uint64_t context) {
  return bytes == 0 ? 0 : (bytes - 1) / context;
}

}  // namespace

uint64_t PermuteSample(uint64_t seed, uint64_t epoch, uint64_t count,
                       uint64_t index) {
  BALLAST_CHECK(index < count);
  if (count == 1) {
    return 0;
  }
  // Two halves of equal width; together at most 4 * count values, so a walk
  // takes four turns on average at worst.
  const auto half_bits =
      static_cast<uint32_t>((std::bit_width(count - 1) + 1) / 2);
  const uint64_t half_mask = (uint64_t{1} << half_bits) - 1;
  const uint64_t stream = HashBytes("data.order").low + epoch;
  uint64_t value = index;
  do {
    uint64_t left = value >> half_bits;
    uint64_t right = value & half_mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const uint64_t mixed =
          left ^ (Philox(seed, (round << 32) | right, stream)[0] & half_mask);
      left = right;
      right = mixed;
    }
    value = (left << half_bits) | right;
  } while (value >= count);
  return value;
}

absl::StatusOr<Sampler> Sampler::Create(const Job& job, uint64_t text_bytes) {
  Sampler sampler;
  sampler.seed_ = job.run.seed;
  sampler.context_ = job.model.context;
  sampler.micro_batches_ = job.batch.micro_batches;
  sampler.micro_batch_size_ = job.batch.micro_batch_size;
  sampler.eval_sequences_ =
      uint64_t{job.eval.micro_batches} * job.batch.micro_batch_size;
  const auto tail_bytes = std::min(
      text_bytes,
      static_cast<uint64_t>(std::floor(static_cast<double>(text_bytes) *
                                       job.data.validation_fraction)));
  sampler.eval_begin_ = text_bytes - tail_bytes;
  sampler.train_samples_ = WindowCount(sampler.eval_begin_, sampler.context_);
  sampler.eval_samples_ = WindowCount(tail_bytes, sampler.context_);
  if (sampler.train_samples_ == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("data.path has ", sampler.eval_begin_,
                     " bytes to train on; want at least ", sampler.context_ + 1,
                     ", one more than model.context"));
  }
  if (sampler.eval_samples_ < sampler.eval_sequences_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the held-out tail of data.path has ", tail_bytes, " bytes, ",
        sampler.eval_samples_, " sequences; eval.micro_batches wants ",
        sampler.eval_sequences_,
        " sequences: lower it, or raise "
        "data.validation_fraction"));
  }
  return sampler;
}

uint64_t Sampler::TrainOffset(uint64_t step, uint32_t micro_batch,
                              uint32_t index) const {
  BALLAST_CHECK(step >= 1 && micro_batch < micro_batches_ &&
                index < micro_batch_size_);
  const uint64_t sample =
      ((step - 1) * micro_batches_ + micro_batch) * micro_batch_size_ + index;
  return context_ * PermuteSample(seed_, sample / train_samples_,
                                  train_samples_, sample % train_samples_);
}

uint64_t Sampler::EvalOffset(uint32_t micro_batch, uint32_t index) const {
  const uint64_t sequence = micro_batch * micro_batch_size_ + index;
  BALLAST_CHECK(index < micro_batch_size_ && sequence < eval_sequences_);
  // The product fits: a text of 2^48 bytes and 2^16 sequences.
  return eval_begin_ + context_ * (sequence * eval_samples_ / eval_sequences_);
}

}  // namespace ballast
