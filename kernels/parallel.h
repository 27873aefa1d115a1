// SPDX-License-Identifier: Apache-2.0
// Loops over tasks on a fixed number of threads. What a task computes must not
// depend on the thread that runs it: that is how every kernel keeps its bits.

#pragma once

#include <algorithm>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace ballast {

// Calls task(index, thread) for index in [0, count), thread in [0, threads).
// Threads take the next index when they are free, as tasks may differ in cost.
template <typename Task>
void ParallelTasks(int threads, uint64_t count, const Task& task) {
#ifdef _OPENMP
  if (threads > 1 && count > 1) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (uint64_t i = 0; i < count; ++i) task(i, omp_get_thread_num());
    return;
  }
#else
  static_cast<void>(threads);
#endif
  for (uint64_t i = 0; i < count; ++i) task(i, 0);
}

// Calls piece(begin, end) for consecutive pieces of [0, count) of at most
// `piece_size`, which no thread count may enter.
template <typename Piece>
void ParallelPieces(int threads, uint64_t count, uint64_t piece_size,
                    const Piece& piece) {
  ParallelTasks(threads, (count + piece_size - 1) / piece_size,
                [&](uint64_t i, int) {
                  const uint64_t begin = i * piece_size;
                  piece(begin, std::min(count, begin + piece_size));
                });
}

}  // namespace ballast
