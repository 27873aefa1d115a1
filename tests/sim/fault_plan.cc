// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/fault_plan.h"

#include "tests/sim/random.h"

namespace ballast::sim {

std::string FaultName(FaultKind kind) {
  switch (kind) {
    case FaultKind::kKill:
      return "kill";
    case FaultKind::kPower:
      return "power";
    case FaultKind::kPause:
      return "pause";
    case FaultKind::kClockJump:
      return "clock jump";
    case FaultKind::kCut:
      return "cut";
    case FaultKind::kOneWayCut:
      return "one-way cut";
    case FaultKind::kBreakStream:
      return "stream broken";
    case FaultKind::kDiskFull:
      return "disk full";
    case FaultKind::kTerminate:
      return "SIGTERM";
    case FaultKind::kPowerAll:
      return "power of all";
    case FaultKind::kScale:
      return "scaled";
    case FaultKind::kWipe:
      return "disk replaced";
    case FaultKind::kBadDisk:
      return "bad disk";
  }
  return "?";
}

FaultPlan MakeFaultPlan(const SimJob& job, uint64_t seed, bool calm) {
  Random random = Random(seed).Fork(4);
  FaultPlan plan;
  plan.restart_min = absl::Milliseconds(20);
  plan.restart_max = absl::Milliseconds(800);
  plan.pause_min = absl::Milliseconds(20);
  plan.pause_max = absl::Milliseconds(1500);
  if (calm) {
    return plan;
  }
  Weather& weather = plan.weather;
  weather.delay_max =
      random.Scaled(absl::Milliseconds(1), absl::Milliseconds(8));
  weather.slow = random.Chance(0.3) ? 0.02 : 0.0;
  weather.drop = random.Chance(0.4) ? random.Fraction() * 0.03 : 0.0;
  weather.duplicate = random.Chance(0.4) ? random.Fraction() * 0.1 : 0.0;
  plan.faults = static_cast<uint32_t>(random.Below(11));
  // A seed is about a few kinds, so that each meets the others often.
  for (double& weight : plan.weight) {
    weight = random.Chance(0.35) ? 0.2 + random.Fraction() : 0.0;
  }
  plan.weight[static_cast<int>(FaultKind::kKill)] += 0.3;
  plan.weight[static_cast<int>(FaultKind::kPowerAll)] *= 0.3;
  // Each ends a part of the run.
  plan.weight[static_cast<int>(FaultKind::kBadDisk)] *=
      random.Chance(0.2) ? 0.5 : 0.0;
  plan.weight[static_cast<int>(FaultKind::kWipe)] *=
      job.job.server.durability == Durability::kStep && random.Chance(0.1)
          ? 0.5
          : 0.0;
  plan.resumes = random.Chance(0.25) ? 1 : 0;
  plan.pause_max =
      random.Scaled(absl::Milliseconds(100), absl::Milliseconds(2500));
  plan.crash_point = random.Chance(0.4) ? 0.002 + random.Fraction() * 0.02 : 0;
  plan.power_after_vote = random.Chance(0.3) ? 0.1 : 0.0;
  plan.disk_cut = random.Chance(0.3) ? 0.5 : 0.0;
  plan.supervised = random.Chance(0.7);
  plan.restart_max =
      random.Scaled(absl::Milliseconds(30), absl::Milliseconds(3000));
  plan.same_address = random.Chance(0.5);
  if (job.job.server.durability == Durability::kCheckpoint) {
    plan.faults = std::min(plan.faults, 5u);  // Each costs all since the last.
  }
  return plan;
}

}  // namespace ballast::sim
