// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_simd.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/round_up.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention_simd.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/tile_product-inl.h"

#ifndef BALLAST_KERNELS_ATTENTION_SIMD_ONCE_
#define BALLAST_KERNELS_ATTENTION_SIMD_ONCE_
namespace ballast {
namespace {

// Rows of a block of queries and of one of keys. Five blocks of 64 x 64 floats
// are 80 KiB: a second-level cache holds what a pair of blocks needs.
constexpr uint64_t kBlock = 64;
constexpr uint64_t kScores = kBlock * kBlock;
// Head sizes are padded to whole vectors of any target (16 floats at most).
constexpr uint64_t kPad = 16;

// Where one query head and its key head lie.
struct Head {
  Head(const AttentionShape& shape, uint64_t sequence, uint64_t kv_head,
       uint64_t member)
      : tokens(shape.tokens),
        size(shape.head_size),
        width(RoundUp(shape.head_size, kPad)),
        q_stride(shape.q_stride),
        kv_stride(shape.kv_stride),
        out_stride(shape.out_stride),
        scale(1.0f / std::sqrt(static_cast<float>(shape.head_size))) {
    const uint64_t head = kv_head * (shape.heads / shape.kv_heads) + member;
    const uint64_t row = sequence * tokens;
    q = row * q_stride + head * size;
    kv = row * kv_stride + kv_head * size;
    out = row * out_stride + head * size;
    lse = (sequence * shape.heads + head) * tokens;
  }
  // Rows of the block that begins at `first`.
  uint64_t RowsFrom(uint64_t first) const {
    return std::min(kBlock, tokens - first);
  }

  uint64_t tokens;
  uint64_t size;
  uint64_t width;  // Of packed rows.
  uint64_t q_stride;
  uint64_t kv_stride;
  uint64_t out_stride;
  float scale;
  uint64_t q = 0;  // Offsets of the first row.
  uint64_t kv = 0;
  uint64_t out = 0;
  uint64_t lse = 0;
};

// Hands out pieces of scratch, each a multiple of 64 bytes.
class Pieces {
 public:
  explicit Pieces(float* scratch) : next_(scratch) {}
  float* Take(uint64_t floats) {
    float* const piece = next_;
    next_ += floats;
    return piece;
  }

