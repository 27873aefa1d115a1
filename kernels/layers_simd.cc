// SPDX-License-Identifier: Apache-2.0
#include "kernels/layers_simd.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/layers_simd.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {

void Add(uint64_t count, const float* a, const float* b, float* y) {
  const FloatTag d;
  Sweep(count, [&](size_t i, auto part) HWY_ATTR {
    part.Store(hn::Add(part.Load(d, a + i), part.Load(d, b + i)), d, y + i);
  });
}

// GELU's tanh form is x * sigmoid(z), z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
// With t = exp(-|z|) <= 1 nothing overflows, and both tails keep their digits.
struct GeluTerms {
  Float t;        // exp(-|z|)
  Float inverse;  // 1 / (1 + t)
  Float sigmoid;
};

constexpr float kGeluLinear = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.0713548162726009f;   // The same times 0.044715.

HWY_INLINE GeluTerms TermsOf(FloatTag d, Float x) {
  const Float one = hn::Set(d, 1.0f);
  const Float slope = hn::MulAdd(hn::Mul(x, x), hn::Set(d, kGeluCubic),
                                 hn::Set(d, kGeluLinear));
  const Float t = hn::Exp(d, hn::Neg(hn::Abs(hn::Mul(x, slope))));
  const Float inverse = hn::Div(one, hn::Add(one, t));
  const auto negative = hn::Lt(x, hn::Zero(d));
  return {t, inverse, hn::Mul(inverse, hn::IfThenElse(negative, t, one))};
}

void Gelu(uint64_t count, const float* x, float* y) {
  const FloatTag d;
  Sweep(count, [&](size_t i, auto part) HWY_ATTR {
    const Float in = part.Load(d, x + i);
    part.Store(hn::Mul(in, TermsOf(d, in).sigmoid), d, y + i);
  });
}

// gelu' = s + x s (1 - s) z', and s (1 - s) = t / (1 + t)^2.
void GeluGrad(uint64_t count, const float* x, const float* dy, float* dx) {
  const FloatTag d;
  Sweep(count, [&](size_t i, auto part) HWY_ATTR {
    const Float in = part.Load(d, x + i);
    const GeluTerms terms = TermsOf(d, in);
    const Float spread =
        hn::Mul(hn::Mul(terms.t, terms.inverse), hn::Mul(terms.inverse, in));
    const Float slope = hn::MulAdd(hn::Mul(in, in), hn::Set(d, 3 * kGeluCubic),
                                   hn::Set(d, kGeluLinear));
    // Far out t is 0 while the slope may overflow; their product is 0 there.
    const Float bend =
        hn::IfThenZeroElse(hn::Eq(spread, hn::Zero(d)), hn::Mul(spread, slope));
    const Float grad = hn::Add(terms.sigmoid, bend);
    part.Store(hn::Mul(part.Load(d, dy + i), grad), d, dx + i);
  });
}

void NormRow(uint64_t width, float epsilon, const float* x, const float* gamma,
             const float* beta, float* y, float* mean, float* rstd) {
  const FloatTag d;
  const float inverse_width = 1.0f / static_cast<float>(width);
  Float sum = hn::Zero(d);
  Sweep(width, [&](size_t i, auto part)
                   HWY_ATTR { sum = hn::Add(sum, part.Load(d, x + i)); });
  *mean = hn::GetLane(hn::SumOfLanes(d, sum)) * inverse_width;
  const Float center = hn::Set(d, *mean);
  Float squares = hn::Zero(d);
  Sweep(width, [&](size_t i, auto part) HWY_ATTR {
    // Lanes beyond the row count as the mean.
    const Float in = part.Or(d, part.Load(d, x + i), center);
    const Float distance = hn::Sub(in, center);
    squares = hn::MulAdd(distance, distance, squares);
  });
  const float variance =
      hn::GetLane(hn::SumOfLanes(d, squares)) * inverse_width;
  *rstd = 1.0f / std::sqrt(variance + epsilon);
  const Float scale = hn::Set(d, *rstd);
  Sweep(width, [&](size_t i, auto part) HWY_ATTR {
    const Float normal = hn::Mul(hn::Sub(part.Load(d, x + i), center), scale);
    part.Store(
        hn::MulAdd(normal, part.Load(d, gamma + i), part.Load(d, beta + i)), d,
        y + i);
  });
}

