// SPDX-License-Identifier: Apache-2.0
// The jobs that the simulator trains, and what stands in for a model: gradients
// and losses that are a cheap function of every bit that a worker must have
// read and of the place where they are added. A weight of another version, a
// span counted twice, a use left out: each changes the final bits.

#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "common/hash.h"
#include "common/job.h"
#include "common/layout.h"
#include "common/span.h"

namespace ballast::sim {

struct SimJob {
  Job job;
  ModelLayout layout;
  uint64_t gradient_seed = 0;
  std::set<uint64_t> poisoned;  // Steps with a gradient that is not finite.
};

// A job of a few small tensors, one tied and one by rows, in some ten chunks.
SimJob MakeSimJob(uint64_t seed);

// What a worker has fetched: the served bytes of every tensor.
using Weights = std::vector<std::vector<std::byte>>;

// Of all weights; what a loss depends on.
Hash128 HashOf(const Weights& weights);

// The loss sum of one micro-batch, in nats.
double LossOf(const SimJob& job, uint64_t step, uint32_t micro_batch, bool eval,
              const Hash128& weights);
// Along the tree below `node`.
double LossOfNode(const SimJob& job, uint64_t step, const Span& node,
                  const Hash128& weights);

// The gradient of one use of one tensor in one micro-batch of a step; `served`
// are the tensor's bytes, `out` has its elements.
void GradientOf(const SimJob& job, uint64_t step, uint32_t micro_batch,
                const TensorUse& use, absl::Span<const std::byte> served,
                absl::Span<float> out);
// Summed along the tree below `node`.
std::vector<float> GradientOfNode(const SimJob& job, uint64_t step,
                                  const Span& node, const TensorUse& use,
                                  absl::Span<const std::byte> served);

}  // namespace ballast::sim
