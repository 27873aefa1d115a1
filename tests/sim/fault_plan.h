// SPDX-License-Identifier: Apache-2.0
// What one seed does to its cluster: how bad the network is, which faults come
// how often, and in what shapes the run is begun and resumed.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/sim/network.h"
#include "tests/sim/sim_job.h"

namespace ballast::sim {

enum class FaultKind {
  kKill,
  kPower,
  kPause,
  kClockJump,
  kCut,
  kOneWayCut,
  kBreakStream,
  kDiskFull,
  kTerminate,  // SIGTERM of a worker.
  kPowerAll,   // Every machine at once.
  kScale,      // A member more or less.
  kWipe,       // A server's machine is replaced: what it held is gone.
  kBadDisk,    // A failed write or sync: the run may end with DATA_LOSS.
};
inline constexpr int kFaultKinds = 13;
std::string FaultName(FaultKind kind);

struct FaultPlan {
  Weather weather;
  // By kind; 0: never. They add up to more than 0 when faults > 0.
  double weight[kFaultKinds] = {};
  uint32_t faults = 0;  // In all, besides those below.
  absl::Duration pause_min;
  absl::Duration pause_max;  // Between two.
  // Chance of dying at each crash point that is passed.
  double crash_point = 0.0;
  // Chance that a server loses power soon after it has voted.
  double power_after_vote = 0.0;
  // Chance that a life's disk is cut in the middle of one of its changes.
  double disk_cut = 0.0;
  // Whether a supervisor reports exits to the coordinator.
  bool supervised = true;
  // How many times the run is stopped early and resumed with other numbers of
  // servers and workers.
  uint32_t resumes = 0;
  absl::Duration restart_min;
  absl::Duration restart_max;
  bool same_address =
      true;  // A new life of a server listens where the old did.
};

// `calm`: nothing happens at all.
FaultPlan MakeFaultPlan(const SimJob& job, uint64_t seed, bool calm);

}  // namespace ballast::sim
