// SPDX-License-Identifier: Apache-2.0
// Named places where a rehearsal may end the process as kill -9 would, so that
// tests can hit the narrow windows of the protocol on purpose:
//
//   BALLAST_CRASH_POINT("server.vote.synced");
//
// Costs one relaxed load when nothing is armed, which is always so unless
// ArmCrashPoints was called; only main functions do, when BALLAST_CRASH_DIR is
// set.

#pragma once

#include <atomic>
#include <string>

namespace ballast {

// Arms what <dir>/<role> says, a line "NAME N": the N-th pass (from 1) of that
// point ends the process. The file is removed first, so a restarted process
// does not crash again. Passes of all points are counted in <dir>/<role>.<pid>,
// a line "NAME COUNT" each, written at exit; a point that ends the process
// writes "hit NAME" in front.
void ArmCrashPoints(const std::string& dir, const std::string& role);

extern std::atomic<bool> crash_points_armed;
void PassCrashPoint(const char* name);

}  // namespace ballast

#define BALLAST_CRASH_POINT(name)                                        \
  do {                                                                   \
    if (::ballast::crash_points_armed.load(std::memory_order_relaxed)) { \
      ::ballast::PassCrashPoint(name);                                   \
    }                                                                    \
  } while (false)