void LayerNorm(uint64_t rows, uint64_t width, float epsilon, const float* x,
               const float* gamma, const float* beta, float* y, float* mean,
               float* rstd) {
  for (uint64_t r = 0; r < rows; ++r) {
    NormRow(width, epsilon, x + r * width, gamma, beta, y + r * width, mean + r,
            rstd + r);
  }
}

// Adds to dgamma and dbeta.
void NormGradRow(uint64_t width, const float* x, const float* gamma, float mean,
                 float rstd, const float* dy, const float* dx_add, float* dx,
                 float* dgamma, float* dbeta) {
  const FloatTag d;
  const Float center = hn::Set(d, mean);
  const Float scale = hn::Set(d, rstd);
  Float sum = hn::Zero(d);
  Float sum_scaled = hn::Zero(d);
  Sweep(width, [&](size_t i, auto part) HWY_ATTR {
    const Float grad = part.Load(d, dy + i);
    const Float normal = hn::Mul(hn::Sub(part.Load(d, x + i), center), scale);
    const Float weighted = hn::Mul(grad, part.Load(d, gamma + i));
    sum = hn::Add(sum, weighted);
    sum_scaled = hn::MulAdd(weighted, normal, sum_scaled);
    part.Store(hn::MulAdd(grad, normal, part.Load(d, dgamma + i)), d,
               dgamma + i);
    part.Store(hn::Add(grad, part.Load(d, dbeta + i)), d, dbeta + i);
  });
  const float inverse_width = 1.0f / static_cast<float>(width);
  const Float mean_sum =
      hn::Set(d, hn::GetLane(hn::SumOfLanes(d, sum)) * inverse_width);
  const Float mean_scaled =
      hn::Set(d, hn::GetLane(hn::SumOfLanes(d, sum_scaled)) * inverse_width);
  Sweep(width, [&](size_t i, auto part) HWY_ATTR {
    const Float normal = hn::Mul(hn::Sub(part.Load(d, x + i), center), scale);
    const Float weighted =
        hn::Mul(part.Load(d, dy + i), part.Load(d, gamma + i));
    const Float through =
        hn::NegMulAdd(normal, mean_scaled, hn::Sub(weighted, mean_sum));
    const Float other =
        dx_add != nullptr ? part.Load(d, dx_add + i) : hn::Zero(d);
    part.Store(hn::MulAdd(through, scale, other), d, dx + i);
  });
}

void LayerNormGrad(uint64_t rows, uint64_t width, const float* x,
                   const float* gamma, const float* mean, const float* rstd,
                   const float* dy, const float* dx_add, float* dx,
                   float* dgamma, float* dbeta) {
  std::fill_n(dgamma, width, 0.0f);
  std::fill_n(dbeta, width, 0.0f);
  for (uint64_t r = 0; r < rows; ++r) {
    const uint64_t at = r * width;
    NormGradRow(width, x + at, gamma, mean[r], rstd[r], dy + at,
                dx_add != nullptr ? dx_add + at : nullptr, dx + at, dgamma,
                dbeta);
  }
}

void SumColumns(uint64_t rows, uint64_t stride, uint64_t columns,
                const float* in, float* sums) {
  const FloatTag d;
  std::copy_n(in, columns, sums);
  for (uint64_t r = 1; r < rows; ++r) {
    const float* row = in + r * stride;
    Sweep(columns, [&](size_t i, auto part) HWY_ATTR {
      part.Store(hn::Add(part.Load(d, sums + i), part.Load(d, row + i)), d,
                 sums + i);
    });
  }
}

