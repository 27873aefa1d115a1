// SPDX-License-Identifier: Apache-2.0
// The slab store's read-all-write-all cycle against the raw file under it, at
// several sizes of a record. The disk is the limit: a ratio far below 1 means
// that the store adds work of its own. Repeat with
//   build/release/bin/store_bench
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "storage/store_speed.h"

namespace ballast {
namespace {

void BM_StoreCycle(benchmark::State& state) {
  StoreSpeedOptions options;
  options.dir = absl::StrCat(std::filesystem::temp_directory_path().string(),
                             "/ballast-store-bench-", getpid());
  options.body_bytes = static_cast<uint64_t>(state.range(0)) << 10;
  options.record_count = (uint64_t{512} << 20) / options.body_bytes;
  for (auto _ : state) {
    const auto speed = MeasureStoreSpeed(options);
    if (!speed.ok() || speed->wrong != 0) {
      state.SkipWithError(speed.ok() ? "records read back wrong"
                                     : speed.status().ToString().c_str());
      return;
    }
    state.SetIterationTime(static_cast<double>(speed->bytes) / 1e9 /
                           speed->store_gbps);
    state.counters["GB/s"] = speed->store_gbps;
    state.counters["checked_GB/s"] = speed->checked_gbps;
    state.counters["ceiling_GB/s"] = speed->raw_gbps;
    state.counters["ratio"] = speed->store_gbps / speed->raw_gbps;
    state.counters["checked_ratio"] = speed->checked_gbps / speed->raw_gbps;
    state.counters["commit_ms"] = speed->commit_ms;
    state.counters["direct"] = speed->direct ? 1 : 0;
    state.counters["wrong"] = static_cast<double>(speed->wrong);
  }
}
BENCHMARK(BM_StoreCycle)
    ->ArgName("body_KiB")
    ->Arg(256)
    ->Arg(4096)
    ->Arg(12288)
    ->Iterations(1)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ballast
