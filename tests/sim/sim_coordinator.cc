// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/crash_point.h"
#include "common/rule.h"
#include "common/status_macros.h"
#include "storage/checkpoint.h"

namespace ballast::sim {
namespace {

// As in ps/coordinator/coordinator_loop.cc.
constexpr absl::Duration kTick = absl::Milliseconds(100);
constexpr int kRoundsMax = 16;
constexpr uint64_t kPairsPerRead = 4096;
// What a synced batch takes.
constexpr absl::Duration kPersistMin = absl::Microseconds(100);
constexpr absl::Duration kPersistMax = absl::Milliseconds(5);

bool HoldsDecision(const CoreActions& actions) {
  return std::any_of(actions.changes.begin(), actions.changes.end(),
                     [](const StateChange& change) {
                       return change.value.has_value() &&
                              change.key.starts_with("step/");
                     });
}

}  // namespace

bool SimCoordinator::Alive() {
  if (options_.sim_disk->stopped()) {
    options_.world->Kill(options_.life, Death::kPower);
  }
  return options_.life->alive;
}

absl::StatusOr<RunState> SimCoordinator::ReadState() {
  std::vector<std::pair<std::string, std::string>> all;
  std::string begin;
  while (true) {
    std::vector<std::pair<std::string, std::string>> some;
    BALLAST_ASSIGN_OR_RETURN(some, store_->Range(begin, "\xff", kPairsPerRead));
    if (some.empty()) {
      return ParseRunState(all);
    }
    begin = some.back().first + '\0';
    all.insert(all.end(), some.begin(), some.end());
  }
}

absl::Status SimCoordinator::Open() {
  const absl::Time now = options_.world->NowOf(*options_.life);
  BALLAST_RETURN_IF_ERROR(options_.disk->MakeDirectories(options_.run_dir));
  BALLAST_ASSIGN_OR_RETURN(
      store_, options_.disk->OpenStateStore(
                  absl::StrCat(options_.run_dir, "/coordinator"), {}));
  BALLAST_ASSIGN_OR_RETURN(const RunState state, ReadState());
  std::optional<CheckpointManifest> checkpoint;
  const std::optional<StepKey> newest = state.newest_checkpoint();
  if (options_.core.resume && newest.has_value()) {
    BALLAST_ASSIGN_OR_RETURN(
        checkpoint, ReadManifest(state.checkpoints.at(*newest), options_.disk));
  }
  BALLAST_ASSIGN_OR_RETURN(core_,
                           CoordinatorCore::Create(options_.core, state,
                                                   std::move(checkpoint), now));
  return absl::OkStatus();
}

void SimCoordinator::Start() {
  const absl::Status opened = Open();
  if (!Alive()) {
    return;
  }
  if (!opened.ok()) {
    over_ = true;
    options_.exited(opened);
    return;
  }
  tick_at_ = options_.world->NowOf(*options_.life);
  options_.network->Listen(kCoordinator, options_.life, nullptr);
  CarryOut(tick_at_);  // The term must be durable before anyone is admitted.
  if (Alive()) {
    KeepTicking();
  }
}

void SimCoordinator::KeepTicking() {
  options_.world->After(kTick / 2, options_.life, [this] {
    TurnSoon(absl::ZeroDuration());
    KeepTicking();
  });
}

void SimCoordinator::Post(Event event) {
  events_.push_back(std::move(event));
  TurnSoon(absl::Microseconds(20));
}

void SimCoordinator::TurnSoon(absl::Duration delay) {
  if (turn_scheduled_ || over_) {
    return;
  }
  turn_scheduled_ = true;
  options_.world->After(delay, options_.life, [this] {
    turn_scheduled_ = false;
    Turn();
  });
}

// One round of the loop. The answers go out when the changes are durable; until
// then the loop does nothing else.
void SimCoordinator::Turn() {
  if (over_) {
    return;
  }
  for (const Event& event : std::exchange(events_, {})) {
    event(options_.world->NowOf(*options_.life));
  }
  const absl::Time now = options_.world->NowOf(*options_.life);
  if (now >= tick_at_) {
    core_->Tick(now);
    tick_at_ = now + kTick;
  }
  if (!BALLAST_RULE(kDecisionLoggedFirst)) {
    AnswerPolls(now, /*closing=*/false);
  }
  persisted_something_ = false;
  CarryOut(now);
  if (!Alive()) {
    return;
  }
  const auto finish = [this] {
    for (const std::function<void()>& answer : std::exchange(answers_, {})) {
      answer();
    }
    refuses_ = false;
    turn_scheduled_ = false;
    if (core_->ended()) {
      over_ = true;
      AnswerPolls(options_.world->NowOf(*options_.life), /*closing=*/true);
      absl::Status outcome = core_->failure();
      outcome.Update(broken_);
      options_.exited(outcome);
      return;
    }
    AnswerPolls(options_.world->NowOf(*options_.life), /*closing=*/false);
    if (!events_.empty()) {
      TurnSoon(absl::ZeroDuration());
    }
  };
  if (!persisted_something_) {
    finish();
    return;
  }
  turn_scheduled_ = true;  // Until it is done.
  options_.world->After(
      options_.world->random().Scaled(kPersistMin, kPersistMax), options_.life,
      finish);
}

void SimCoordinator::CarryOut(absl::Time now) {
  for (int round = 0; round < kRoundsMax && options_.life->alive; ++round) {
    const CoreActions actions = core_->TakeActions();
    if (actions.empty() || !broken_.ok()) {
      return;
    }
    const absl::Status done = CarryOutOnce(actions, now);
    if (!Alive()) {
      return;
    }
    if (!done.ok()) {
      broken_ = absl::Status(
          done.code(),
          absl::StrCat("the coordinator cannot write: ", done.message()));
      refuses_ = true;
      core_->Fail(broken_, now);
    }
  }
}

absl::Status SimCoordinator::CarryOutOnce(const CoreActions& actions,
                                          absl::Time now) {
  const bool decides = HoldsDecision(actions);
  if (decides) {
    BALLAST_CRASH_POINT("coordinator.decision.before_log");
  }
  if (!actions.changes.empty()) {
    persisted_something_ = true;
    BALLAST_RETURN_IF_ERROR(store_->Apply(actions.changes));
  }
  if (options_.life->alive) {
    options_.persisted(actions);
  }
  if (decides) {
    BALLAST_CRASH_POINT("coordinator.decision.logged");
  }
  for (const std::string& path : actions.manifests_to_remove) {
    options_.disk->Unlink(path).IgnoreError();
  }
  for (const CheckpointManifest& manifest : actions.manifests_to_write) {
    const StepKey key = {manifest.timeline, manifest.step};
    const std::string dir = absl::StrCat(options_.run_dir, "/checkpoints");
    BALLAST_RETURN_IF_ERROR(options_.disk->MakeDirectories(dir));
    const absl::Status written = WriteManifest(dir, manifest, options_.disk);
    BALLAST_CRASH_POINT("coordinator.manifest.written");
    if (written.ok()) {
      // As RunFolder::ManifestPath.
      core_->ManifestWritten(
          key,
          absl::StrFormat("%s/step-%08d/manifest.json", dir, manifest.step),
          now);
    } else {
      core_->ManifestWritten(key, written, now);
    }
  }
  for (const Probe& probe : actions.probes) {
    RunProbe(probe);
  }
  return absl::OkStatus();
}

// One attempt to connect. Without an answer nothing is known.
void SimCoordinator::RunProbe(const Probe& probe) {
  World& world = *options_.world;
  const LifePointer server = options_.network->Listener(probe.address);
  if (server != nullptr &&
      (options_.network->IsCut(kCoordinator, server->name) ||
       options_.network->IsCut(server->name, kCoordinator))) {
    return;
  }
  const bool alive = server != nullptr;
  world.After(options_.network->Delay() * 2, options_.life,
              [this, probe, alive] {
                Post([this, probe, alive](absl::Time now) {
                  core_->ProbeResult(probe.incarnation, alive, now);
                });
              });
}

void SimCoordinator::Join(const v1::JoinRequest& request,
                          Network::Answer<v1::JoinReply> answer) {
  Post([this, request, answer](absl::Time now) {
    answers_.push_back([this, answer, reply = core_->Join(request, now)] {
      answer(refuses_ ? absl::UnavailableError("the coordinator cannot write")
                      : reply);
    });
  });
}

void SimCoordinator::Poll(const LifePointer& caller,
                          const v1::PollRequest& request,
                          Network::Answer<v1::PollReply> answer) {
  Post([this, number = caller->number, request, answer](absl::Time now) {
    const absl::Status alive = core_->Heartbeat(request, now);
    if (!alive.ok()) {
      answers_.push_back([answer, alive] { answer(alive); });
      return;
    }
    pollers_[number] = request.incarnation();
    const absl::Duration wait =
        std::clamp(absl::Milliseconds(request.wait_ms()), absl::ZeroDuration(),
                   options_.core.job.cluster.lease / 3);
    polls_.push_back(
        {request.incarnation(), request.seen_number(), now + wait, answer});
  });
}

void SimCoordinator::Report(const v1::ReportRequest& request,
                            Network::Answer<v1::ReportReply> answer) {
  Post([this, request, answer](absl::Time now) {
    const absl::Status taken = core_->Report(request, now);
    if (taken.ok()) {
      answers_.push_back([this, answer] {
        if (refuses_) {
          answer(absl::UnavailableError("the coordinator cannot write"));
        } else {
          answer(v1::ReportReply());
        }
      });
    } else {
      answers_.push_back([answer, taken] { answer(taken); });
    }
  });
}

void SimCoordinator::GetPlacement(Network::Answer<v1::Placement> answer) {
  Post([this, answer](absl::Time) {
    answers_.push_back(
        [answer, placement = core_->GetPlacement()] { answer(placement); });
  });
}

void SimCoordinator::ReportExit(const v1::ExitReport& report) {
  Post([this, report](absl::Time now) { core_->ExitReported(report, now); });
}

void SimCoordinator::Scale(const v1::ScaleRequest& request) {
  Post([this, request](absl::Time now) {
    core_->Scale(request, now).status().IgnoreError();
  });
}

void SimCoordinator::Stop(const v1::StopRequest& request) {
  Post([this, request](absl::Time now) { core_->Stop(request, now); });
}

void SimCoordinator::ConnectionLost(const LifePointer& caller) {
  const auto found = pollers_.find(caller->number);
  if (found == pollers_.end()) {
    return;
  }
  Post([this, incarnation = found->second](absl::Time now) {
    core_->ConnectionLost(incarnation, now);
  });
  pollers_.erase(found);
}

void SimCoordinator::AnswerPolls(absl::Time now, bool closing) {
  for (auto poll = polls_.begin(); poll != polls_.end();) {
    absl::StatusOr<v1::PollReply> reply =
        core_->Directive(poll->incarnation, poll->seen_number);
    bool news = !reply.ok() || reply->number() > poll->seen_number;
    if (!BALLAST_RULE(kDecisionRepeated) && reply.ok()) {
      // Told once; an answer that is lost is lost.
      uint64_t& told = told_[poll->incarnation];
      news = reply->number() > told;
      told = std::max(told, reply->number());
    }
    if (news || closing || now >= poll->deadline) {
      poll->answer(std::move(reply));
      poll = polls_.erase(poll);
    } else {
      ++poll;
    }
  }
}

}  // namespace ballast::sim
