// SPDX-License-Identifier: Apache-2.0
// Layers on two threads. Products, attention and a whole GPT-2 block print
// GFLOP/s and `of_ceiling`, their share of the best rate that oneDNN reaches in
// the same process; the block also prints where its milliseconds go. On a busy
// machine compare half the block's CPU time, which is that of both threads.
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "bench/kernels/bench_util.h"
#include "benchmark/benchmark.h"
#include "kernels/cpu_kernels.h"

namespace ballast::bench {
namespace {

constexpr int kThreads = 2;

void Report(benchmark::State& state, double flops, DType dtype) {
  const double ceiling = CeilingGflops(dtype, kThreads) * 1e9;
  const auto iterations = static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9 * iterations,
                                                 benchmark::Counter::kIsRate);
  state.counters["of_ceiling"] = benchmark::Counter(
      flops / ceiling * iterations, benchmark::Counter::kIsRate);
}

enum Product { kForward, kGradInput, kGradWeight };

void BM_Product(benchmark::State& state, Product product, DType dtype,
                bool out_major) {
  const LinearShape s = {static_cast<uint64_t>(state.range(0)),
                         static_cast<uint64_t>(state.range(1)),
                         static_cast<uint64_t>(state.range(2)), out_major,
                         dtype};
  if (dtype == DType::kBF16 && !CpuHasBF16Products()) {
    state.SkipWithError("this processor has no bf16 products");
    return;
  }
  CeilingGflops(dtype, kThreads);
  Arena arena(512 << 20);
  const auto kernels = MakeCpuKernels(kThreads);
  float* const x = arena.Floats(s.rows * s.in);
  float* const y = arena.Floats(s.rows * s.out);
  float* const weight = arena.Floats(s.in * s.out);
  float* const bias = arena.Floats(s.out);
  void* const scratch = arena.Take(std::max(
      {kernels->LinearScratchBytes(s), kernels->LinearGradInputScratchBytes(s),
       kernels->LinearGradWeightScratchBytes(s)}));
  for (auto _ : state) {
    if (product == kForward) {
      kernels->Linear(s, x, weight, bias, y, scratch);
    } else if (product == kGradInput) {
      kernels->LinearGradInput(s, y, weight, x, scratch);
    } else {
      kernels->LinearGradWeight(s, x, y, weight, bias, scratch);
    }
  }
  Report(state, 2.0 * static_cast<double>(s.rows * s.in * s.out), dtype);
}

void Shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "in", "out"})->UseRealTime();
  for (const int64_t rows : {256, 1024, 2048}) {
    bench->Args({rows, 512, 1536})->Args({rows, 512, 2048});
    bench->Args({rows, 512, 512})->Args({rows, 2048, 512});
  }
  bench->Args({1024, 448, 1792})->Args({1024, 448, 256});
}

#define BALLAST_PRODUCT_BENCH(product, dtype, order, out_major)       \
  BENCHMARK_CAPTURE(BM_Product, product##_##dtype##_##order, product, \
                    DType::dtype, out_major)                          \
      ->Apply(Shapes)
BALLAST_PRODUCT_BENCH(kForward, kF32, in_major, false);
BALLAST_PRODUCT_BENCH(kForward, kF32, out_major, true);
BALLAST_PRODUCT_BENCH(kGradInput, kF32, in_major, false);
BALLAST_PRODUCT_BENCH(kGradInput, kF32, out_major, true);
BALLAST_PRODUCT_BENCH(kGradWeight, kF32, in_major, false);
BALLAST_PRODUCT_BENCH(kGradWeight, kF32, out_major, true);
BALLAST_PRODUCT_BENCH(kForward, kBF16, in_major, false);
BALLAST_PRODUCT_BENCH(kForward, kBF16, out_major, true);
BALLAST_PRODUCT_BENCH(kGradInput, kBF16, in_major, false);
BALLAST_PRODUCT_BENCH(kGradInput, kBF16, out_major, true);
BALLAST_PRODUCT_BENCH(kGradWeight, kBF16, in_major, false);
BALLAST_PRODUCT_BENCH(kGradWeight, kBF16, out_major, true);

