// SPDX-License-Identifier: Apache-2.0
// What blocks (a sync, a commit) runs elsewhere, and its outcome comes back to
// the engine's thread. Where "elsewhere" is, is the shell's choice: a thread,
// or in a simulation right here.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/mutex.h"
#include "ps/shard/mailbox.h"

namespace ballast {

// What becomes of a transfer that was begun and failed: nothing knows what of
// it is there, so it is not tried again, not even when the disk was only full;
// another life may.
inline absl::Status Lost(const absl::Status& status) {
  return absl::IsResourceExhausted(status)
             ? absl::UnavailableError(status.message())
             : status;
}

// Runs a task that may block, now or later, each once, in order.
using BlockingExecutor = std::function<void(std::function<void()> task)>;

// A thread of its own as an executor. Thread-safe.
class BlockingThread {
 public:
  BlockingThread() : thread_([this] { Loop(); }) {}
  ~BlockingThread() {  // Finishes what it was given.
    tasks_.Post([this] { stopped_ = true; });
    thread_.join();
  }
  BlockingExecutor executor() {
    return [this](std::function<void()> task) { tasks_.Post(std::move(task)); };
  }

 private:
  void Loop() {
    while (!stopped_) {
      tasks_.Run(absl::Seconds(1));
    }
  }

  Mailbox tasks_;
  bool stopped_ = false;  // Of the thread, set by a task on it.
  std::thread thread_;
};

// The engine's side. Of the engine's thread.
class BlockingTasks {
 public:
  BlockingTasks(BlockingExecutor executor, std::shared_ptr<Mailbox> mailbox)
      : executor_(std::move(executor)),
        mailbox_(std::move(mailbox)),
        shared_(std::make_shared<Shared>()) {}
  // Waits for what has begun; its `then` is dropped.
  ~BlockingTasks() {
    MutexLock lock(&shared_->mutex);
    while (shared_->unfinished > 0) {
      shared_->changed.Wait(&shared_->mutex);
    }
  }

  // Runs `work` elsewhere, then `then` on the engine's thread.
  void Run(std::function<absl::Status()> work,
           std::function<void(const absl::Status&)> then) {
    ++shared_->in_flight;
    {
      MutexLock lock(&shared_->mutex);
      ++shared_->unfinished;
    }
    executor_([mailbox = mailbox_, shared = shared_, work = std::move(work),
               then = std::move(then)] {
      const absl::Status status = work();
      mailbox->Post([shared, then, status] {
        --shared->in_flight;
        then(status);
      });
      MutexLock lock(&shared->mutex);
      --shared->unfinished;
      shared->changed.NotifyAll();
    });
  }
  // Whose `then` has not run.
  uint32_t in_flight() const { return shared_->in_flight; }

 private:
  struct Shared {
    uint32_t in_flight = 0;  // Of the engine's thread.
    Mutex mutex;
    CondVar changed;
    uint32_t unfinished ABSL_GUARDED_BY(mutex) = 0;
  };
  const BlockingExecutor executor_;
  const std::shared_ptr<Mailbox> mailbox_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace ballast
