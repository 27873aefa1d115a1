// SPDX-License-Identifier: Apache-2.0
// How a step uses its memory. Every choice changes when bytes are where, none
// changes a bit of any result.

#pragma once

#include <cstdint>
#include <string>

namespace ballast {

// "The last n" counts back from the unit before the last one: those are used
// again soonest, at the turn from forward to backward. n is at most the number
// of units less two.
struct StepPolicy {
  // Units fetched ahead of the one that computes.
  uint32_t prefetch = 0;
  // The last n units keep their weights from forward to backward.
  uint32_t resident_units = 0;
  // The last n units keep their activations; the others recompute them.
  uint32_t kept_units = 0;
  // Inputs of the last n units stay on the device until backward; the others
  // wait in host memory.
  uint32_t device_inputs = 0;
  // What passes from unit to unit, for all micro-batches, is on the device.
  bool flow_on_device = false;
  // Sums of gradients over at least this many micro-batches wait for their
  // sibling in host memory; shorter ones on the device. At least 1.
  uint32_t host_sums_from = 1;

  friend bool operator==(const StepPolicy&, const StepPolicy&) = default;
};

}  // namespace ballast
