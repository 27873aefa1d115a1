// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/product_rates.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>

#include "common/check.h"
#include "common/clock.h"
#include "common/random.h"
#include "kernels/cpu_kernels.h"

namespace ballast {
namespace {

constexpr uint64_t kRows = 2048;

// 64-byte aligned floats with values around 1, so that no product is denormal.
class Matrix {
 public:
  explicit Matrix(uint64_t bytes)
      : data_(static_cast<float*>(
            std::aligned_alloc(64, (bytes + 63) / 64 * 64))) {
    BALLAST_CHECK(data_ != nullptr);
    for (uint64_t i = 0; i < bytes / sizeof(float); ++i) {
      data_.get()[i] =
          static_cast<float>(UnitInterval(Philox(1, i, 0)[0])) - 0.5f;
    }
  }
  float* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }  // NOLINT
  };
  std::unique_ptr<float, Free> data_;
};

double MedianGflops(const LinearShape& shape, absl::Duration each,
                    const std::function<void()>& product) {
  const double flops = 2.0 * static_cast<double>(shape.rows) *
                       static_cast<double>(shape.in) *
                       static_cast<double>(shape.out);
  product();  // Warm up: creates the primitive, touches the memory.
  std::vector<double> seconds;
  const absl::Time end = MonotonicNow() + each;
  while (seconds.size() < 3 || MonotonicNow() < end) {
    const absl::Time begin = MonotonicNow();
    product();
    seconds.push_back(absl::ToDoubleSeconds(MonotonicNow() - begin));
  }
  std::nth_element(seconds.begin(),
                   seconds.begin() + static_cast<int64_t>(seconds.size() / 2),
                   seconds.end());
  return flops / seconds[seconds.size() / 2] * 1e-9;
}

void MeasureShape(Kernels* kernels, const LinearShape& shape,
                  absl::Duration each, std::vector<ProductRate>* rates) {
  const Matrix x(shape.rows * shape.in * sizeof(float));
  const Matrix y(shape.rows * shape.out * sizeof(float));
  const Matrix weight(shape.in * shape.out * sizeof(float));
  const Matrix bias(shape.out * sizeof(float));
  const Matrix scratch(
      std::max({kernels->LinearScratchBytes(shape),
                kernels->LinearGradInputScratchBytes(shape),
                kernels->LinearGradWeightScratchBytes(shape), uint64_t{64}}));
  rates->push_back({shape, "forward", MedianGflops(shape, each, [&] {
                      kernels->Linear(shape, x.get(), weight.get(), bias.get(),
                                      y.get(), scratch.get());
                    })});
  rates->push_back({shape, "grad_input", MedianGflops(shape, each, [&] {
                      kernels->LinearGradInput(shape, y.get(), weight.get(),
                                               x.get(), scratch.get());
                    })});
  rates->push_back({shape, "grad_weight", MedianGflops(shape, each, [&] {
                      kernels->LinearGradWeight(shape, x.get(), y.get(),
                                                weight.get(), bias.get(),
                                                scratch.get());
                    })});
}

}  // namespace

std::vector<ProductRate> MeasureProducts(int threads, DType dtype,
                                         absl::Duration each) {
  const std::unique_ptr<Kernels> kernels = MakeCpuKernels(threads);
  std::vector<ProductRate> rates;
  for (const auto& [in, out] : std::vector<std::pair<uint64_t, uint64_t>>{
           {512, 1536}, {512, 512}, {512, 2048}, {2048, 512}}) {
    MeasureShape(kernels.get(),
                 {.rows = kRows, .in = in, .out = out, .dtype = dtype}, each,
                 &rates);
  }
  return rates;
}

double CeilingGflops(const std::vector<ProductRate>& rates) {
  double best = 0;
  for (const ProductRate& rate : rates) {
    best = std::max(best, rate.gflops);
  }
  return best;
}

}  // namespace ballast
