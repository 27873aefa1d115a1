// SPDX-License-Identifier: Apache-2.0
// Virtual time and the one queue of everything that is going to happen. Two
// runs from the same seed do the same things in the same order, so a failure is
// found without a trace and explained by running it again with one.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "tests/sim/random.h"

namespace ballast::sim {

// One life of a simulated process: what is addressed to it runs only while it
// lives, and later when it is stopped. shared: events in the queue outlive it.
struct Life {
  std::string name;     // "server-0".
  uint64_t number = 0;  // Of all lives of the world.
  // False from the instant of its death. What still runs of it then runs into
  // the void: its disk is stopped and its words are not sent.
  bool alive = true;
  bool buried = false;  // Its objects are gone.
  absl::Time paused_until = absl::InfinitePast();
  // Its monotonic clock runs ahead of the world's by this much.
  absl::Duration clock_ahead;
};
using LifePointer = std::shared_ptr<Life>;

// How a process ends.
enum class Death {
  kKill,   // kill -9: the kernel closes its connections, the page cache stays.
  kPower,  // Its machine is gone: nobody hears, what was not synced is lost.
  kExit,   // By itself.
};

// Not thread-safe: a world has one thread.
class World {
 public:
  using Work = std::function<void()>;

  explicit World(uint64_t seed, bool tracing);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  uint64_t seed() const { return seed_; }
  absl::Time now() const { return now_; }
  absl::Time NowOf(const Life& life) const { return now_ + life.clock_ahead; }
  Random& random() { return random_; }

  LifePointer NewLife(absl::string_view name);

  // Runs `work` when `delay` has passed.
  void After(absl::Duration delay, Work work);
  // The same in a process: dropped when it has died, put off while it stands.
  void After(absl::Duration delay, const LifePointer& life, Work work);

  // Runs the next event; false when there is none.
  bool RunNext();
  // The process in whose name something runs now; null: the world itself.
  const LifePointer& running() const { return running_; }
  uint64_t events() const { return events_; }

  // Keeps a line for the report of a violation when tracing; the last ones
  // only. Build the text under `if (tracing())`.
  bool tracing() const { return tracing_; }
  void Trace(absl::string_view line);
  const std::deque<std::string>& trace() const { return trace_; }

  // The first promise that was broken; the run ends with it.
  void Violate(absl::string_view oracle, absl::string_view what);
  bool violated() const { return !oracle_.empty(); }
  const std::string& oracle() const { return oracle_; }
  const std::string& violation() const { return violation_; }

  // Counts what was done to the cluster, by kind.
  void Count(absl::string_view fault) { ++faults_[std::string(fault)]; }
  const std::map<std::string, uint64_t>& faults() const { return faults_; }

  // The world that this thread runs; null outside of one.
  static World* Current();

  // Ends a life at this instant, in the middle of whatever it does; it is taken
  // apart after the event. Again: nothing.
  void Kill(const LifePointer& life, Death death);

  // Called with the name of every crash point that the running process passes.
  std::function<void(const char* name)> on_crash_point;
  // The instant of a death: the disk stops.
  std::function<void(const LifePointer&, Death)> on_death;
  // After the event: its objects go, and others hear of it.
  std::function<void(const LifePointer&, Death)> on_burial;

 private:
  struct Event {
    LifePointer life;  // Null: of the world.
    Work work;
  };
  void Bury();

  const uint64_t seed_;
  const bool tracing_;
  Random random_;
  absl::Time now_;
  uint64_t events_ = 0;
  uint64_t next_event_ = 0;
  uint64_t lives_ = 0;
  // By time, then in the order of asking.
  std::map<std::pair<absl::Time, uint64_t>, Event> queue_;
  LifePointer running_;
  std::deque<std::pair<LifePointer, Death>> dead_;
  std::deque<std::string> trace_;
  std::string oracle_;
  std::string violation_;
  std::map<std::string, uint64_t> faults_;
  World* const outer_;
};

}  // namespace ballast::sim
