// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/standby.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/mutex.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

// etcd grants no shorter one.
constexpr absl::Duration kLeaderLease = absl::Seconds(2);
constexpr absl::Duration kStopCheck = absl::Milliseconds(100);
// A leader's key that is gone is told by a watch; this is for a watch that
// could not be had.
constexpr absl::Duration kAskAgain = absl::Seconds(1);
constexpr absl::Duration kRetry = absl::Milliseconds(100);

class Waiter {
 public:
  explicit Waiter(const StandbyOptions& options) : options_(options) {}

  void Wake() {
    MutexLock lock(&mutex_);
    woken_ = true;
    changed_.NotifyAll();
  }

  // Waits for Wake or `wait`; false when it is time to stop.
  bool Pause(absl::Duration wait) {
    const absl::Time until = MonotonicNow() + wait;
    while (true) {
      if (options_.stop()) {
        return false;
      }
      MutexLock lock(&mutex_);
      const absl::Duration left = until - MonotonicNow();
      if (std::exchange(woken_, false) || left <= absl::ZeroDuration()) {
        return true;
      }
      changed_.WaitFor(&mutex_, std::min(left, kStopCheck));
    }
  }

 private:
  const StandbyOptions& options_;
  Mutex mutex_;
  CondVar changed_;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

absl::StatusOr<Accession> WaitToLead(SharedStateStore* store,
                                     const StandbyOptions& options) {
  Waiter waiter(options);
  std::unique_ptr<StoreWatch> watch;
  Accession accession;
  absl::Time answered_at = MonotonicNow();
  std::string told;
  while (true) {
    absl::StatusOr<std::unique_ptr<Leadership>> taken =
        Leadership::Take(store, options.address, kLeaderLease);
    if (taken.ok()) {
      accession.leadership = *std::move(taken);
      return accession;
    }
    const bool silent = absl::IsUnavailable(taken.status());
    if (!silent && !absl::IsAborted(taken.status())) {
      return taken.status();
    }
    const absl::Time now = MonotonicNow();
    answered_at = silent ? answered_at : now;
    if (now - answered_at >= options.give_up_after) {
      return absl::UnavailableError(
          absl::StrCat("the state store has been silent for ",
                       absl::FormatDuration(now - answered_at),
                       " (cluster.give_up_after): ", taken.status().message()));
    }
    const std::string reason =
        absl::StrCat("standby; ", taken.status().message());
    options.on_wait(reason);
    if (reason != told) {
      told = reason;
      LogEvent(silent ? Severity::kWarn : Severity::kInfo, "standing_by",
               {{"reason", reason}});
    }
    accession.stood_by = accession.stood_by || !silent;
    if (watch == nullptr && !silent) {
      auto watched = store->Watch(
          kLeaderKey, absl::StrCat(kLeaderKey, absl::string_view("\0", 1)),
          [&waiter](const StateChange& change) {
            if (!change.value.has_value()) {
              waiter.Wake();
            }
          });
      if (watched.ok()) {
        watch = *std::move(watched);
        continue;  // It may have gone in between.
      }
    }
    if (!waiter.Pause(silent ? kRetry : kAskAgain)) {
      return absl::CancelledError("stopped while standing by");
    }
  }
}

}  // namespace ballast
