// SPDX-License-Identifier: Apache-2.0
// What the kernel tests share: numbers, aligned scratch, comparisons and
// central differences.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/random.h"
#include "gtest/gtest.h"

namespace ballast::testing {

// Normal values of stream `stream`; the same on every run.
inline std::vector<float> Values(size_t count, uint64_t stream,
                                 double deviation = 1.0, double mean = 0.0) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(mean + deviation * Normal(7, stream, i));
  }
  return values;
}

inline std::vector<double> Wide(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

// Uninitialised, 64-byte aligned; filled with NaN so that reading what was not
// written shows. Fails the test when more than `bytes` were written.
class Scratch {
 public:
  explicit Scratch(uint64_t bytes)
      : bytes_(bytes),
        data_(static_cast<unsigned char*>(
            ::operator new (bytes + kGuard, std::align_val_t{64}))) {
    std::memset(data_, 0xff, bytes + kGuard);
  }
  ~Scratch() {
    for (uint64_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(data_[bytes_ + i], 0xff) << i << " bytes past " << bytes_;
    }
    ::operator delete (data_, std::align_val_t{64});
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return data_; }

 private:
  static constexpr uint64_t kGuard = 64;
  const uint64_t bytes_;
  unsigned char* const data_;
};

// |got - want| <= absolute + relative * |want|, everywhere.
template <typename Want>
::testing::AssertionResult Near(const std::vector<float>& got,
                                const std::vector<Want>& want, double absolute,
                                double relative = 0) {
  if (got.size() != want.size()) {
    return ::testing::AssertionFailure() << "sizes differ";
  }
  for (size_t i = 0; i < got.size(); ++i) {
    const auto wanted = static_cast<double>(want[i]);
    const double error = std::abs(static_cast<double>(got[i]) - wanted);
    if (!(error <= absolute + relative * std::abs(wanted))) {
      return ::testing::AssertionFailure()
             << "element " << i << " is " << got[i] << ", want " << wanted
             << " within " << absolute + relative * std::abs(wanted);
    }
  }
  return ::testing::AssertionSuccess();
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Central differences of loss(x) for every element of `x`: error O(h^2), and
// rounding 1e-16 / h; at h = 1e-5 both are below 1e-9 for values of order 1.
template <typename Loss>
std::vector<double> Differences(std::vector<double> x, const Loss& loss) {
  constexpr double kStep = 1e-5;
  std::vector<double> slopes(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + kStep;
    const double above = loss(x);
    x[i] = at - kStep;
    const double below = loss(x);
    x[i] = at;
    slopes[i] = (above - below) / (2 * kStep);
  }
  return slopes;
}

inline double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline ::testing::AssertionResult AllNear(const std::vector<double>& got,
                                          const std::vector<double>& want,
                                          double absolute) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (!(std::abs(got[i] - want[i]) <= absolute)) {
      return ::testing::AssertionFailure()
             << "element " << i << " is " << got[i] << ", want " << want[i];
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace ballast::testing
