// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers: a pure function of key and counter, with no
// state to lose or to save. Philox4x32-10 of Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3" (SC'11), section 4.

#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace ballast {

// Four independent 32-bit words for (key, counter).
inline std::array<uint32_t, 4> Philox(uint64_t key, uint64_t counter_low,
                                      uint64_t counter_high) {
  std::array<uint32_t, 4> x = {static_cast<uint32_t>(counter_low),
                               static_cast<uint32_t>(counter_low >> 32),
                               static_cast<uint32_t>(counter_high),
                               static_cast<uint32_t>(counter_high >> 32)};
  auto k0 = static_cast<uint32_t>(key);
  auto k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * x[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * x[2];
    x = {static_cast<uint32_t>(p1 >> 32) ^ x[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ x[3] ^ k1,
         static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return x;
}

// Uniform in (0, 1), never 0 or 1, from 32 random bits.
inline double UnitInterval(uint32_t bits) {
  return (static_cast<double>(bits) + 0.5) * 0x1p-32;
}

// Standard normal value `index` of stream `stream` under `seed`: Box-Muller on
// the first two words of Philox(seed, index, stream), in double.
inline double Normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const std::array<uint32_t, 4> words = Philox(seed, index, stream);
  const double radius = std::sqrt(-2.0 * std::log(UnitInterval(words[0])));
  return radius * std::cos(2.0 * std::numbers::pi * UnitInterval(words[1]));
}

}  // namespace ballast
