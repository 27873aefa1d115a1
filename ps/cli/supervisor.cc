// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/supervisor.h"

#include <signal.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ps/cli/tool.h"

namespace ballast {
namespace {

// A coordinator that neither announces itself nor ends is broken.
constexpr absl::Duration kAnnounceTimeout = absl::Seconds(30);
// From a failure to the kill of what is left: the end must be told within 15 s,
// and the others may want to say why they end.
constexpr absl::Duration kFailureGrace = absl::Seconds(6);
// Without a coordinator nobody tells the others anything.
constexpr absl::Duration kOrphanGrace = absl::Seconds(2);
// From the coordinator's good end to a SIGTERM for whoever it did not reach:
// members that were about to join.
constexpr absl::Duration kLeaveGrace = absl::Seconds(5);
// From the last SIGTERM to the kill.
constexpr absl::Duration kEndGrace = absl::Seconds(10);
// Between the second death and the start after it; doubled from then on.
constexpr absl::Duration kFirstPause = absl::Milliseconds(100);
constexpr absl::Duration kLongestPause = absl::Seconds(5);

absl::Duration PauseAfter(uint32_t deaths) {
  if (deaths <= 1) {
    return absl::ZeroDuration();
  }
  absl::Duration pause = kFirstPause;
  for (uint32_t i = 2; i < deaths && pause < kLongestPause; ++i) {
    pause *= 2;
  }
  return std::min(pause, kLongestPause);
}

}  // namespace

void Supervisor::Say(std::string text) {
  SupervisorAction action;
  action.text = std::move(text);
  actions_.push_back(std::move(action));
}

void Supervisor::Signal(const std::string& name, int signal) {
  SupervisorAction action;
  action.kind = SupervisorAction::Kind::kSignal;
  action.name = name;
  action.signal = signal;
  actions_.push_back(std::move(action));
}

void Supervisor::SignalAll(int signal) {
  terminated_ += signal == SIGTERM ? 1 : 0;
  for (const auto& [name, child] : children_) {
    if (child.pid != 0) {
      Signal(name, signal);
    }
  }
}

void Supervisor::StopRun(const std::string& why, bool abort) {
  SupervisorAction action;
  action.kind = SupervisorAction::Kind::kStopRun;
  action.text = why;
  action.abort = abort;
  actions_.push_back(std::move(action));
}

void Supervisor::Start(const std::string& name, Child* child) {
  SupervisorAction action;
  action.kind = SupervisorAction::Kind::kStart;
  action.name = name;
  // A resume that has not been seen to stand is asked for once more.
  action.again = child->started && (!options_.resume || known_);
  child->start_at = absl::InfiniteFuture();
  child->started = true;
  actions_.push_back(std::move(action));
}

void Supervisor::Kill() {
  stage_ = Stage::kKilled;
  deadline_ = absl::InfiniteFuture();
  announce_by_ = absl::InfiniteFuture();
  SignalAll(SIGKILL);
}

void Supervisor::Fail(const std::string& what, bool tell, absl::Time now) {
  if (stage_ == Stage::kFailing || stage_ == Stage::kKilled) {
    return;
  }
  stage_ = Stage::kFailing;
  failure_ = what;
  deadline_ = now + kFailureGrace;
  announce_by_ = absl::InfiniteFuture();
  if (!tell) {
    return;
  }
  if (listening_) {
    StopRun(what, /*abort=*/true);
  } else {
    SignalAll(SIGTERM);
    deadline_ = now + kOrphanGrace;
  }
}

std::string Supervisor::Death(const std::string& name,
                              const ProcessEnd& end) const {
  return absl::StrCat(name, " (pid ", end.pid, ") ", end.text,
                      step_ > 0 ? absl::StrCat(" after step ", step_) : "");
}

bool Supervisor::EndedWell(const std::string& name,
                           const ProcessEnd& end) const {
  // A role may not yet have been ready to take the SIGTERM of a stop.
  const bool told =
      terminated_ > 0 || (name == kCoordinatorName && coordinator_signalled_);
  return end.exit_code == 0 || (told && end.signal == SIGTERM);
}

bool Supervisor::Goes() const {
  return phase_ != "finishing" && phase_ != "failed" &&
         (phase_ != "done" || options_.keep);
}

void Supervisor::Begin(absl::Time now) {
  announce_by_ = now + kAnnounceTimeout;
  Start(kCoordinatorName, &children_[kCoordinatorName]);
}

void Supervisor::Started(const std::string& name, int64_t pid, absl::Time now) {
  children_[name].pid = pid;
  if (stage_ == Stage::kKilled) {
    Signal(name, SIGKILL);
  }
  if (name == kCoordinatorName && restarts()) {
    announce_by_ = now + kAnnounceTimeout;
  }
}

void Supervisor::StartFailed(const std::string& name, const std::string& why,
                             absl::Time now) {
  if (!known_) {  // What never worked will not work.
    Fail(why, /*tell=*/true, now);
    return;
  }
  ProcessEnd end;
  end.exit_code = -1;
  end.text = absl::StrCat("cannot be started: ", why);
  StartAgain(name, end, now);
}

void Supervisor::Listening(absl::Time now) {
  if (children_[kCoordinatorName].pid == 0) {
    return;  // The last word of one that has ended.
  }
  listening_ = true;
  announce_by_ = absl::InfiniteFuture();
  if (stage_ == Stage::kStopping) {
    StopRun("interrupted", /*abort=*/false);
  } else if (stage_ == Stage::kFailing) {
    StopRun(failure_, /*abort=*/true);
  } else if (!listened_) {
    for (uint32_t i = 0; i < options_.servers; ++i) {
      const std::string name = absl::StrCat("server-", i);
      Start(name, &children_[name]);
    }
    for (uint32_t i = 0; i < options_.workers; ++i) {
      const std::string name = absl::StrCat("worker-", i);
      Start(name, &children_[name]);
    }
  }
  listened_ = true;
  TimePassed(now);
}

void Supervisor::Ended(const std::string& name, const ProcessEnd& end,
                       absl::Time now) {
  children_[name].pid = 0;
  if (stage_ == Stage::kKilled) {
    return;
  }
  if (name == kCoordinatorName) {
    CoordinatorEnded(end, now);
  } else if (!EndedWell(name, end)) {
    Died(name, end, now);
  }
  // Who left in good order is missed when the next status wants it.
}

void Supervisor::CoordinatorEnded(const ProcessEnd& end, absl::Time now) {
  listening_ = false;
  announce_by_ = absl::InfiniteFuture();
  const bool well = EndedWell(kCoordinatorName, end);
  if (well && (stage_ == Stage::kRunning || stage_ == Stage::kStopping)) {
    stage_ = Stage::kEnding;
    deadline_ = now + (interrupted_ ? kOrphanGrace : kLeaveGrace);
    return;
  }
  if (well && stage_ == Stage::kEnding) {
    return;
  }
  coordinator_gave_up_ |= !well && end.exit_code >= 0;
  if (stage_ == Stage::kFailing) {
    SignalAll(SIGTERM);
    deadline_ = std::min(deadline_, now + kOrphanGrace);
  } else if (end.exit_code >= 0) {
    // It ends by itself only when the run has failed.
    bad_configuration_ |= end.exit_code == kExitBadConfig;
    Fail(Death(kCoordinatorName, end), /*tell=*/true, now);
  } else {
    Died(kCoordinatorName, end, now);
  }
}

void Supervisor::Died(const std::string& name, const ProcessEnd& end,
                      absl::Time now) {
  if (stage_ == Stage::kEnding) {
    return;  // What was promised stands already.
  }
  unreported_.push_back({name, end, now});
  dead_.push_back(name);
  if (end.exit_code == kExitBadConfig) {
    bad_configuration_ = true;
    Fail(Death(name, end), /*tell=*/true, now);
  } else if (terminated_ > 0) {
    Fail(Death(name, end), /*tell=*/true, now);
  } else if (restarts() && children_[name].wanted && phase_ != "failed" &&
             (phase_ != "done" || options_.keep)) {
    StartAgain(name, end, now);
  }
}

void Supervisor::StartAgain(const std::string& name, const ProcessEnd& end,
                            absl::Time now) {
  Child& child = children_[name];
  const uint32_t most = std::max(1u, options_.restarts_max);
  if (++child.deaths >= most) {
    dead_ = {name};
    coordinator_gave_up_ = false;
    Fail(most == 1 ? Death(name, end)
                   : absl::StrCat(Death(name, end), ", its death number ",
                                  child.deaths,
                                  " without a committed step in between "
                                  "(cluster.restarts_max)"),
         /*tell=*/true, now);
    return;
  }
  const absl::Duration pause = PauseAfter(child.deaths);
  child.start_at = now + pause;
  if (pause == absl::ZeroDuration()) {
    Start(name, &child);
  }
  Say(absl::StrCat(
      Death(name, end), "; ",
      pause == absl::ZeroDuration()
          ? "started again"
          : absl::StrCat("starts again in ", absl::FormatDuration(pause)),
      "\n"));
}

void Supervisor::StatusSeen(const v1::StatusReply& status, absl::Time now) {
  known_ = true;
  phase_ = status.phase();
  if (status.step() > step_) {
    for (auto& [name, child] : children_) {
      child.deaths = 0;
    }
    dead_.clear();
  }
  step_ = status.step();
  if (!restarts()) {
    return;
  }
  if (!status.failure().empty()) {
    Fail(status.failure(), /*tell=*/false, now);
  } else if (stage_ == Stage::kRunning && Goes()) {
    Reconcile(status, now);
  }
}

void Supervisor::Reconcile(const v1::StatusReply& status, absl::Time now) {
  if (status.wanted().empty()) {
    return;
  }
  const std::set<std::string> wanted(status.wanted().begin(),
                                     status.wanted().end());
  for (auto& [name, child] : children_) {
    child.wanted = name == kCoordinatorName || wanted.contains(name);
    if (!child.wanted) {
      child.start_at = absl::InfiniteFuture();
    }
  }
  for (const std::string& name : wanted) {
    if (!absl::StartsWith(name, "server-") &&
        !absl::StartsWith(name, "worker-")) {
      continue;
    }
    Child& child = children_[name];
    if (child.pid != 0 || child.start_at != absl::InfiniteFuture()) {
      continue;
    }
    if (!child.started) {
      Start(name, &child);
      Say(absl::StrCat(name, " is wanted; started\n"));
    } else {
      ProcessEnd end;
      end.text = "has left, but is still wanted";
      StartAgain(name, end, now);
    }
  }
  std::erase_if(children_, [](const auto& entry) {
    return !entry.second.wanted && entry.second.pid == 0;
  });
}

void Supervisor::Interrupted(absl::Time now) {
  if (interrupted_) {
    Say("ending at once\n");
    if (failure_.empty()) {
      failure_ = "ended at once, without finishing the step in flight";
    }
    Kill();
    return;
  }
  interrupted_ = true;
  if (stage_ != Stage::kRunning) {
    return;
  }
  stage_ = Stage::kStopping;
  deadline_ = now + options_.stop_timeout;
  Say("stopping after the step in flight, with a checkpoint; once more ends "
      "it at once\n");
  if (listening_) {
    StopRun("interrupted", /*abort=*/false);
  } else if (!listened_) {
    SignalAll(SIGTERM);
  }  // Else it is being started again, and told when it listens.
}

void Supervisor::StopRefused(absl::Time now) {
  if (stage_ == Stage::kFailing) {
    SignalAll(SIGTERM);
    deadline_ = std::min(deadline_, now + kOrphanGrace);
  } else if (children_[kCoordinatorName].pid != 0) {
    // A signal means the same and cannot get lost. Members are left to it: they
    // are needed for the step in flight.
    coordinator_signalled_ = true;
    Signal(kCoordinatorName, SIGTERM);
  }
}

void Supervisor::DeadlinePassed(absl::Time now) {
  if (stage_ == Stage::kEnding && terminated_ < 2) {
    SignalAll(SIGTERM);
    deadline_ = now + (terminated_ < 2 ? kOrphanGrace : kEndGrace);
    return;
  }
  const std::map<std::string, int64_t> alive = Alive();
  if (failure_.empty() && !alive.empty()) {
    failure_ = absl::StrCat(alive.begin()->first,
                            " did not end in time and was killed");
  }
  Kill();
}

void Supervisor::TimePassed(absl::Time now) {
  if (now >= announce_by_) {
    Fail(absl::StrCat("the coordinator has not said its address for ",
                      absl::FormatDuration(kAnnounceTimeout)),
         /*tell=*/true, now);
  }
  for (auto& [name, child] : children_) {
    if (restarts() && child.start_at <= now) {
      Start(name, &child);
    }
  }
  if (now >= deadline_) {
    DeadlinePassed(now);
  }
}

std::vector<SupervisorAction> Supervisor::TakeActions() {
  return std::exchange(actions_, {});
}

absl::Time Supervisor::next_at() const {
  absl::Time next = std::min(deadline_, announce_by_);
  for (const auto& [name, child] : children_) {
    if (restarts()) {
      next = std::min(next, child.start_at);
    }
  }
  return next;
}

bool Supervisor::over() const {
  return std::none_of(
      children_.begin(), children_.end(), [this](const auto& entry) {
        return entry.second.pid != 0 ||
               (restarts() && entry.second.start_at != absl::InfiniteFuture());
      });
}

std::map<std::string, int64_t> Supervisor::Alive() const {
  std::map<std::string, int64_t> alive;
  for (const auto& [name, child] : children_) {
    if (child.pid != 0) {
      alive[name] = child.pid;
    }
  }
  return alive;
}

std::vector<std::string> Supervisor::dead() const {
  std::vector<std::string> names = dead_;
  if (coordinator_gave_up_) {
    names.push_back(kCoordinatorName);
  }
  return names;
}

}  // namespace ballast
