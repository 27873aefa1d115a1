// SPDX-License-Identifier: Apache-2.0
#include "common/clock.h"

#include <ctime>

namespace ballast {

absl::Time MonotonicNow() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::TimeFromTimespec(now);
}

}  // namespace ballast
