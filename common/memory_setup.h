// SPDX-License-Identifier: Apache-2.0
// Makes the heap keep what it was given. On a virtual machine a page fault
// costs some 13 us, so an allocator that returns memory to the kernel after
// each message is an order of magnitude slower than one that does not.

#pragma once

#include <cstdint>

namespace ballast {

// Raises glibc's mmap and trim thresholds and bounds its arenas. Call at the
// top of main, before the first thread.
void KeepHeapMemory();

// Minor page faults of this process so far.
uint64_t MinorFaults();

// Resident bytes of this process now, from /proc/self/statm.
uint64_t ResidentBytes();

}  // namespace ballast
