// SPDX-License-Identifier: Apache-2.0
// Threads that share the tasks of one loop at a time. What a task computes must
// not depend on the thread that runs it: that is how every kernel keeps its
// bits for any number of threads.
//
// Why not OpenMP: at the end of a loop all its threads must arrive, also one
// that a busy machine has not let run, and waiting threads spin. Workers share
// their cores with shard servers; here a late thread is not waited for unless
// it has begun a task, and a waiting one sleeps.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"

namespace ballast {

// Thread-compatible: one loop at a time; tasks must not start another.
class TaskPool {
 public:
  // `threads` >= 1 counts the caller of Run.
  explicit TaskPool(int threads);
  ~TaskPool();
  TaskPool(const TaskPool&) = delete;
  TaskPool& operator=(const TaskPool&) = delete;

  int threads() const { return threads_; }

  // Calls task(index, thread) once for each index in [0, count), and returns
  // when all have returned; thread is in [0, threads), one task at a time each.
  template <typename Task>
  void Run(uint64_t count, const Task& task) {
    Job job;
    job.count = count;
    job.task = &task;
    job.call = [](const void* body, uint64_t index, int thread) {
      (*static_cast<const Task*>(body))(index, thread);
    };
    RunJob(&job);
  }

  // Calls piece(begin, end) for consecutive pieces of [0, count) of at most
  // `piece_size`, which the number of threads may not enter.
  template <typename Piece>
  void RunPieces(uint64_t count, uint64_t piece_size, const Piece& piece) {
    Run((count + piece_size - 1) / piece_size, [&](uint64_t i, int) {
      const uint64_t begin = i * piece_size;
      piece(begin, std::min(count, begin + piece_size));
    });
  }

 private:
  struct Job {
    uint64_t count = 0;
    const void* task = nullptr;
    void (*call)(const void* task, uint64_t index, int thread) = nullptr;
    std::atomic<uint64_t> next{0};  // Deals indices; publishes nothing.
  };

  static void Work(Job* job, int thread);
  void RunJob(Job* job);
  void HelperLoop(int thread);

  const int threads_;
  Mutex mutex_;
  CondVar job_posted_;
  CondVar helpers_left_;
  Job* job_ ABSL_GUARDED_BY(mutex_) = nullptr;  // Null: nothing to join.
  uint64_t job_number_ ABSL_GUARDED_BY(mutex_) = 0;
  int helpers_inside_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> helpers_;
};

}  // namespace ballast
