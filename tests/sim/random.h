// SPDX-License-Identifier: Apache-2.0
// The simulator's dice: one 64-bit seed gives one sequence, on every machine.
// Parts that must not disturb each other (the job, the faults, the network)
// each fork their own.

#pragma once

#include <cmath>
#include <cstdint>

#include "absl/time/time.h"

namespace ballast::sim {

// SplitMix64's finaliser: a bijection in which every input bit matters.
constexpr uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// Not thread-safe.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // Another sequence, which depends on the seed and `purpose` alone.
  Random Fork(uint64_t purpose) const {
    return Random(Mix(state_ ^ Mix(purpose)));
  }
  uint64_t Next() { return Mix(state_ += 0x9e3779b97f4a7c15u); }
  // 0..bound-1; bound > 0.
  uint64_t Below(uint64_t bound) { return Next() % bound; }
  // low..high, both included.
  uint64_t Between(uint64_t low, uint64_t high) {
    return low + Below(high - low + 1);
  }
  double Fraction() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  bool Chance(double probability) { return Fraction() < probability; }
  absl::Duration Between(absl::Duration low, absl::Duration high) {
    return low + (high - low) * Fraction();
  }
  // Every order of magnitude between the two is as likely as another.
  absl::Duration Scaled(absl::Duration low, absl::Duration high) {
    return low * std::pow(high / low, Fraction());
  }

 private:
  uint64_t state_;
};

}  // namespace ballast::sim
