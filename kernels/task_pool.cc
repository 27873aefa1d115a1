// SPDX-License-Identifier: Apache-2.0
#include "kernels/task_pool.h"

#include "common/check.h"

namespace ballast {

TaskPool::TaskPool(int threads) : threads_(threads) {
  BALLAST_CHECK(threads >= 1);
  for (int thread = 1; thread < threads; ++thread) {
    helpers_.emplace_back([this, thread] { HelperLoop(thread); });
  }
}

TaskPool::~TaskPool() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  job_posted_.NotifyAll();
  for (std::thread& helper : helpers_) helper.join();
}

void TaskPool::Work(Job* job, int thread) {
  for (;;) {
    const uint64_t index = job->next.fetch_add(1, std::memory_order_relaxed);
    if (index >= job->count) return;
    job->call(job->task, index, thread);
  }
}

void TaskPool::RunJob(Job* job) {
  if (helpers_.empty() || job->count <= 1) {
    Work(job, 0);
    return;
  }
  {
    MutexLock lock(&mutex_);
    job_ = job;
    ++job_number_;
  }
  job_posted_.NotifyAll();
  Work(job, 0);
  MutexLock lock(&mutex_);
  job_ = nullptr;  // Who has not joined by now has nothing left to do.
  while (helpers_inside_ > 0) helpers_left_.Wait(&mutex_);
}

void TaskPool::HelperLoop(int thread) {
  uint64_t last_number = 0;
  mutex_.Lock();
  for (;;) {
    while (!stopping_ && (job_ == nullptr || job_number_ == last_number)) {
      job_posted_.Wait(&mutex_);
    }
    if (stopping_) break;
    Job* const job = job_;
    last_number = job_number_;
    ++helpers_inside_;
    mutex_.Unlock();
    Work(job, thread);
    mutex_.Lock();
    if (--helpers_inside_ == 0) helpers_left_.NotifyOne();
  }
  mutex_.Unlock();
}

}  // namespace ballast
