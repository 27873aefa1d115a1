// SPDX-License-Identifier: Apache-2.0
// Runs a worker's part of a step, or of an evaluation, through the device in
// vertical order: each unit is fetched once a pass, all micro-batches go
// through it, then the next unit. At the last unit the loss turns the pass
// around; backward goes the same way back and hands on gradients tensor by
// tensor.
//
// Allocations depend on shapes, policy and assignment alone, and all come from
// the calling thread, so that the planner can find the exact peak.

#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "worker/data/loader.h"
#include "worker/model/family.h"
#include "worker/step/policy.h"
#include "worker/step/step_io.h"

namespace ballast {

struct PassTimes {
  absl::Duration forward;   // Each without the waits below.
  absl::Duration backward;  // From the last unit on.
  absl::Duration fetch_wait;
};

struct TrainResult {
  std::vector<double> losses;  // One an assigned node, in nats.
  PassTimes times;
};

// Thread-compatible. All pointers outlive the object.
class StepExecutor {
 public:
  // `host` holds what the policy sends to host memory.
  StepExecutor(ModelFamily* family, Device* device, Arena* host,
               const StepPolicy& policy)
      : family_(*family), device_(*device), host_(*host), policy_(policy) {}

  // batches[i] is the i-th micro-batch of the assignment.
  // Errors: RESOURCE_EXHAUSTED  a budget is too small; the message names the
  //         unit. Otherwise those of source, sink and observer.
  absl::StatusOr<TrainResult> Train(const Assignment& assignment,
                                    absl::Span<const MicroBatch> batches,
                                    WeightSource* source, GradientSink* sink,
                                    PassObserver* observer);

  // Sums of losses, one a micro-batch. Errors: as Train.
  absl::StatusOr<std::vector<double>> Evaluate(
      uint64_t version, absl::Span<const MicroBatch> batches,
      WeightSource* source, PassObserver* observer);

 private:
  ModelFamily& family_;
  Device& device_;
  Arena& host_;
  const StepPolicy policy_;
};

}  // namespace ballast
