// SPDX-License-Identifier: Apache-2.0
// An exact sum of doubles, so that neither the order of the terms nor the way
// they were split over servers changes a bit of the total. A fixed-point
// integer wide enough for every finite double: Kulisch, "Computer Arithmetic
// and Validity" (2013), chapter 8, on long accumulators.

#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast {

// Not thread-safe.
class ExactSum {
 public:
  // A term that is not finite makes the sum not finite for good.
  void Add(double term);
  void Add(const ExactSum& other);

  // The total rounded to nearest even; NaN after a term that was not finite.
  double Round() const;

  // The state as bytes, the same for the same set of terms.
  std::string Encode() const;
  // Errors: INVALID_ARGUMENT  the bytes are not an encoded sum.
  static absl::StatusOr<ExactSum> Decode(absl::string_view bytes);

 private:
  // Limb i counts units of 2^(32 i - 1074); 68 limbs cover 2^-1074 to 2^1101.
  static constexpr int kLimbs = 68;
  void Normalize();

  // Between normalisations a limb may hold up to 2^63: pending_ counts the
  // additions of 32-bit pieces since the last one.
  std::array<int64_t, kLimbs> limbs_ = {};
  uint32_t pending_ = 0;
  bool finite_ = true;
};

}  // namespace ballast
