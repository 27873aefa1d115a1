// SPDX-License-Identifier: Apache-2.0
// The scalars of an optimizer step, as functions of the job and two counts.
// Computed once, by the coordinator, in fp64: servers use the bits they are
// given, so that no two of them can differ. Stateless; thread-safe.

#pragma once

#include <cstdint>

#include "common/job.h"

namespace ballast {

// Of step 1..steps: lr * step / warmup_steps up to warmup_steps; then lr
// (constant), or half a cosine down to lr * min_lr_ratio at step `steps`.
// Skipped steps count: the schedule follows the data.
double LearningRate(const OptimizerOptions& optimizer,
                    const ScheduleOptions& schedule, uint64_t steps,
                    uint64_t step);

// 1 - beta^updates; `updates` counts from 1 and leaves skipped steps out.
double BiasCorrection(double beta, uint64_t updates);

// What the mean gradient is multiplied with, given its global norm, as
// PyTorch's clip_grad_norm_: min(1, clip_norm / (norm + 1e-6)). 1 when
// clip_norm is 0.
double ClipFactor(double clip_norm, double norm);

}  // namespace ballast
