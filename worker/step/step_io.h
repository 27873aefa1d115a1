// SPDX-License-Identifier: Apache-2.0
// What the step loop needs from outside the device: weights, someone to take
// gradients, someone who may call it off. Abstract, so that the planner and
// tests run steps without a network.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/layout.h"
#include "common/span.h"
#include "offload/device.h"

namespace ballast {

// A worker's part of one step: nodes of the span tree over `total`
// micro-batches, disjoint and ascending, computed from parameters of `version`.
struct Assignment {
  uint64_t version = 0;
  uint32_t total = 0;
  std::vector<Span> nodes;

  uint32_t micro_batches() const {
    uint32_t count = 0;
    for (const Span& node : nodes) {
      count += node.count;
    }
    return count;
  }
};

// All calls come from the thread that runs the step.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // Starts to fill `destination` with the tensors of a unit, in the order of
  // UnitSpec::tensors, each whole, in its `served` dtype. The memory is the
  // source's until Wait(unit) returns or the source is told to stop; work given
  // to the device before `after` may still use it. Does not block for the
  // weights. At most one fetch of a unit is in progress.
  virtual absl::Status Prefetch(uint32_t unit, uint64_t version,
                                StreamMark after,
                                absl::Span<std::byte* const> destination) = 0;
  // Blocks until the fetch of `unit` is complete.
  virtual absl::Status Wait(uint32_t unit) = 0;
  // Gives up fetches in progress: when it returns no memory that was handed
  // over is written any more.
  virtual void Abandon() = 0;
};

// The gradient of one use of one tensor, summed over one node.
struct GradientPiece {
  TensorUse use;
  Span span;
  const float* data = nullptr;  // Device memory: the whole tensor.
  // Sum of losses over `span`, in nats: with the first tensor of the last unit.
  std::optional<double> loss;
};

class GradientSink {
 public:
  virtual ~GradientSink() = default;
  // Has read the data when it returns; may block until there is room.
  virtual absl::Status Push(const GradientPiece& piece) = 0;
};

enum class PassPhase { kForward, kBackward, kEvaluate };

class PassObserver {
 public:
  virtual ~PassObserver() = default;
  // Before each micro-batch of each unit. An error ends the pass with it.
  virtual absl::Status OnUnit(PassPhase phase, uint32_t unit) = 0;
};

}  // namespace ballast
