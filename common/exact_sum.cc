// SPDX-License-Identifier: Apache-2.0
#include "common/exact_sum.h"

#include <bit>
#include <cmath>
#include <limits>

#include "common/bytes.h"

namespace ballast {
namespace {

constexpr int64_t kBase = int64_t{1} << 32;
// 2^30 additions of pieces below 2^32 stay below 2^62.
constexpr uint32_t kPendingMax = 1u << 30;

}  // namespace

void ExactSum::Add(double term) {
  if (!std::isfinite(term)) {
    finite_ = false;
    return;
  }
  const auto bits = std::bit_cast<uint64_t>(term);
  const auto exponent = static_cast<int>((bits >> 52) & 0x7ff);
  uint64_t mantissa = bits & ((uint64_t{1} << 52) - 1);
  if (exponent != 0) {
    mantissa |= uint64_t{1} << 52;
  }
  // term = mantissa * 2^(position - 1074).
  const int position = exponent == 0 ? 0 : exponent - 1;
  const auto limb = static_cast<size_t>(position / 32);
  const int shift = position % 32;
  const auto wide = static_cast<unsigned __int128>(mantissa) << shift;
  const int64_t sign = (bits >> 63) != 0 ? -1 : 1;
  for (size_t piece = 0; piece < 3; ++piece) {
    const auto part = static_cast<int64_t>(
        static_cast<uint64_t>(wide >> (32 * piece)) & 0xffffffffu);
    limbs_[limb + piece] += sign * part;
  }
  if (++pending_ >= kPendingMax) {
    Normalize();
  }
}

void ExactSum::Add(const ExactSum& other) {
  ExactSum right = other;
  right.Normalize();
  Normalize();
  for (size_t i = 0; i < kLimbs; ++i) {
    limbs_[i] += right.limbs_[i];
  }
  finite_ = finite_ && right.finite_;
  Normalize();
}

// Every limb but the last ends in [0, 2^32); the last carries the sign.
void ExactSum::Normalize() {
  if (!finite_) {
    limbs_.fill(0);  // Every sum that is not finite is the same.
  }
  int64_t carry = 0;
  for (size_t i = 0; i + 1 < kLimbs; ++i) {
    const int64_t value = limbs_[i] + carry;
    carry = value >> 32;
    limbs_[i] = value - carry * kBase;
  }
  limbs_[kLimbs - 1] += carry;
  pending_ = 0;
}

double ExactSum::Round() const {
  if (!finite_) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  ExactSum value = *this;
  value.Normalize();
  const bool negative = value.limbs_[kLimbs - 1] < 0;
  if (negative) {
    for (int64_t& limb : value.limbs_) {
      limb = -limb;
    }
    value.Normalize();
  }
  if (value.limbs_[kLimbs - 1] != 0) {  // At least 2^1070.
    const double infinity = std::numeric_limits<double>::infinity();
    return negative ? -infinity : infinity;
  }
  int top = kLimbs - 2;
  while (top > 0 && value.limbs_[static_cast<size_t>(top)] == 0) {
    --top;
  }
  // The top 128 bits hold the leading bit, 53 bits and the guard; whatever is
  // below only matters as "not zero" (sticky).
  const int low = top >= 3 ? top - 3 : 0;
  unsigned __int128 window = 0;
  for (int i = low + 3; i >= low; --i) {
    window = (window << 32) |
             static_cast<uint64_t>(value.limbs_[static_cast<size_t>(i)]);
  }
  bool sticky = false;
  for (int i = 0; i < low; ++i) {
    sticky = sticky || value.limbs_[static_cast<size_t>(i)] != 0;
  }
  if (window == 0) {
    return 0.0;
  }
  const auto high_half = static_cast<uint64_t>(window >> 64);
  const int leading =
      high_half != 0 ? 127 - std::countl_zero(high_half)
                     : 63 - std::countl_zero(static_cast<uint64_t>(window));
  int drop = leading - 52;
  uint64_t mantissa = 0;
  if (drop > 0) {
    mantissa = static_cast<uint64_t>(window >> drop);
    const unsigned __int128 rest =
        window & ((static_cast<unsigned __int128>(1) << drop) - 1);
    const unsigned __int128 half = static_cast<unsigned __int128>(1)
                                   << (drop - 1);
    if (rest > half || (rest == half && (sticky || (mantissa & 1) != 0))) {
      ++mantissa;
    }
  } else {
    drop = 0;
    mantissa = static_cast<uint64_t>(window);
  }
  const double magnitude =
      std::ldexp(static_cast<double>(mantissa), drop + 32 * low - 1074);
  return negative ? -magnitude : magnitude;
}

std::string ExactSum::Encode() const {
  ExactSum value = *this;
  value.Normalize();
  ByteWriter writer;
  writer.Put(static_cast<uint8_t>(value.finite_ ? 1 : 0));
  for (const int64_t limb : value.limbs_) {
    writer.Put(limb);
  }
  return writer.Take();
}

absl::StatusOr<ExactSum> ExactSum::Decode(absl::string_view bytes) {
  ByteReader reader(bytes);
  ExactSum sum;
  const auto finite = reader.Get<uint8_t>();
  sum.finite_ = finite == 1;
  for (int64_t& limb : sum.limbs_) {
    limb = reader.Get<int64_t>();
  }
  if (!reader.ok() || reader.remaining() != 0) {
    return absl::InvalidArgumentError(
        "an exact sum has the wrong length; want 545 bytes");
  }
  // 2^64 terms do not fill the last limb; the bound leaves room to add 2^30
  // sums that a damaged message claims.
  const int64_t last = sum.limbs_[kLimbs - 1];
  bool normal = finite <= 1 && last > -kBase && last < kBase;
  for (size_t i = 0; i < kLimbs; ++i) {
    normal = normal && (finite == 1 || sum.limbs_[i] == 0);
    if (i + 1 < kLimbs) {
      normal = normal && sum.limbs_[i] >= 0 && sum.limbs_[i] < kBase;
    }
  }
  if (!normal) {
    return absl::InvalidArgumentError(
        "an exact sum is not in normal form; the message is damaged");
  }
  return sum;
}

}  // namespace ballast