// Sum of exp(logits - top) in fp64; `keep` stores the terms over the logits.
template <bool keep>
double SumExp(uint64_t vocab, float top, float* logits) {
  const FloatTag d;
  const hn::Repartition<double, FloatTag> wide;
  const hn::Half<FloatTag> half;
  const Float shift = hn::Set(d, top);
  auto low = hn::Zero(wide);
  auto high = hn::Zero(wide);
  Sweep(vocab, [&](size_t i, auto part) HWY_ATTR {
    const Float term = hn::Exp(d, hn::Sub(part.Load(d, logits + i), shift));
    if constexpr (keep) part.Store(term, d, logits + i);
    const Float counted = part.Or(d, term, hn::Zero(d));
    low = hn::Add(low, hn::PromoteTo(wide, hn::LowerHalf(half, counted)));
    high = hn::Add(high, hn::PromoteTo(wide, hn::UpperHalf(half, counted)));
  });
  return hn::GetLane(hn::SumOfLanes(wide, hn::Add(low, high)));
}

double CrossEntropy(uint64_t vocab, uint32_t target, bool with_grad,
                    float* logits) {
  const FloatTag d;
  Float top_lanes = hn::Set(d, -std::numeric_limits<float>::infinity());
  Sweep(vocab, [&](size_t i, auto part) HWY_ATTR {
    top_lanes =
        hn::Max(top_lanes, part.Or(d, part.Load(d, logits + i), top_lanes));
  });
  const float top = hn::GetLane(hn::MaxOfLanes(d, top_lanes));
  const double margin = static_cast<double>(top) - logits[target];
  const double sum = with_grad ? SumExp<true>(vocab, top, logits)
                               : SumExp<false>(vocab, top, logits);
  if (with_grad) {
    const Float inverse = hn::Set(d, static_cast<float>(1.0 / sum));
    Sweep(vocab, [&](size_t i, auto part) HWY_ATTR {
      part.Store(hn::Mul(part.Load(d, logits + i), inverse), d, logits + i);
    });
    logits[target] -= 1.0f;
  }
  return std::log(sum) + margin;
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast {

HWY_EXPORT(Add);
HWY_EXPORT(Gelu);
HWY_EXPORT(GeluGrad);
HWY_EXPORT(LayerNorm);
HWY_EXPORT(LayerNormGrad);
HWY_EXPORT(SumColumns);
HWY_EXPORT(CrossEntropy);

void AddPiece(uint64_t count, const float* a, const float* b, float* y) {
  HWY_DYNAMIC_DISPATCH(Add)(count, a, b, y);
}

void GeluPiece(uint64_t count, const float* x, float* y) {
  HWY_DYNAMIC_DISPATCH(Gelu)(count, x, y);
}

void GeluGradPiece(uint64_t count, const float* x, const float* dy, float* dx) {
  HWY_DYNAMIC_DISPATCH(GeluGrad)(count, x, dy, dx);
}

void LayerNormRows(uint64_t rows, uint64_t width, float epsilon, const float* x,
                   const float* gamma, const float* beta, float* y, float* mean,
                   float* rstd) {
  HWY_DYNAMIC_DISPATCH(LayerNorm)
  (rows, width, epsilon, x, gamma, beta, y, mean, rstd);
}

void LayerNormGradRows(uint64_t rows, uint64_t width, const float* x,
                       const float* gamma, const float* mean, const float* rstd,
                       const float* dy, const float* dx_add, float* dx,
                       float* dgamma, float* dbeta) {
  HWY_DYNAMIC_DISPATCH(LayerNormGrad)
  (rows, width, x, gamma, mean, rstd, dy, dx_add, dx, dgamma, dbeta);
}

void ColumnSums(uint64_t rows, uint64_t stride, uint64_t columns,
                const float* in, float* sums) {
  HWY_DYNAMIC_DISPATCH(SumColumns)(rows, stride, columns, in, sums);
}

double CrossEntropyRow(uint64_t vocab, uint32_t target, bool with_grad,
                       float* logits) {
  return HWY_DYNAMIC_DISPATCH(CrossEntropy)(vocab, target, with_grad, logits);
}

}  // namespace ballast
#endif  // HWY_ONCE
