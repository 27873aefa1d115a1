// SPDX-License-Identifier: Apache-2.0
// Attention of one sequence and one key head, with all query heads that share
// it, in blocks of constant size: the scores of a whole sequence never exist,
// and the bits depend on neither threads nor memory. The method is that of
// Dao et al. 2022 (FlashAttention), algorithms 1 and 4, on one CPU thread.
//
// Pointers are those of the whole batch; shapes as in kernels/kernels.h.
// `scratch` is 64-byte aligned. Thread-safe.

#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace ballast {

uint64_t AttentionTaskScratchBytes(const AttentionShape& shape);
void AttentionTask(const AttentionShape& shape, uint64_t sequence,
                   uint64_t kv_head, const float* q, const float* k,
                   const float* v, float* out, float* lse, float* scratch);

uint64_t AttentionGradTaskScratchBytes(const AttentionShape& shape);
void AttentionGradTask(const AttentionShape& shape, uint64_t sequence,
                       uint64_t kv_head, const float* q, const float* k,
                       const float* v, const float* out, const float* lse,
                       const float* dout, float* dq, float* dk, float* dv,
                       float* scratch);

}  // namespace ballast
