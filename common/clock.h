// SPDX-License-Identifier: Apache-2.0
// Monotonic time. Decisions take a time as an argument; only shells read a
// clock, and the wall clock appears in logs alone.

#pragma once

#include "absl/time/time.h"

namespace ballast {

// Monotonic, as an absl::Time whose epoch has no meaning.
absl::Time MonotonicNow();

}  // namespace ballast
