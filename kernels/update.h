// SPDX-License-Identifier: Apache-2.0
// What a shard server computes: sums of gradients, the figures a vote carries,
// and the optimizer's update. CPU only; SIMD with run-time dispatch, the same
// bits for every vector width that has a fused multiply-add.
//
// Spans of one call have equal length and do not overlap unless a line says so.
// Thread-safe: no state.

#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace ballast {

// total[i] += term[i] in fp32: one node of the span tree.
void AccumulateCpu(absl::Span<const float> term, absl::Span<float> total);

struct BlockStats {
  double sum_squares = 0;   // fp64, in a fixed order; finite elements only.
  uint64_t non_finite = 0;  // Elements that are inf or NaN.
};

// Statistics of one block of a gradient (at most 64 Ki elements or one row).
// The order of the sum depends on the length alone.
BlockStats BlockStatsCpu(absl::Span<const float> block);

// Scalars of one AdamW step; equal for every element (Loshchilov and Hutter
// 2019, algorithm 2). The coordinator computes them once, as fp32 bits.
struct AdamWScalars {
  float grad_scale = 1;  // clip factor / (loss scale * tokens of the step).
  float learning_rate = 0;
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
  float weight_decay = 0;  // 0 for tensors that do not decay.
  float bias1 = 1;         // 1 - beta1^t.
  float bias2 = 1;         // 1 - beta2^t.
};

// g = grad * grad_scale;
// exp_avg = beta1 * exp_avg + (1 - beta1) * g;
// exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g;
// param -= learning_rate * (exp_avg / bias1 / (sqrt(exp_avg_sq / bias2) +
//          epsilon) + weight_decay * param).
// `served_bf16`, when not empty, receives param rounded to bf16.
void AdamWCpu(const AdamWScalars& scalars, absl::Span<const float> grad,
              absl::Span<float> param, absl::Span<float> exp_avg,
              absl::Span<float> exp_avg_sq, absl::Span<uint16_t> served_bf16);

struct SgdScalars {
  float grad_scale = 1;
  float learning_rate = 0;
  float momentum = 0;
  float weight_decay = 0;  // Added to the gradient (coupled), as is usual.
};

// g = grad * grad_scale + weight_decay * param; momentum_buffer = momentum *
// momentum_buffer + g; param -= learning_rate * momentum_buffer.
void SgdCpu(const SgdScalars& scalars, absl::Span<const float> grad,
            absl::Span<float> param, absl::Span<float> momentum_buffer,
            absl::Span<uint16_t> served_bf16);

// out = in rounded to bf16.
void CastToBF16Cpu(absl::Span<const float> in, absl::Span<uint16_t> out);

}  // namespace ballast
