// SPDX-License-Identifier: Apache-2.0
// The weights of a pass on the device: which unit's are fetched when, into what
// memory, and when that is given back. The order of units is known before the
// pass, so this is a plan, not a cache.

#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "worker/step/step_io.h"

namespace ballast {

// Thread-compatible.
class WeightStream {
 public:
  // One place of the pass where a unit computes.
  struct Stop {
    uint32_t unit = 0;
    bool needs_weights = true;
    // Keep them for the unit's next stop.
    bool keep = false;
  };

  // `layout`, `device` and `source` outlive the object.
  WeightStream(const ModelLayout* layout, Device* device, WeightSource* source,
               uint64_t version, std::vector<Stop> stops, uint32_t prefetch);
  // Abandons what was prefetched and not used.
  ~WeightStream();

  // Starts the fetches of the next `prefetch` stops, then blocks for the
  // weights of stop `index`: one pointer a tensor, valid until Leave; null
  // pointers when the stop needs none. Stops are entered in order, once.
  absl::StatusOr<absl::Span<const void* const>> Enter(size_t index);
  void Leave(size_t index);

  absl::Duration waited() const { return waited_; }

 private:
  struct UnitWeights {
    DeviceBuffer buffer;
    std::vector<const void*> tensors;
    bool in_flight = false;
  };

  absl::Status Start(uint32_t unit);

  const ModelLayout& layout_;
  Device& device_;
  WeightSource& source_;
  const uint64_t version_;
  const std::vector<Stop> stops_;
  const uint32_t prefetch_;
  std::vector<UnitWeights> units_;
  size_t started_ = 0;  // Stops whose fetch is done or not needed.
  absl::Duration waited_;
};

}  // namespace ballast
