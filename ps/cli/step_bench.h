// SPDX-License-Identifier: Apache-2.0
// Whole training steps through real processes, in core and out of core, beside
// the matrix-product ceiling of the same run.

#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/dtype.h"

namespace ballast {

// One model trained twice with the same bits: budgets that hold everything,
// then budgets that do not.
struct StepBenchModel {
  std::string name;
  uint32_t layers = 0;
  uint32_t heads = 0;
  uint32_t width = 0;
  uint32_t context = 0;
  uint32_t micro_batches = 0;
  uint32_t micro_batch_size = 0;
  std::string worker_memory;  // Out of core.
  std::string server_memory;  // Out of core.
};

// What `ballast bench step` measures.
std::vector<StepBenchModel> StepBenchModels();

struct StepBenchOptions {
  std::string binary_dir;  // Where `ballast` is.
  DType dtype = DType::kF32;
  uint32_t steps = 8;  // A run; the first two are warm-up.
  double ceiling_gflops = 0;
};

// Two rows (in core, out of core) of the JSON that `ballast bench` prints.
// `wrong` counts state hashes that differ from the in-core one.
// Errors: INTERNAL  a run failed; the message ends with its last output.
absl::StatusOr<std::vector<nlohmann::ordered_json>> BenchSteps(
    const StepBenchModel& model, const StepBenchOptions& options);

}  // namespace ballast
