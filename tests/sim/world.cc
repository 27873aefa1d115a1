// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/world.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "common/check.h"
#include "common/crash_point.h"
#include "common/log.h"
#include "common/memory_setup.h"

namespace ballast {
namespace sim {
namespace {

constexpr size_t kTraceLinesMax = 4000;
// Nothing should depend on where time starts.
const absl::Time kStart = absl::FromUnixSeconds(1'000'000);

thread_local World* current_world = nullptr;

// A failed BALLAST_CHECK of the product.
struct BrokenCheck {
  std::string what;
};

}  // namespace

World::World(uint64_t seed, bool tracing)
    : seed_(seed),
      tracing_(tracing),
      random_(Random(seed).Fork(1)),
      now_(kStart),
      outer_(current_world) {
  current_world = this;
}

World::~World() {
  // What waits may hold parts of processes, which may look at the world.
  queue_.clear();
  current_world = outer_;
}

World* World::Current() { return current_world; }

LifePointer World::NewLife(absl::string_view name) {
  auto life = std::make_shared<Life>();
  life->name = std::string(name);
  life->number = ++lives_;
  return life;
}

void World::After(absl::Duration delay, Work work) {
  After(delay, nullptr, std::move(work));
}

void World::After(absl::Duration delay, const LifePointer& life, Work work) {
  queue_.emplace(std::pair(now_ + delay, next_event_++),
                 Event{life, std::move(work)});
}

void World::Kill(const LifePointer& life, Death death) {
  if (!life->alive) {
    return;
  }
  life->alive = false;
  dead_.emplace_back(life, death);
  if (tracing_) {
    Trace(absl::StrCat(life->name, "#", life->number, " ",
                       death == Death::kPower  ? "loses power"
                       : death == Death::kKill ? "is killed"
                                               : "exits"));
  }
  on_death(life, death);
}

void World::Bury() {
  while (!dead_.empty()) {
    const auto [life, death] = dead_.front();
    dead_.pop_front();
    life->buried = true;
    on_burial(life, death);
  }
}

bool World::RunNext() {
  if (queue_.empty()) {
    return false;
  }
  auto node = queue_.extract(queue_.begin());
  now_ = node.key().first;
  Event& event = node.mapped();
  if (event.life != nullptr && event.life->alive &&
      event.life->paused_until > now_) {
    // Later than what was put off before it, as it should be.
    queue_.emplace(std::pair(event.life->paused_until, next_event_++),
                   std::move(event));
    return true;
  }
  if (event.life == nullptr || event.life->alive) {
    ++events_;
    running_ = event.life;
    try {
      event.work();
    } catch (const BrokenCheck& broken) {
      Violate("check", broken.what);
    }
    running_ = nullptr;
    Bury();
  }
  return true;
}

void World::Trace(absl::string_view line) {
  if (!tracing_) {
    return;
  }
  trace_.push_back(absl::StrCat(
      absl::FormatDuration(absl::Trunc(now_ - kStart, absl::Microseconds(1))),
      " ", running_ ? absl::StrCat(running_->name, "#", running_->number) : "-",
      ": ", line));
  if (trace_.size() > kTraceLinesMax) {
    trace_.pop_front();
  }
}

void World::Violate(absl::string_view oracle, absl::string_view what) {
  if (violated()) {
    return;
  }
  oracle_ = std::string(oracle);
  violation_ = std::string(what);
  Trace(absl::StrCat("VIOLATION of '", oracle, "': ", what));
}

}  // namespace sim

// The product's log and crash points, as this world's: no line goes to standard
// error, no point ends the test.
LogValue::LogValue(absl::string_view text) : text_(text) {}

void LogEvent(Severity severity, absl::string_view event,
              std::initializer_list<LogField> fields) {
  sim::World* world = sim::World::Current();
  if (world == nullptr || !world->tracing()) {
    return;
  }
  std::string line =
      absl::StrCat(severity == Severity::kInfo ? "log " : "LOG ", event);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=", field.value.text());
  }
  world->Trace(line);
}

void SetLogRole(absl::string_view) {}

void CheckFailed(const char* file, int line, const char* condition) {
  const std::string what = absl::StrCat(file, ":", line, ": ", condition);
  if (sim::World::Current() != nullptr) {
    throw sim::BrokenCheck{what};
  }
  std::fprintf(stderr, "check failed at %s\n", what.c_str());
  std::abort();
}

// A process of its own it is not, and what it looks like must not matter.
void KeepHeapMemory() {}
uint64_t MinorFaults() { return 0; }
uint64_t ResidentBytes() { return 0; }

std::atomic<bool> crash_points_armed = true;

void ArmCrashPoints(const std::string&, const std::string&) {}

void PassCrashPoint(const char* name) {
  const sim::World* world = sim::World::Current();
  if (world != nullptr && world->running() != nullptr &&
      world->running()->alive && world->on_crash_point) {
    world->on_crash_point(name);
  }
}

}  // namespace ballast
