// SPDX-License-Identifier: Apache-2.0
// Element types and the one conversion between fp32 and bf16: round to nearest,
// ties to even, NaN stays NaN.

#pragma once

#include <bit>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace ballast {

enum class DType : uint8_t { kF32 = 0, kBF16 = 1 };

constexpr uint64_t DTypeBytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : 2;
}

constexpr absl::string_view DTypeName(DType dtype) {
  return dtype == DType::kF32 ? "fp32" : "bf16";
}

// bf16 bits of `value`.
constexpr uint16_t ToBF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

constexpr float FromBF16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

}  // namespace ballast
