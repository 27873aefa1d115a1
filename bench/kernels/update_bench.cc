// SPDX-License-Identifier: Apache-2.0
// The update on one thread, in bytes of state moved: AdamW reads grad, param,
// exp_avg and exp_avg_sq and writes the last three (28 bytes an element). Its
// ceiling is BM_Accumulate beyond the caches, which does little but move.
#include <cmath>

#include "absl/types/span.h"
#include "bench/kernels/bench_util.h"
#include "benchmark/benchmark.h"
#include "kernels/update.h"

namespace ballast::bench {
namespace {

constexpr AdamWScalars kScalars = {1.0f,  1e-3f, 0.9f, 0.95f,
                                   1e-8f, 0.1f,  0.1f, 0.05f};

struct State {
  explicit State(uint64_t count)
      : elems(count),
        arena(count * 18 + 4096),
        grad(arena.Floats(count), count),
        param(arena.Floats(count), count),
        exp_avg(arena.Floats(count), count),
        exp_avg_sq(arena.Floats(count), count),
        served(static_cast<uint16_t*>(arena.Take(count * 2)), count) {
    for (float& value : exp_avg_sq) value *= value;
  }
  uint64_t elems;
  Arena arena;
  absl::Span<float> grad;
  absl::Span<float> param;
  absl::Span<float> exp_avg;
  absl::Span<float> exp_avg_sq;
  absl::Span<uint16_t> served;
};

template <typename Run>
void Measure(benchmark::State& state, int64_t bytes_per_elem, const Run& run) {
  State s(static_cast<uint64_t>(state.range(0)));
  for (auto _ : state) {
    run(s);
    benchmark::ClobberMemory();
  }
  if (!std::isfinite(s.param[s.elems / 2])) {
    state.SkipWithError("result is not finite");
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) * bytes_per_elem);
}

void BM_AdamW(benchmark::State& state) {
  Measure(state, 28, [](State& s) {
    AdamWCpu(kScalars, s.grad, s.param, s.exp_avg, s.exp_avg_sq, {});
  });
}

void BM_AdamWServingBF16(benchmark::State& state) {
  Measure(state, 30, [](State& s) {
    AdamWCpu(kScalars, s.grad, s.param, s.exp_avg, s.exp_avg_sq, s.served);
  });
}

void BM_Sgd(benchmark::State& state) {
  Measure(state, 20, [](State& s) {
    SgdCpu({1.0f, 1e-3f, 0.9f, 0.1f}, s.grad, s.param, s.exp_avg, {});
  });
}

void BM_Accumulate(benchmark::State& state) {
  Measure(state, 12, [](State& s) { AccumulateCpu(s.grad, s.exp_avg); });
}

void BM_BlockStats(benchmark::State& state) {
  Measure(state, 4,
          [](State& s) { benchmark::DoNotOptimize(BlockStatsCpu(s.grad)); });
}

void BM_CastToBF16(benchmark::State& state) {
  Measure(state, 6, [](State& s) { CastToBF16Cpu(s.grad, s.served); });
}

void Sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgName("elems")->Arg(64 << 10)->Arg(32 << 20);
}
BENCHMARK(BM_AdamW)->Apply(Sizes);
BENCHMARK(BM_AdamWServingBF16)->Apply(Sizes);
BENCHMARK(BM_Sgd)->Apply(Sizes);
BENCHMARK(BM_Accumulate)->Apply(Sizes);
BENCHMARK(BM_BlockStats)->Apply(Sizes);
BENCHMARK(BM_CastToBF16)->Apply(Sizes);

}  // namespace
}  // namespace ballast::bench
