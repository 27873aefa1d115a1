// SPDX-License-Identifier: Apache-2.0
// Watches of a store that lives in this process: it publishes what it has
// written, and every watcher is told on a thread of its own, so that a slow one
// holds up nobody. What a watcher has not been told yet is kept by key, newest
// value only, so it is bounded by the keys there are.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "common/mutex.h"
#include "storage/state_store.h"

namespace ballast {

// Thread-safe. Watches may outlive the hub; they are told nothing then.
class WatchHub {
 public:
  // See SharedStateStore::Watch.
  std::unique_ptr<StoreWatch> Add(absl::string_view begin,
                                  absl::string_view end,
                                  SharedStateStore::OnChange on_change);
  // Never blocks on a watcher. Changes of one key must be published in the
  // order in which they were made.
  void Publish(const std::vector<StateChange>& changes);

 private:
  class Watcher;
  class Handle;
  Mutex mutex_;
  // Shared with the handles: either side may go first.
  std::vector<std::weak_ptr<Watcher>> watchers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast
