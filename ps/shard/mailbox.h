// SPDX-License-Identifier: Apache-2.0
// The one way into a shard server's state: tasks that gRPC's threads, the disk
// and the coordinator's poll leave here, run one by one on the engine's thread.
// So nothing behind it needs a lock.

#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "common/mutex.h"

namespace ballast {

// Thread-safe. Shared by everyone who may post after the engine is gone: a
// closed mailbox drops what it gets.
class Mailbox {
 public:
  using Task = std::function<void()>;

  void Post(Task task) {
    MutexLock lock(&mutex_);
    if (!closed_) {
      tasks_.push_back(std::move(task));
      changed_.NotifyOne();
    }
  }

  // Waits up to `timeout` for a task, without running it. One thread.
  void Wait(absl::Duration timeout) {
    MutexLock lock(&mutex_);
    if (tasks_.empty() && !closed_) {
      changed_.WaitFor(&mutex_, timeout);
    }
  }

  // Runs what is there, waiting up to `timeout` for a first task. One thread.
  void Run(absl::Duration timeout) {
    {
      MutexLock lock(&mutex_);
      if (tasks_.empty() && timeout > absl::ZeroDuration()) {
        changed_.WaitFor(&mutex_, timeout);
      }
      running_.swap(tasks_);
    }
    for (Task& task : running_) {
      task();
    }
    running_.clear();
  }

  void Close() {
    MutexLock lock(&mutex_);
    closed_ = true;
    tasks_.clear();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  std::vector<Task> running_;  // Of the engine's thread; keeps its capacity.
};

}  // namespace ballast
