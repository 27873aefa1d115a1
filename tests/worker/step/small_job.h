// SPDX-License-Identifier: Apache-2.0
// A model small enough to run a step in milliseconds, for tests of the worker.

#pragma once

#include <cstdint>
#include <vector>

#include "common/job.h"
#include "common/layout.h"
#include "common/random.h"
#include "kernels/cpu_kernels.h"
#include "worker/step/local_run.h"

namespace ballast::testing {

inline Job SmallJob() {
  Job job;
  job.run.seed = 3;
  job.model = {.family = "gpt2",
               .layers = 3,
               .heads = 2,
               .width = 32,
               .context = 16,
               .vocabulary = 61,
               .tied = true};
  job.batch = {.micro_batches = 8, .micro_batch_size = 2};
  job.worker.count = 1;
  job.worker.memory = uint64_t{64} << 20;
  job.worker.host_memory = uint64_t{64} << 20;
  job.worker.prefetch = 1;
  return job;
}

// Values that exercise every term: biases and norms are not at their start.
inline void SmallValues(const TensorSpec& tensor, absl::Span<float> out) {
  uint64_t stream = 0;
  for (const char letter : tensor.name) {
    stream = stream * 131 + static_cast<unsigned char>(letter);
  }
  for (uint64_t i = 0; i < out.size(); ++i) {
    const double base = tensor.init == Init::kOnes ? 1.0 : 0.0;
    out[i] = static_cast<float>(base + 0.2 * Normal(11, stream, i));
  }
}

inline std::vector<MicroBatch> SmallBatches(const Job& job) {
  std::vector<MicroBatch> batches(job.batch.micro_batches);
  uint64_t counter = 0;
  for (MicroBatch& batch : batches) {
    const uint64_t rows =
        uint64_t{job.batch.micro_batch_size} * job.model.context;
    for (uint64_t i = 0; i < rows; ++i) {
      const auto words = Philox(5, ++counter, 0);
      batch.ids.push_back(words[0] % job.model.vocabulary);
      batch.targets.push_back(words[1] % job.model.vocabulary);
    }
  }
  return batches;
}

inline std::unique_ptr<Kernels> OneThread() { return MakeCpuKernels(1); }

}  // namespace ballast::testing
