// SPDX-License-Identifier: Apache-2.0
#include "storage/watch_hub.h"

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

namespace ballast {

class WatchHub::Watcher {
 public:
  Watcher(absl::string_view begin, absl::string_view end,
          SharedStateStore::OnChange on_change)
      : begin_(begin),
        end_(end),
        on_change_(std::move(on_change)),
        thread_([this] { Run(); }) {}

  void Offer(const StateChange& change) {
    if (change.key < begin_ || change.key >= end_) {
      return;
    }
    MutexLock lock(&mutex_);
    const auto same =
        std::find_if(waiting_.begin(), waiting_.end(),
                     [&](const auto& old) { return old.key == change.key; });
    if (same != waiting_.end()) {
      waiting_.erase(same);
    }
    waiting_.push_back(change);
    changed_.NotifyAll();
  }

  void Stop() {
    {
      MutexLock lock(&mutex_);
      stopped_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }

 private:
  void Run() {
    while (true) {
      StateChange change;
      {
        MutexLock lock(&mutex_);
        while (waiting_.empty() && !stopped_) {
          changed_.Wait(&mutex_);
        }
        if (stopped_) {
          return;
        }
        change = std::move(waiting_.front());
        waiting_.pop_front();
      }
      on_change_(change);
    }
  }

  const std::string begin_;
  const std::string end_;
  const SharedStateStore::OnChange on_change_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<StateChange> waiting_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // Last: it uses all of the above.
};

class WatchHub::Handle final : public StoreWatch {
 public:
  explicit Handle(std::shared_ptr<Watcher> watcher)
      : watcher_(std::move(watcher)) {}
  ~Handle() override { watcher_->Stop(); }

 private:
  const std::shared_ptr<Watcher> watcher_;
};

std::unique_ptr<StoreWatch> WatchHub::Add(
    absl::string_view begin, absl::string_view end,
    SharedStateStore::OnChange on_change) {
  auto watcher = std::make_shared<Watcher>(begin, end, std::move(on_change));
  MutexLock lock(&mutex_);
  watchers_.push_back(watcher);
  return std::make_unique<Handle>(std::move(watcher));
}

void WatchHub::Publish(const std::vector<StateChange>& changes) {
  MutexLock lock(&mutex_);
  std::erase_if(watchers_, [](const auto& weak) { return weak.expired(); });
  for (const auto& weak : watchers_) {
    if (const std::shared_ptr<Watcher> watcher = weak.lock()) {
      for (const StateChange& change : changes) {
        watcher->Offer(change);
      }
    }
  }
}

}  // namespace ballast
