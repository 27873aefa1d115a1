// SPDX-License-Identifier: Apache-2.0
// The parts of CpuKernels that are loops over vectors: one thread's piece of
// each layer. Shapes and meanings as in kernels/kernels.h. Thread-safe.

#pragma once

#include <cstdint>

namespace ballast {

void AddPiece(uint64_t count, const float* a, const float* b, float* y);
void GeluPiece(uint64_t count, const float* x, float* y);
void GeluGradPiece(uint64_t count, const float* x, const float* dy, float* dx);

void LayerNormRows(uint64_t rows, uint64_t width, float epsilon, const float* x,
                   const float* gamma, const float* beta, float* y, float* mean,
                   float* rstd);

// dgamma and dbeta of these rows alone.
void LayerNormGradRows(uint64_t rows, uint64_t width, const float* x,
                       const float* gamma, const float* mean, const float* rstd,
                       const float* dy, const float* dx_add, float* dx,
                       float* dgamma, float* dbeta);

// sums[c] = sum over rows of in[row * stride + c], for c < columns; rows are
// added in ascending order.
void ColumnSums(uint64_t rows, uint64_t stride, uint64_t columns,
                const float* in, float* sums);

// Loss of one row; see Kernels::CrossEntropy.
double CrossEntropyRow(uint64_t vocab, uint32_t target, bool with_grad,
                       float* logits);

}  // namespace ballast
