// SPDX-License-Identifier: Apache-2.0
// Asks whether anyone still listens at an address: a reset connection may be a
// death or a hiccup, and a port that refuses is a death for certain.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "ps/membership/core_types.h"

namespace ballast {

enum class ProbeAnswer {
  kAccepted,
  kRefused,  // Nobody listens: the process is gone.
  kUnclear,  // No answer in time, or the host cannot be reached.
};

// Connects to host:port once, for at most `limit`.
ProbeAnswer ProbeAddress(const std::string& address, absl::Duration limit);

// Thread-safe. Probes one address after the other on a thread of its own.
class Prober {
 public:
  // Called on the prober's thread; must not block.
  using OnAnswer = std::function<void(uint64_t incarnation, bool alive)>;

  // `on_answer` hears of clear answers alone.
  explicit Prober(OnAnswer on_answer);
  // Waits for the probe in progress; the others are forgotten.
  ~Prober();

  // Forgotten when kWaitingMax wait already: a lease tells as well, later.
  void Start(const Probe& probe);

 private:
  static constexpr size_t kWaitingMax = 1024;
  void Run();

  const OnAnswer on_answer_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Probe> waiting_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // Last: it uses all of the above.
};

}  // namespace ballast
