// SPDX-License-Identifier: Apache-2.0
// The oracle over what coordinators make durable: committed steps follow one
// another, a step never gets two contents, and each says what the undisturbed
// run says. Sees all lives of the coordinator.

#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "ps/membership/core_types.h"
#include "ps/membership/run_state.h"
#include "tests/sim/twin.h"
#include "tests/sim/world.h"

namespace ballast::sim {

// Not thread-safe.
class History {
 public:
  History(World* world, const SimJob* job, const Twin* twin)
      : world_(*world), job_(*job), twin_(*twin) {}

  void Persisted(const CoreActions& actions);
  // The newest step of the newest timeline.
  uint64_t committed() const { return last_.step; }
  uint64_t timeline() const { return last_.timeline; }
  // The end record of this part of the run stands.
  bool ended() const { return ended_; }
  void BeginPart() { ended_ = false; }
  // Steps decided, the abandoned ones too.
  uint64_t decided() const { return decided_; }

 private:
  void TakeDecision(const std::string& value);
  void TakeBranch(const StateChange& change);
  void TakeEnd(const StateChange& change);
  void TakeEvaluations(const CoreActions& actions);

  World& world_;
  const SimJob& job_;
  const Twin& twin_;
  std::map<StepKey, std::string> contents_;
  StepKey last_;
  uint64_t decided_ = 0;
  bool ended_ = false;
};

}  // namespace ballast::sim
