// SPDX-License-Identifier: Apache-2.0
// What went wrong in a run and what it cost, for people. Pure.

#pragma once

#include <string>
#include <vector>

#include "proto/ballast.pb.h"

namespace ballast {

// By role: how many faults, and the least, median and most seconds from a
// fault's notice to the next committed step. Empty without faults.
std::string FaultTable(const std::vector<v1::Fault>& faults);

// The newest `most` faults, a row each. Empty without faults.
std::string FaultList(const std::vector<v1::Fault>& faults, size_t most);

}  // namespace ballast
