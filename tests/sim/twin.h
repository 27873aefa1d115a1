// SPDX-License-Identifier: Apache-2.0
// The run that nothing ever happened to: the whole state in one place, one step
// after the other, no process, no message, no disk. What a simulated cluster
// commits is held against it.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "proto/ballast.pb.h"
#include "tests/sim/sim_job.h"

namespace ballast::sim {

struct Twin {
  // Entry s is of version s; entry 0 of the start.
  std::vector<std::string> state_hashes;
  std::vector<Weights> weights;  // What workers fetch.
  std::vector<v1::Decision> decisions;
  std::vector<double> eval_losses;
};

Twin RunTwin(const SimJob& job);

// The parts of a decision that membership and placement must not change, for
// comparison and for people.
std::string Essence(const v1::Decision& decision);

}  // namespace ballast::sim
