// SPDX-License-Identifier: Apache-2.0
// Sums the leaf gradients of one unit along the span tree, tensor by tensor,
// and hands each finished node to the sink at once. The left one of two leaves
// is the product's own output; only what waits for a sibling stays.

#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/family.h"
#include "worker/step/policy.h"
#include "worker/step/step_io.h"

namespace ballast {

// Sum along the tree below `node`; losses[i] belongs to micro-batch first + i.
double TreeSum(const Span& node, absl::Span<const double> losses,
               uint32_t first);

// Thread-compatible.
class GradientSums : public GradientWriter {
 public:
  // All pointers outlive the object. `losses` (may be null: no loss rides
  // along) has an entry for every micro-batch of the assignment, in order.
  struct Options {
    const ModelLayout* layout = nullptr;
    uint32_t unit = 0;
    const Assignment* assignment = nullptr;
    uint32_t host_sums_from = 1;
    Device* device = nullptr;
    Arena* host = nullptr;
    GradientSink* sink = nullptr;
    const std::vector<double>* losses = nullptr;
  };
  explicit GradientSums(const Options& options);

  // What follows is the gradient of the next micro-batch of the assignment.
  void StartLeaf();

  absl::StatusOr<float*> Begin(uint32_t slot) override;
  absl::Status Done(uint32_t slot) override;

 private:
  // A sum that waits for its right sibling; in one of the two places.
  struct Waiting {
    Span span;
    DeviceBuffer device;
    ArenaBuffer host;
  };
  struct Slot {
    TensorUse use;
    uint64_t elems = 0;
    DeviceBuffer leaf;
    std::vector<Waiting> waiting;  // Innermost last.
  };

  absl::Status Park(Slot* slot, const Span& span, DeviceBuffer sum);
  // `sum` becomes left + sum.
  absl::Status AddLeft(const Slot& slot, Waiting left, DeviceBuffer* sum);
  absl::Status Push(const Slot& slot, const Span& span,
                    const DeviceBuffer& sum);

  const Options options_;
  std::vector<Slot> slots_;
  size_t node_ = 0;    // Index into the assignment's nodes.
  uint32_t next_ = 0;  // Micro-batches of it that were started.
  uint32_t micro_batch_ = 0;
};

}  // namespace ballast
