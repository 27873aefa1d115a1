// SPDX-License-Identifier: Apache-2.0
#include "kernels/update.h"

#include <algorithm>

#include "common/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/update.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"
#include "kernels/sweep-inl.h"

#ifndef BALLAST_KERNELS_UPDATE_ONCE_
#define BALLAST_KERNELS_UPDATE_ONCE_
namespace ballast {
namespace {

// Sixteen running sums whatever the width of a vector, so that the order of the
// additions depends on the length alone. A square of an fp32 is exact in fp64.
constexpr size_t kStreams = 16;

struct Sixteen {
  double sums[kStreams] = {};
  uint64_t non_finite = 0;
};

}  // namespace
}  // namespace ballast
#endif  // BALLAST_KERNELS_UPDATE_ONCE_

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {

void AccumulateInto(size_t count, const float* term, float* total) {
  const FloatTag d;
  Sweep(count, [&](size_t i, auto part) HWY_ATTR {
    part.Store(hn::Add(part.Load(d, total + i), part.Load(d, term + i)), d,
               total + i);
  });
}

// The same rounding as ToBF16 (common/dtype.h).
template <class Part>
HWY_INLINE void StoreBF16(Part part, Float value, uint16_t* to) {
  const hn::RebindToUnsigned<FloatTag> bits_tag;
  const hn::RebindToSigned<FloatTag> signed_tag;
  const hn::Rebind<uint16_t, FloatTag> narrow;
  const auto bits = hn::BitCast(bits_tag, value);
  const auto high = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(high, hn::Set(bits_tag, 1));
  const auto rounded = hn::ShiftRight<16>(
      hn::Add(bits, hn::Add(odd, hn::Set(bits_tag, 0x7fff))));
  const auto quiet_nan = hn::Or(high, hn::Set(bits_tag, 0x40));
  const auto is_nan = hn::RebindMask(bits_tag, hn::IsNaN(value));
  const auto chosen = hn::IfThenElse(is_nan, quiet_nan, rounded);
  part.Store(hn::DemoteTo(narrow, hn::BitCast(signed_tag, chosen)), narrow, to);
}

void Cast(size_t count, const float* in, uint16_t* out) {
  const FloatTag d;
  Sweep(count, [&](size_t i, auto part) HWY_ATTR {
    StoreBF16(part, part.Load(d, in + i), out + i);
  });
}

// `count` is a multiple of kStreams.
void AddStats(size_t count, const float* block, Sixteen& stats) {
  const hn::CappedTag<double, 8> wide;
  const hn::Rebind<float, decltype(wide)> narrow;
  using Wide = hn::Vec<decltype(wide)>;
  constexpr size_t kLanes = hn::MaxLanes(wide);
  constexpr size_t kVectors = kStreams / kLanes;
  Wide sums[kVectors];
  for (size_t j = 0; j < kVectors; ++j) {
    sums[j] = hn::LoadU(wide, stats.sums + j * kLanes);
  }
  uint64_t finite = 0;
  for (size_t i = 0; i < count; i += kStreams) {
    for (size_t j = 0; j < kVectors; ++j) {
      const auto value = hn::LoadU(narrow, block + i + j * kLanes);
      const auto is_finite = hn::IsFinite(value);
      finite += hn::CountTrue(narrow, is_finite);
      const Wide x = hn::PromoteTo(wide, hn::IfThenElseZero(is_finite, value));
      sums[j] = hn::MulAdd(x, x, sums[j]);
    }
  }
  for (size_t j = 0; j < kVectors; ++j) {
    hn::StoreU(sums[j], wide, stats.sums + j * kLanes);
  }
  stats.non_finite += count - finite;
}

void AdamW(const AdamWScalars& scalars, size_t count, const float* grad,
           float* param, float* exp_avg, float* exp_avg_sq,
           uint16_t* served_bf16) {
  const FloatTag d;
  const Float grad_scale = hn::Set(d, scalars.grad_scale);
  const Float rate = hn::Set(d, scalars.learning_rate);
  const Float beta1 = hn::Set(d, scalars.beta1);
  const Float beta2 = hn::Set(d, scalars.beta2);
  const Float rest1 = hn::Set(d, 1 - scalars.beta1);
  const Float rest2 = hn::Set(d, 1 - scalars.beta2);
  const Float epsilon = hn::Set(d, scalars.epsilon);
  const Float decay = hn::Set(d, scalars.weight_decay);
  const Float bias1 = hn::Set(d, scalars.bias1);
  const Float bias2 = hn::Set(d, scalars.bias2);
  Sweep(count, [&](size_t i, auto part) HWY_ATTR {
    const Float g = hn::Mul(part.Load(d, grad + i), grad_scale);
    const Float m =
        hn::MulAdd(beta1, part.Load(d, exp_avg + i), hn::Mul(rest1, g));
    const Float v = hn::MulAdd(beta2, part.Load(d, exp_avg_sq + i),
                               hn::Mul(hn::Mul(rest2, g), g));
    part.Store(m, d, exp_avg + i);
    part.Store(v, d, exp_avg_sq + i);
    const Float root = hn::Add(hn::Sqrt(hn::Div(v, bias2)), epsilon);
    const Float direction = hn::Div(hn::Div(m, bias1), root);
    const Float p = part.Load(d, param + i);
    const Float next = hn::NegMulAdd(rate, hn::MulAdd(decay, p, direction), p);
    part.Store(next, d, param + i);
    if (served_bf16 != nullptr) StoreBF16(part, next, served_bf16 + i);
  });
}

void Sgd(const SgdScalars& scalars, size_t count, const float* grad,
         float* param, float* momentum_buffer, uint16_t* served_bf16) {
  const FloatTag d;
  const Float grad_scale = hn::Set(d, scalars.grad_scale);
  const Float rate = hn::Set(d, scalars.learning_rate);
  const Float momentum = hn::Set(d, scalars.momentum);
  const Float decay = hn::Set(d, scalars.weight_decay);
  Sweep(count, [&](size_t i, auto part) HWY_ATTR {
    const Float p = part.Load(d, param + i);
    const Float g =
        hn::MulAdd(part.Load(d, grad + i), grad_scale, hn::Mul(decay, p));
    const Float buffer =
        hn::MulAdd(momentum, part.Load(d, momentum_buffer + i), g);
    part.Store(buffer, d, momentum_buffer + i);
    const Float next = hn::NegMulAdd(rate, buffer, p);
    part.Store(next, d, param + i);
    if (served_bf16 != nullptr) StoreBF16(part, next, served_bf16 + i);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast {

HWY_EXPORT(AccumulateInto);
HWY_EXPORT(Cast);
HWY_EXPORT(AddStats);
HWY_EXPORT(AdamW);
HWY_EXPORT(Sgd);

void AccumulateCpu(absl::Span<const float> term, absl::Span<float> total) {
  BALLAST_CHECK(term.size() == total.size());
  HWY_DYNAMIC_DISPATCH(AccumulateInto)(term.size(), term.data(), total.data());
}

BlockStats BlockStatsCpu(absl::Span<const float> block) {
  Sixteen stats;
  const size_t whole = block.size() / kStreams * kStreams;
  HWY_DYNAMIC_DISPATCH(AddStats)(whole, block.data(), stats);
  float rest[kStreams] = {};
  std::copy(block.begin() + static_cast<std::ptrdiff_t>(whole), block.end(),
            rest);
  HWY_DYNAMIC_DISPATCH(AddStats)(kStreams, rest, stats);
  for (size_t half = kStreams / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) stats.sums[j] += stats.sums[j + half];
  }
  return {stats.sums[0], stats.non_finite};
}

void AdamWCpu(const AdamWScalars& scalars, absl::Span<const float> grad,
              absl::Span<float> param, absl::Span<float> exp_avg,
              absl::Span<float> exp_avg_sq, absl::Span<uint16_t> served_bf16) {
  BALLAST_CHECK(param.size() == grad.size() && exp_avg.size() == grad.size());
  BALLAST_CHECK(exp_avg_sq.size() == grad.size());
  BALLAST_CHECK(served_bf16.empty() || served_bf16.size() == grad.size());
  HWY_DYNAMIC_DISPATCH(AdamW)
  (scalars, grad.size(), grad.data(), param.data(), exp_avg.data(),
   exp_avg_sq.data(), served_bf16.empty() ? nullptr : served_bf16.data());
}

void SgdCpu(const SgdScalars& scalars, absl::Span<const float> grad,
            absl::Span<float> param, absl::Span<float> momentum_buffer,
            absl::Span<uint16_t> served_bf16) {
  BALLAST_CHECK(param.size() == grad.size());
  BALLAST_CHECK(momentum_buffer.size() == grad.size());
  BALLAST_CHECK(served_bf16.empty() || served_bf16.size() == grad.size());
  HWY_DYNAMIC_DISPATCH(Sgd)
  (scalars, grad.size(), grad.data(), param.data(), momentum_buffer.data(),
   served_bf16.empty() ? nullptr : served_bf16.data());
}

void CastToBF16Cpu(absl::Span<const float> in, absl::Span<uint16_t> out) {
  BALLAST_CHECK(in.size() == out.size());
  HWY_DYNAMIC_DISPATCH(Cast)(in.size(), in.data(), out.data());
}

}  // namespace ballast
#endif  // HWY_ONCE
