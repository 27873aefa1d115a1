// SPDX-License-Identifier: Apache-2.0
// BALLAST_CHECK: a broken invariant of ours ends the process, in release too.
// Never for what the network, the disk, memory limits or a user can cause.

#pragma once

namespace ballast {

// Prints the failed condition and aborts.
[[noreturn]] void CheckFailed(const char* file, int line,
                              const char* condition);

}  // namespace ballast

#define BALLAST_CHECK(condition)                              \
  do {                                                        \
    if (!(condition)) {                                       \
      ::ballast::CheckFailed(__FILE__, __LINE__, #condition); \
    }                                                         \
  } while (false)
