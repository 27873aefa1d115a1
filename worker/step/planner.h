// SPDX-License-Identifier: Apache-2.0
// Decides before the first step how a worker uses its budgets: from most ample
// to most frugal, the first way that fits. A candidate is judged by running the
// step itself over memory that is not there, so the peak is exact, not an
// estimate; an ample budget recomputes nothing and fetches nothing twice.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/job.h"
#include "kernels/kernels.h"
#include "proto/ballast.pb.h"
#include "worker/model/family.h"
#include "worker/step/policy.h"
#include "worker/step/step_io.h"

namespace ballast {

// Lengths of the nodes that one pass computes, in order. What a pass allocates
// depends on nothing else of its assignment.
using PassShape = std::vector<uint32_t>;

struct StepPlan {
  StepPolicy policy;
  // What a pass may look like within the peaks below; {1} is always there.
  std::vector<PassShape> shapes;
  uint32_t micro_batches_max = 0;  // Of any of the shapes.
  uint64_t device_bytes = 0;       // Peak on the device.
  uint64_t host_step_bytes = 0;    // Peak of what the policy sends to the host.
  // Beside it in host memory: gradients on their way out, weights that have
  // arrived and are not yet on the device, and the data.
  uint64_t staging_bytes = 0;
  uint64_t receive_bytes = 0;
  uint64_t batch_bytes = 0;  // Micro-batches in use and read ahead.

  uint64_t host_bytes() const {
    return host_step_bytes + staging_bytes + receive_bytes + batch_bytes;
  }
  // What the coordinator is told; the peaks above in other words.
  v1::WorkerPlan report;
};

// Plans for the share of a worker among job.worker.count, training and
// evaluation. `kernels` is asked for scratch sizes alone.
// Errors: RESOURCE_EXHAUSTED  not even the most frugal way fits; the message
//         names the key, the unit, what was live there and the smallest budget
//         that would do.
absl::StatusOr<StepPlan> PlanStep(const Job& job, ModelFamily* family,
                                  Kernels* kernels);

// `assignment` cut into passes that the plan covers: as it is where it can be,
// node by node and child by child where not.
std::vector<Assignment> CutAssignment(const Assignment& assignment,
                                      const StepPlan& plan);

}  // namespace ballast
