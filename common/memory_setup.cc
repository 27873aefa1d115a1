// SPDX-License-Identifier: Apache-2.0
#include "common/memory_setup.h"

#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>

namespace ballast {

void KeepHeapMemory() {
  // NOLINTBEGIN(concurrency-mt-unsafe): before the first thread.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 0x7fffffff);
  mallopt(M_ARENA_MAX, 2);
  // NOLINTEND(concurrency-mt-unsafe)
}

uint64_t MinorFaults() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_minflt);
}

uint64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t total_pages = 0;
  uint64_t resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace ballast
