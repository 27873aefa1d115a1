// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ballast {

double LearningRate(const OptimizerOptions& optimizer,
                    const ScheduleOptions& schedule, uint64_t steps,
                    uint64_t step) {
  const uint64_t warmup = schedule.warmup_steps;
  if (step < warmup) {
    return optimizer.lr * static_cast<double>(step) /
           static_cast<double>(warmup);
  }
  if (schedule.kind == ScheduleKind::kConstant || steps <= warmup) {
    return optimizer.lr;
  }
  const double progress =
      std::min(1.0, static_cast<double>(step - warmup) /
                        static_cast<double>(steps - warmup));
  const double low = schedule.min_lr_ratio;
  return optimizer.lr *
         (low +
          (1.0 - low) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress)));
}

double BiasCorrection(double beta, uint64_t updates) {
  return 1.0 - std::pow(beta, static_cast<double>(updates));
}

double ClipFactor(double clip_norm, double norm) {
  if (clip_norm == 0.0) {
    return 1.0;
  }
  return std::min(1.0, clip_norm / (norm + 1e-6));
}

}  // namespace ballast