// Forward and backward of one GPT-2 block, as a training step calls it.
class Block {
 public:
  Block(uint64_t batch, uint64_t tokens, uint64_t width, uint64_t heads,
        DType dtype)
      : rows_(batch * tokens),
        width_(width),
        qkv_{rows_, width, 3 * width, false, dtype},
        out_{rows_, width, width, false, dtype},
        up_{rows_, width, 4 * width, false, dtype},
        down_{rows_, 4 * width, width, false, dtype},
        attention_{batch,         tokens,    heads,     heads,
                   width / heads, 3 * width, 3 * width, width},
        arena_(1ull << 30),
        kernels_(MakeCpuKernels(kThreads)) {
    uint64_t scratch =
        std::max({kernels_->AttentionScratchBytes(attention_),
                  kernels_->AttentionGradScratchBytes(attention_),
                  kernels_->LayerNormGradScratchBytes(rows_, width_)});
    for (const LinearShape& s : {qkv_, out_, up_, down_}) {
      scratch = std::max({scratch, kernels_->LinearScratchBytes(s),
                          kernels_->LinearGradInputScratchBytes(s),
                          kernels_->LinearGradWeightScratchBytes(s)});
    }
    scratch_ = arena_.Take(scratch);
  }

  // Multiply-adds of the products alone, twice: what 6 x parameters counts.
  double ProductFlops() const {
    return 6.0 * 12.0 * static_cast<double>(rows_ * width_ * width_);
  }
  double AttentionFlops() const {
    const uint64_t pairs = attention_.tokens * (attention_.tokens + 1) / 2;
    return (2 + 5) * 2.0 *
           static_cast<double>(pairs * attention_.batch * width_);
  }

  void Forward() {
    const uint64_t n = rows_ * width_;
    Time("norm", [&] {
      kernels_->LayerNorm(rows_, width_, 1e-5f, x_, gamma_, beta_, normal1_,
                          mean1_, rstd1_);
    });
    Linear(qkv_, normal1_, w_qkv_, qkv_out_);
    Time("attention", [&] {
      kernels_->Attention(attention_, qkv_out_, qkv_out_ + width_,
                          qkv_out_ + 2 * width_, mixed_, lse_, scratch_);
    });
    Linear(out_, mixed_, w_out_, residual_);
    Time("add", [&] { kernels_->Add(n, x_, residual_, residual_); });
    Time("norm", [&] {
      kernels_->LayerNorm(rows_, width_, 1e-5f, residual_, gamma_, beta_,
                          normal2_, mean2_, rstd2_);
    });
    Linear(up_, normal2_, w_up_, wide_);
    Time("gelu", [&] { kernels_->Gelu(4 * n, wide_, active_); });
    Linear(down_, active_, w_down_, y_);
    Time("add", [&] { kernels_->Add(n, residual_, y_, y_); });
  }

  void Backward() {
    const uint64_t n = rows_ * width_;
    Grad(down_, active_, w_down_, y_, dwide_);
    Time("gelu", [&] { kernels_->GeluGrad(4 * n, wide_, dwide_, dwide_); });
    Grad(up_, normal2_, w_up_, dwide_, dnormal_);
    Time("norm", [&] {
      kernels_->LayerNormGrad(rows_, width_, residual_, gamma_, mean2_, rstd2_,
                              dnormal_, y_, dresidual_, dgamma_, dbeta_,
                              scratch_);
    });
    Grad(out_, mixed_, w_out_, dresidual_, dmixed_);
    Time("attention", [&] {
      kernels_->AttentionGrad(attention_, qkv_out_, qkv_out_ + width_,
                              qkv_out_ + 2 * width_, mixed_, lse_, dmixed_,
                              dqkv_, dqkv_ + width_, dqkv_ + 2 * width_,
                              scratch_);
    });
    Grad(qkv_, normal1_, w_qkv_, dqkv_, dnormal_);
    Time("norm", [&] {
      kernels_->LayerNormGrad(rows_, width_, x_, gamma_, mean1_, rstd1_,
                              dnormal_, dresidual_, dx_, dgamma_, dbeta_,
                              scratch_);
    });
  }

  const std::map<std::string, double>& seconds() const { return seconds_; }

