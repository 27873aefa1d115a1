// SPDX-License-Identifier: Apache-2.0
// What the kernel benchmarks share: memory as the worker's arena has it, and
// the ceiling that results are set against.

#pragma once

#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>

#include "common/check.h"
#include "common/dtype.h"

namespace ballast::bench {

// Touched, on huge pages where the kernel gives them.
class Arena {
 public:
  explicit Arena(uint64_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    BALLAST_CHECK(data_ != MAP_FAILED);
    madvise(data_, bytes, MADV_HUGEPAGE);
  }
  ~Arena() { munmap(data_, bytes_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* Take(uint64_t bytes) {
    auto* const piece = static_cast<std::byte*>(data_) + used_;
    used_ += (bytes + 63) / 64 * 64;
    BALLAST_CHECK(used_ <= bytes_);
    return piece;
  }
  // Values in (-1, 1) that repeat with a period of a prime.
  float* Floats(uint64_t count) {
    auto* const values = static_cast<float*>(Take(count * sizeof(float)));
    for (uint64_t i = 0; i < count; ++i) {
      values[i] = static_cast<float>(i % 2003) / 1001.5f - 1.0f;
    }
    return values;
  }

 private:
  void* data_;
  const uint64_t bytes_;
  uint64_t used_ = 0;
};

inline double Seconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The best rate in GFLOP/s that oneDNN itself reaches in this process, on
// `threads` threads with both operands packed beforehand: measured once per
// type, as neighbours move it from run to run.
double CeilingGflops(DType dtype, int threads);

}  // namespace ballast::bench