 private:
  float* next_;
};

}  // namespace
}  // namespace ballast
#endif  // BALLAST_KERNELS_ATTENTION_SIMD_ONCE_

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {

// Running softmax of a block of queries: each row's greatest score so far, and
// the sum of its exponentials relative to that.
struct Running {
  float* top;
  float* sum;
};

// Scores of one row become exponentials relative to the new maximum; zeros
// beyond `visible`. Returns the factor that what was summed before must take.
HWY_INLINE float SoftmaxRow(size_t visible, float scale, float* score,
                            float* top, float* sum) {
  const FloatTag d;
  const Float factor = hn::Set(d, scale);
  Float top_lanes = hn::Set(d, *top);
  Sweep(visible, [&](size_t i, auto part) HWY_ATTR {
    const Float scaled = hn::Mul(part.Load(d, score + i), factor);
    top_lanes = hn::Max(top_lanes, part.Or(d, scaled, top_lanes));
  });
  const float new_top = hn::GetLane(hn::MaxOfLanes(d, top_lanes));
  const Float shift = hn::Set(d, new_top);
  Float sum_lanes = hn::Zero(d);
  Sweep(visible, [&](size_t i, auto part) HWY_ATTR {
    const Float term =
        hn::Exp(d, hn::MulSub(part.Load(d, score + i), factor, shift));
    const Float counted = part.Or(d, term, hn::Zero(d));
    sum_lanes = hn::Add(sum_lanes, counted);
    hn::StoreU(counted, d, score + i);
  });
  const size_t lanes = hn::Lanes(d);
  const size_t written = (visible + lanes - 1) / lanes * lanes;
  std::fill(score + written, score + kBlock, 0.0f);
  const float correction = std::exp(*top - new_top);
  *sum = *sum * correction + hn::GetLane(hn::SumOfLanes(d, sum_lanes));
  *top = new_top;
  return correction;
}

HWY_INLINE void ScaleRow(size_t count, float factor, float* row) {
  const FloatTag d;
  const Float by = hn::Set(d, factor);
  Sweep(count, [&](size_t i, auto part) HWY_ATTR {
    part.Store(hn::Mul(part.Load(d, row + i), by), d, row + i);
  });
}

// One block of queries against all keys up to the diagonal. Packed keys lie
// block by block, transposed; packed values row by row.
void AttendBlock(const Head& head, uint64_t first, const float* q,
                 const float* packed_keys, const float* packed_values,
                 float* out, float* lse, float* scratch) {
  Pieces pieces(scratch);
  float* const queries = pieces.Take(kBlock * head.width);
  float* const sums = pieces.Take(kBlock * head.width);
  float* const scores = pieces.Take(kScores);
  float* const top = pieces.Take(kBlock);
  float* const total = pieces.Take(kBlock);
  const uint64_t rows = head.RowsFrom(first);
  Pack(rows, head.size, q + head.q + first * head.q_stride, head.q_stride,
       kBlock, head.width, queries);
  std::fill_n(top, kBlock, -std::numeric_limits<float>::infinity());
  std::fill_n(total, kBlock, 0.0f);
  for (uint64_t key = 0; key <= first; key += kBlock) {
    const bool diagonal = key == first;
    BlockProduct(diagonal ? Causal::kColumnsToRow : Causal::kAll, kBlock,
                 head.width, kBlock, {queries, head.width, 1},
                 packed_keys + key * head.width, kBlock, scores, kBlock, false);
    for (uint64_t r = 0; r < kBlock; ++r) {
      const float correction =
          SoftmaxRow(diagonal ? r + 1 : kBlock, head.scale, scores + r * kBlock,
                     top + r, total + r);
      if (key > 0) ScaleRow(head.width, correction, sums + r * head.width);
    }
    BlockProduct(diagonal ? Causal::kTermsToRow : Causal::kAll, kBlock, kBlock,
                 head.width, {scores, kBlock, 1},
                 packed_values + key * head.width, head.width, sums, head.width,
                 key > 0);
  }
  const FloatTag d;
  for (uint64_t r = 0; r < rows; ++r) {
    const Float inverse = hn::Set(d, 1.0f / total[r]);
    const float* const from = sums + r * head.width;
    float* const to = out + head.out + (first + r) * head.out_stride;
    Sweep(head.size, [&](size_t i, auto part) HWY_ATTR {
      part.Store(hn::Mul(hn::LoadU(d, from + i), inverse), d, to + i);
    });
    lse[head.lse + first + r] = top[r] + std::log(total[r]);
  }
}

void Attention(const AttentionShape& shape, uint64_t sequence, uint64_t kv_head,
               const float* q, const float* k, const float* v, float* out,
               float* lse, float* scratch) {
  Pieces pieces(scratch);
  const Head first_head(shape, sequence, kv_head, 0);
  const uint64_t packed = RoundUp(shape.tokens, kBlock) * first_head.width;
  float* const keys = pieces.Take(packed);
  float* const values = pieces.Take(packed);
  float* const rest = pieces.Take(0);
  for (uint64_t key = 0; key < shape.tokens; key += kBlock) {
    const uint64_t at = first_head.kv + key * shape.kv_stride;
    const uint64_t rows = first_head.RowsFrom(key);
    PackTransposed(rows, shape.head_size, k + at, shape.kv_stride, kBlock,
                   first_head.width, keys + key * first_head.width);
    Pack(rows, shape.head_size, v + at, shape.kv_stride, kBlock,
         first_head.width, values + key * first_head.width);
  }
  for (uint64_t member = 0; member < shape.heads / shape.kv_heads; ++member) {
    const Head head(shape, sequence, kv_head, member);
    for (uint64_t first = 0; first < shape.tokens; first += kBlock) {
      AttendBlock(head, first, q, keys, values, out, lse, rest);
    }
  }
}

// Packed operands of the backward pass: three of the whole head, the others of
// one block.
struct GradBlocks {
  GradBlocks(const Head& head, Pieces pieces)
      : tokens(RoundUp(head.tokens, kBlock)),
        queries(pieces.Take(tokens * head.width)),
        douts(pieces.Take(tokens * head.width)),
        dqueries(pieces.Take(tokens * head.width)),
        keys(pieces.Take(kBlock * head.width)),
        keys_transposed(pieces.Take(kBlock * head.width)),
        values_transposed(pieces.Take(kBlock * head.width)),
        dkeys(pieces.Take(kBlock * head.width)),
        dvalues(pieces.Take(kBlock * head.width)),
        scores(pieces.Take(kScores)),
        dscores(pieces.Take(kScores)),
        row_terms(pieces.Take(tokens)) {}

  uint64_t tokens;  // Of whole blocks.
  float* queries;
  float* douts;
  float* dqueries;
  float* keys;
  float* keys_transposed;
  float* values_transposed;
  float* dkeys;
  float* dvalues;
  float* scores;     // Then the probabilities.
  float* dscores;    // Gradients of the probabilities, then of the scores.
  float* row_terms;  // out . dout of each query of the head.
};

// Probabilities and the gradients of the scores, in place, of one row.
HWY_INLINE void ScoreGradRow(size_t visible, float scale, float lse,
                             float row_term, float* score, float* dscore) {
  const FloatTag d;
  const Float factor = hn::Set(d, scale);
  const Float shift = hn::Set(d, lse);
  const Float mean = hn::Set(d, row_term);
  Sweep(visible, [&](size_t i, auto part) HWY_ATTR {
    const Float p =
        hn::Exp(d, hn::MulSub(hn::LoadU(d, score + i), factor, shift));
    const Float ds =
        hn::Mul(hn::Mul(p, factor), hn::Sub(hn::LoadU(d, dscore + i), mean));
    hn::StoreU(part.Or(d, p, hn::Zero(d)), d, score + i);
    hn::StoreU(part.Or(d, ds, hn::Zero(d)), d, dscore + i);
  });
  const size_t lanes = hn::Lanes(d);
  const size_t written = (visible + lanes - 1) / lanes * lanes;
  std::fill(score + written, score + kBlock, 0.0f);
  std::fill(dscore + written, dscore + kBlock, 0.0f);
}

// to (rows, columns) += from, or = from.
void StoreBlock(size_t rows, size_t columns, const float* from, size_t width,
                float* to, size_t stride, bool add) {
  const FloatTag d;
  for (size_t r = 0; r < rows; ++r) {
    const float* const row = from + r * width;
    float* const target = to + r * stride;
    Sweep(columns, [&](size_t i, auto part) HWY_ATTR {
      const Float before = add ? part.Load(d, target + i) : hn::Zero(d);
      part.Store(hn::Add(hn::LoadU(d, row + i), before), d, target + i);
    });
  }
}

// The block of queries from `first` against the block of keys from `key`.
void GradPair(const Head& head, uint64_t first, uint64_t key, const float* lse,
              const GradBlocks& blocks) {
  const uint64_t width = head.width;
  const uint64_t rows = head.RowsFrom(first);
  const bool diagonal = key == first;
  const float* const queries = blocks.queries + first * width;
  const float* const douts = blocks.douts + first * width;
  const Causal columns = diagonal ? Causal::kColumnsToRow : Causal::kAll;
  BlockProduct(columns, kBlock, width, kBlock, {queries, width, 1},
               blocks.keys_transposed, kBlock, blocks.scores, kBlock, false);
  BlockProduct(columns, kBlock, width, kBlock, {douts, width, 1},
               blocks.values_transposed, kBlock, blocks.dscores, kBlock, false);
  for (uint64_t r = 0; r < rows; ++r) {
    ScoreGradRow(diagonal ? r + 1 : kBlock, head.scale,
                 lse[head.lse + first + r], blocks.row_terms[first + r],
                 blocks.scores + r * kBlock, blocks.dscores + r * kBlock);
  }
  std::fill(blocks.scores + rows * kBlock, blocks.scores + kScores, 0.0f);
  std::fill(blocks.dscores + rows * kBlock, blocks.dscores + kScores, 0.0f);
  // The first queries that see these keys are those of the diagonal.
  const Causal from_row = diagonal ? Causal::kTermsFromRow : Causal::kAll;
  BlockProduct(from_row, kBlock, kBlock, width, {blocks.scores, 1, kBlock},
               douts, width, blocks.dvalues, width, !diagonal);
  BlockProduct(from_row, kBlock, kBlock, width, {blocks.dscores, 1, kBlock},
               queries, width, blocks.dkeys, width, !diagonal);
  BlockProduct(diagonal ? Causal::kTermsToRow : Causal::kAll, kBlock, kBlock,
               width, {blocks.dscores, kBlock, 1}, blocks.keys, width,
               blocks.dqueries + first * width, width, key > 0);
}

void RowTerms(const Head& head, const float* out, const float* dout,
              float* terms) {
  const FloatTag d;
  for (uint64_t t = 0; t < head.tokens; ++t) {
    const uint64_t at = head.out + t * head.out_stride;
    Float sum = hn::Zero(d);
    Sweep(head.size, [&](size_t i, auto part) HWY_ATTR {
      sum = hn::MulAdd(part.Load(d, out + at + i), part.Load(d, dout + at + i),
                       sum);
    });
    terms[t] = hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

void AttentionGrad(const AttentionShape& shape, uint64_t sequence,
                   uint64_t kv_head, const float* q, const float* k,
                   const float* v, const float* out, const float* lse,
                   const float* dout, float* dq, float* dk, float* dv,
                   float* scratch) {
  for (uint64_t member = 0; member < shape.heads / shape.kv_heads; ++member) {
    const Head head(shape, sequence, kv_head, member);
    const GradBlocks blocks(head, Pieces(scratch));
    RowTerms(head, out, dout, blocks.row_terms);
    Pack(shape.tokens, head.size, q + head.q, head.q_stride, blocks.tokens,
         head.width, blocks.queries);
    Pack(shape.tokens, head.size, dout + head.out, head.out_stride,
         blocks.tokens, head.width, blocks.douts);
    for (uint64_t key = 0; key < shape.tokens; key += kBlock) {
      const uint64_t rows = head.RowsFrom(key);
      const uint64_t at = head.kv + key * head.kv_stride;
      Pack(rows, head.size, k + at, head.kv_stride, kBlock, head.width,
           blocks.keys);
      PackTransposed(rows, head.size, k + at, head.kv_stride, kBlock,
                     head.width, blocks.keys_transposed);
      PackTransposed(rows, head.size, v + at, head.kv_stride, kBlock,
                     head.width, blocks.values_transposed);
      for (uint64_t first = key; first < shape.tokens; first += kBlock) {
        GradPair(head, first, key, lse, blocks);
      }
      StoreBlock(rows, head.size, blocks.dkeys, head.width, dk + at,
                 head.kv_stride, member > 0);
      StoreBlock(rows, head.size, blocks.dvalues, head.width, dv + at,
                 head.kv_stride, member > 0);
    }
    StoreBlock(shape.tokens, head.size, blocks.dqueries, head.width,
               dq + head.q, head.q_stride, false);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast {

HWY_EXPORT(Attention);
HWY_EXPORT(AttentionGrad);

uint64_t AttentionTaskScratchBytes(const AttentionShape& shape) {
  const uint64_t width = RoundUp(shape.head_size, kPad);
  const uint64_t floats = 2 * RoundUp(shape.tokens, kBlock) * width +
                          2 * kBlock * width + kScores + 2 * kBlock;
  return floats * sizeof(float);
}

void AttentionTask(const AttentionShape& shape, uint64_t sequence,
                   uint64_t kv_head, const float* q, const float* k,
                   const float* v, float* out, float* lse, float* scratch) {
  HWY_DYNAMIC_DISPATCH(Attention)
  (shape, sequence, kv_head, q, k, v, out, lse, scratch);
}

uint64_t AttentionGradTaskScratchBytes(const AttentionShape& shape) {
  const uint64_t width = RoundUp(shape.head_size, kPad);
  const uint64_t tokens = RoundUp(shape.tokens, kBlock);
  const uint64_t floats =
      3 * tokens * width + 5 * kBlock * width + 2 * kScores + tokens;
  return floats * sizeof(float);
}

void AttentionGradTask(const AttentionShape& shape, uint64_t sequence,
                       uint64_t kv_head, const float* q, const float* k,
                       const float* v, const float* out, const float* lse,
                       const float* dout, float* dq, float* dk, float* dv,
                       float* scratch) {
  HWY_DYNAMIC_DISPATCH(AttentionGrad)
  (shape, sequence, kv_head, q, k, v, out, lse, dout, dq, dk, dv, scratch);
}

}  // namespace ballast
#endif  // HWY_ONCE