 private:
  void Time(const std::string& part, const std::function<void()>& run) {
    const double start = Seconds();
    run();
    seconds_[part] += Seconds() - start;
  }
  void Linear(const LinearShape& s, const float* x, const float* weight,
              float* y) {
    Time("forward",
         [&] { kernels_->Linear(s, x, weight, bias_, y, scratch_); });
  }
  void Grad(const LinearShape& s, const float* x, const float* weight,
            const float* dy, float* dx) {
    Time("grad_weight", [&] {
      kernels_->LinearGradWeight(s, x, dy, dweight_, dbias_, scratch_);
    });
    Time("grad_input",
         [&] { kernels_->LinearGradInput(s, dy, weight, dx, scratch_); });
  }

  const uint64_t rows_;
  const uint64_t width_;
  const LinearShape qkv_, out_, up_, down_;
  const AttentionShape attention_;
  Arena arena_;
  const std::unique_ptr<Kernels> kernels_;
  std::map<std::string, double> seconds_;
  void* scratch_;
  float* const x_ = arena_.Floats(rows_ * width_);
  float* const normal1_ = arena_.Floats(rows_ * width_);
  float* const normal2_ = arena_.Floats(rows_ * width_);
  float* const qkv_out_ = arena_.Floats(3 * rows_ * width_);
  float* const mixed_ = arena_.Floats(rows_ * width_);
  float* const residual_ = arena_.Floats(rows_ * width_);
  float* const wide_ = arena_.Floats(4 * rows_ * width_);
  float* const active_ = arena_.Floats(4 * rows_ * width_);
  float* const y_ = arena_.Floats(rows_ * width_);
  float* const dwide_ = arena_.Floats(4 * rows_ * width_);
  float* const dnormal_ = arena_.Floats(rows_ * width_);
  float* const dresidual_ = arena_.Floats(rows_ * width_);
  float* const dmixed_ = arena_.Floats(rows_ * width_);
  float* const dqkv_ = arena_.Floats(3 * rows_ * width_);
  float* const dx_ = arena_.Floats(rows_ * width_);
  float* const w_qkv_ = arena_.Floats(3 * width_ * width_);
  float* const w_out_ = arena_.Floats(width_ * width_);
  float* const w_up_ = arena_.Floats(4 * width_ * width_);
  float* const w_down_ = arena_.Floats(4 * width_ * width_);
  float* const dweight_ = arena_.Floats(4 * width_ * width_);
  float* const gamma_ = arena_.Floats(width_);
  float* const beta_ = arena_.Floats(width_);
  float* const dgamma_ = arena_.Floats(width_);
  float* const dbeta_ = arena_.Floats(width_);
  float* const bias_ = arena_.Floats(4 * width_);
  float* const dbias_ = arena_.Floats(4 * width_);
  float* const mean1_ = arena_.Floats(rows_);
  float* const rstd1_ = arena_.Floats(rows_);
  float* const mean2_ = arena_.Floats(rows_);
  float* const rstd2_ = arena_.Floats(rows_);
  float* const lse_ = arena_.Floats(rows_ * attention_.heads);
};

void BM_Block(benchmark::State& state, DType dtype) {
  if (dtype == DType::kBF16 && !CpuHasBF16Products()) {
    state.SkipWithError("this processor has no bf16 products");
    return;
  }
  const double ceiling = CeilingGflops(dtype, kThreads) * 1e9;
  Block block(static_cast<uint64_t>(state.range(0)), 256, 512, 8, dtype);
  for (auto _ : state) {
    block.Forward();
    block.Backward();
  }
  Report(state, block.ProductFlops(), dtype);
  const auto iterations = static_cast<double>(state.iterations());
  for (const auto& [part, seconds] : block.seconds()) {
    state.counters["ms_" + part] = seconds / iterations * 1e3;
  }
  state.counters["attention_of_ceiling"] =
      block.AttentionFlops() * iterations /
      (block.seconds().at("attention") * ceiling);
}
BENCHMARK_CAPTURE(BM_Block, fp32, DType::kF32)
    ->ArgName("batch")
    ->Arg(4)
    ->Arg(8)
    ->MeasureProcessCPUTime()
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_Block, bf16, DType::kBF16)
    ->ArgName("batch")
    ->Arg(4)
    ->Arg(8)
    ->MeasureProcessCPUTime()
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ballast::bench
