// SPDX-License-Identifier: Apache-2.0
// Products of small matrices that stay in cache, and the packing that they
// want: dense, rows of whole vectors, zeros where there is no element. Include
// it per target, after highway.h.

#if defined(BALLAST_KERNELS_TILE_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_KERNELS_TILE_PRODUCT_INL_H_
#undef BALLAST_KERNELS_TILE_PRODUCT_INL_H_
#else
#define BALLAST_KERNELS_TILE_PRODUCT_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/highway.h"
#include "kernels/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {

// Rows and vectors of c that stay in registers: 16 sums of 32 registers, or 8
// of AVX2's 16, hide the latency of a multiply-add.
constexpr size_t kTileRows = 4;
#if HWY_TARGET == HWY_AVX2
constexpr size_t kTileVectors = 2;
#else
constexpr size_t kTileVectors = 4;
#endif

// What a causal mask leaves of a product on a diagonal block; the rest of c is
// not written, the rest of a and b not read.
enum class Causal {
  kAll,
  kColumnsToRow,  // c(i, j) with j <= i is wanted (and some beyond).
  kTermsToRow,    // a(i, t) is zero for t > i.
  kTermsFromRow,  // a(i, t) is zero for t < i.
};

// An operand whose element (i, j) is data[i * row + j * column].
struct Operand {
  const float* data;
  size_t row;
  size_t column;
};

// c (kTileRows, kVectors vectors) = or += a * b over terms [first, end).
template <size_t kVectors>
HWY_INLINE void TileProduct(size_t first, size_t end, const Operand& a,
                            const float* b, size_t ldb, float* c, size_t ldc,
                            bool add) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  Float sums[kTileRows][kVectors];
#pragma GCC unroll 4
  for (size_t r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors; ++v) {
      sums[r][v] = add ? hn::LoadU(d, c + r * ldc + v * lanes) : hn::Zero(d);
    }
  }
  for (size_t t = first; t < end; ++t) {
    Float row[kVectors];
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors; ++v) {
      row[v] = hn::LoadU(d, b + t * ldb + v * lanes);
    }
#pragma GCC unroll 4
    for (size_t r = 0; r < kTileRows; ++r) {
      const Float factor = hn::Set(d, a.data[r * a.row + t * a.column]);
#pragma GCC unroll 4
      for (size_t v = 0; v < kVectors; ++v) {
        sums[r][v] = hn::MulAdd(factor, row[v], sums[r][v]);
      }
    }
  }
#pragma GCC unroll 4
  for (size_t r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors; ++v) {
      hn::StoreU(sums[r][v], d, c + r * ldc + v * lanes);
    }
  }
}

// c (m, n) = or += a (m, k) * b (k, n). m is a multiple of kTileRows, n of the
// lanes; b and c are dense rows of ldb and ldc.
inline void BlockProduct(Causal causal, size_t m, size_t k, size_t n,
                         const Operand& a, const float* b, size_t ldb, float* c,
                         size_t ldc, bool add) {
  const size_t lanes = hn::Lanes(FloatTag());
  for (size_t i = 0; i < m; i += kTileRows) {
    const size_t past = i + kTileRows;
    const size_t first = causal == Causal::kTermsFromRow ? i : 0;
    const size_t end = causal == Causal::kTermsToRow ? std::min(k, past) : k;
    const size_t columns = causal == Causal::kColumnsToRow
                               ? std::min(n, (past + lanes - 1) / lanes * lanes)
                               : n;
    const Operand rows = {a.data + i * a.row, a.row, a.column};
    float* const to = c + i * ldc;
    size_t j = 0;
    for (; j + kTileVectors * lanes <= columns; j += kTileVectors * lanes) {
      TileProduct<kTileVectors>(first, end, rows, b + j, ldb, to + j, ldc, add);
    }
    for (; j + 2 * lanes <= columns; j += 2 * lanes) {
      TileProduct<2>(first, end, rows, b + j, ldb, to + j, ldc, add);
    }
    for (; j < columns; j += lanes) {
      TileProduct<1>(first, end, rows, b + j, ldb, to + j, ldc, add);
    }
  }
}

// to (block_rows, width) = from (rows, columns), zeros beyond it.
inline void Pack(size_t rows, size_t columns, const float* from, size_t stride,
                 size_t block_rows, size_t width, float* to) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  for (size_t r = 0; r < rows; ++r) {
    const float* const row = from + r * stride;
    Sweep(columns, [&](size_t i, auto part) HWY_ATTR {
      hn::StoreU(part.Load(d, row + i), d, to + r * width + i);
    });
    const size_t written = (columns + lanes - 1) / lanes * lanes;
    std::fill(to + r * width + written, to + (r + 1) * width, 0.0f);
  }
  std::fill(to + rows * width, to + block_rows * width, 0.0f);
}

// Four rows of vectors become columns: lane l of the result [j][4 b + l] is
// element 4 b + j of row l.
HWY_INLINE void TransposeFour(const Float (&rows)[4], Float (&columns)[4]) {
  const hn::Repartition<double, FloatTag> pairs;
  const FloatTag d;
  const auto low01 =
      hn::BitCast(pairs, hn::InterleaveLower(d, rows[0], rows[1]));
  const auto low23 =
      hn::BitCast(pairs, hn::InterleaveLower(d, rows[2], rows[3]));
  const auto high01 =
      hn::BitCast(pairs, hn::InterleaveUpper(d, rows[0], rows[1]));
  const auto high23 =
      hn::BitCast(pairs, hn::InterleaveUpper(d, rows[2], rows[3]));
  columns[0] = hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23));
  columns[1] = hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23));
  columns[2] = hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23));
  columns[3] = hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23));
}

// to (width, block_rows) = the transpose of from (rows, columns), zeros beyond
// it. block_rows is a multiple of 4, width one of the lanes.
inline void PackTransposed(size_t rows, size_t columns, const float* from,
                           size_t stride, size_t block_rows, size_t width,
                           float* to) {
  const FloatTag d;
  const hn::CappedTag<float, 4> four;
  const size_t lanes = hn::Lanes(d);
  std::fill(to + columns * block_rows, to + width * block_rows, 0.0f);
  for (size_t r = 0; r < block_rows; r += 4) {
    Sweep(columns, [&](size_t i, auto part) HWY_ATTR {
      Float in[4];
      for (size_t l = 0; l < 4; ++l) {
        in[l] = r + l < rows ? part.Load(d, from + (r + l) * stride + i)
                             : hn::Zero(d);
      }
      Float out[4];
      TransposeFour(in, out);
      HWY_ALIGN float lines[4][hn::MaxLanes(FloatTag())];
      for (size_t j = 0; j < 4; ++j) hn::Store(out[j], d, lines[j]);
      const size_t present = std::min(lanes, columns - i);
      for (size_t c = 0; c < present; ++c) {
        hn::StoreU(hn::LoadU(four, lines[c % 4] + c / 4 * 4), four,
                   to + (i + c) * block_rows + r);
      }
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#endif  // BALLAST_KERNELS_TILE_PRODUCT_INL_H_
