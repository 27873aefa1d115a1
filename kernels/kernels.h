// SPDX-License-Identifier: Apache-2.0
// The layers of a transformer as functions over device memory, so that a model
// family composes them without knowing the device. The CPU implementation
// (kernels/cpu_kernels.h) uses oneDNN for matrix products and our own SIMD
// loops for the rest; a CUDA one can stand beside it.
//
// Matrices are row-major fp32 unless a DType is given. Counts are elements.
// Outputs never alias inputs unless a line says so. Every function overwrites
// its outputs (no accumulation). Results are bit-identical for any number of
// threads. `scratch` is device memory of at least the bytes that the matching
// *ScratchBytes call gives for the same shape, 64-byte aligned; its contents
// are lost. All functions run on the device's one compute stream, in order.
// Thread-compatible: one caller at a time.

#pragma once

#include <cstdint>
#include <string>

#include "common/dtype.h"

namespace ballast {

// y (rows, out) = x (rows, in) * W + bias.
struct LinearShape {
  uint64_t rows = 0;
  uint64_t in = 0;
  uint64_t out = 0;
  // Storage of W: false (in, out), as GPT-2's files; true (out, in), as
  // Llama's files and a tied embedding (vocabulary, width) used as the head.
  bool out_major = false;
  // Of W. With kBF16 the product rounds x (or dy) to bf16 and accumulates in
  // fp32; every result is fp32.
  DType dtype = DType::kF32;
  friend bool operator==(const LinearShape&, const LinearShape&) = default;
};

// Causal self-attention over `batch` sequences of `tokens`. Row i of q, k, v,
// out and their gradients is token i of the flattened (batch * tokens) rows;
// consecutive rows are *_stride elements apart; head h is columns
// [h * head_size, (h+1) * head_size) of its row. heads % kv_heads == 0.
struct AttentionShape {
  uint64_t batch = 0;
  uint64_t tokens = 0;
  uint64_t heads = 0;
  uint64_t kv_heads = 0;
  uint64_t head_size = 0;
  uint64_t q_stride = 0;
  uint64_t kv_stride = 0;  // Of k and v alike.
  uint64_t out_stride = 0;
};

class Kernels {
 public:
  virtual ~Kernels() = default;

  // What the bits of results depend on beside arguments: libraries and
  // instruction sets. The workers of a run must have the same.
  virtual std::string Identity() const = 0;

  // ---- Matrix products ----
  virtual uint64_t LinearScratchBytes(const LinearShape& shape) = 0;
  // bias: fp32 (out) or null.
  virtual void Linear(const LinearShape& shape, const float* x,
                      const void* weight, const float* bias, float* y,
                      void* scratch) = 0;
  virtual uint64_t LinearGradInputScratchBytes(const LinearShape& shape) = 0;
  // dx (rows, in) = dy (rows, out) * W^T.
  virtual void LinearGradInput(const LinearShape& shape, const float* dy,
                               const void* weight, float* dx,
                               void* scratch) = 0;
  virtual uint64_t LinearGradWeightScratchBytes(const LinearShape& shape) = 0;
  // dweight: fp32, stored as W is. dbias: fp32 (out), column sums of dy; null
  // when there is no bias.
  virtual void LinearGradWeight(const LinearShape& shape, const float* x,
                                const float* dy, float* dweight, float* dbias,
                                void* scratch) = 0;

  // ---- Layer normalisation (Ba et al. 2016, equation 4) ----
  // x, y (rows, width); gamma, beta (width); mean, rstd (rows).
  virtual void LayerNorm(uint64_t rows, uint64_t width, float epsilon,
                         const float* x, const float* gamma, const float* beta,
                         float* y, float* mean, float* rstd) = 0;
  virtual uint64_t LayerNormGradScratchBytes(uint64_t rows, uint64_t width) = 0;
  // dx_add: gradient that reached x by the residual path, added into dx; null
  // for none; may alias dx. dgamma, dbeta (width).
  virtual void LayerNormGrad(uint64_t rows, uint64_t width, const float* x,
                             const float* gamma, const float* mean,
                             const float* rstd, const float* dy,
                             const float* dx_add, float* dx, float* dgamma,
                             float* dbeta, void* scratch) = 0;

  // ---- Activation ----
  // GELU, tanh form (Hendrycks and Gimpel 2016, section 2). y may alias x.
  virtual void Gelu(uint64_t count, const float* x, float* y) = 0;
  // dx = dy * gelu'(x). dx may alias dy.
  virtual void GeluGrad(uint64_t count, const float* x, const float* dy,
                        float* dx) = 0;

  // ---- Attention; scores are scaled by 1 / sqrt(head_size) ----
  virtual uint64_t AttentionScratchBytes(const AttentionShape& shape) = 0;
  // lse (batch, heads, tokens): log-sum-exp of each row of scores.
  virtual void Attention(const AttentionShape& shape, const float* q,
                         const float* k, const float* v, float* out, float* lse,
                         void* scratch) = 0;
  virtual uint64_t AttentionGradScratchBytes(const AttentionShape& shape) = 0;
  // out and lse as Attention wrote them. dq has q's strides, dk and dv have
  // k's; dout has out's.
  virtual void AttentionGrad(const AttentionShape& shape, const float* q,
                             const float* k, const float* v, const float* out,
                             const float* lse, const float* dout, float* dq,
                             float* dk, float* dv, void* scratch) = 0;

  // ---- Embedding ----
  // y (batch * tokens, width) = token_table[ids] + position_table[position].
  // Tables are `dtype`, row-major (rows, width); position_table may be null.
  virtual void Embedding(uint64_t batch, uint64_t tokens, uint64_t width,
                         DType dtype, const uint32_t* ids,
                         const void* token_table, const void* position_table,
                         float* y) = 0;
  // dtoken (vocab, width): rows that no id names are +0.0. dposition (at least
  // `tokens` rows in the tensor: position_rows, width) or null.
  virtual void EmbeddingGrad(uint64_t batch, uint64_t tokens, uint64_t width,
                             uint64_t vocab, uint64_t position_rows,
                             const uint32_t* ids, const float* dy,
                             float* dtoken, float* dposition) = 0;

  // ---- Loss ----
  virtual uint64_t CrossEntropyScratchBytes(uint64_t rows) = 0;
  // Cross-entropy in nats of logits (rows, vocab) against targets (rows).
  // Returns the sum over rows in fp64. When `with_grad`, logits are overwritten
  // with the gradient of that sum.
  virtual double CrossEntropy(uint64_t rows, uint64_t vocab,
                              const uint32_t* targets, bool with_grad,
                              float* logits, void* scratch) = 0;

  // ---- Element-wise ----
  // y = a + b. y may alias either.
  virtual void Add(uint64_t count, const float* a, const float* b,
                   float* y) = 0;
  // total = total + term: the one kernel behind every node of the span tree,
  // the same formula as AccumulateCpu (kernels/update.h).
  virtual void Accumulate(uint64_t count, const float* term, float* total) = 0;
};

}  // namespace ballast
