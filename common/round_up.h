// SPDX-License-Identifier: Apache-2.0
// Sizes in whole pages, vectors and blocks.

#pragma once

#include <cstdint>

namespace ballast {

// The smallest multiple of `multiple` (above 0) that is at least `value`; the
// sum of both must not overflow.
constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace ballast
