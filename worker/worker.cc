// SPDX-License-Identifier: Apache-2.0
#include "worker/worker.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/job_file.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

// For a last word to the coordinator before this process ends.
constexpr absl::Duration kFarewellMax = absl::Seconds(5);
// Events wait meanwhile; the core asks again.
constexpr absl::Duration kPlacementMax = absl::Seconds(1);

}  // namespace

Worker::Worker(const Job& job, std::string coordinator, std::string name)
    : job_(job),
      coordinator_(std::move(coordinator)),
      name_(std::move(name)),
      core_({.name = name_,
             .micro_batches = job.batch.micro_batches,
             .give_up_after = job.cluster.give_up_after,
             .drain_timeout = job.cluster.drain_timeout}) {}

// The runner and the session go first: they post events.
Worker::~Worker() {
  // Its threads ask the runner for figures, so they end first.
  if (session_ != nullptr) {
    session_->Stop();
  }
  runner_.reset();
  session_.reset();
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(
    const Job& job, const std::string& coordinator, const std::string& name) {
  auto worker = std::unique_ptr<Worker>(new Worker(job, coordinator, name));
  Worker* const raw = worker.get();
  PassRunner::Callbacks callbacks;
  callbacks.on_all_pushed = [raw](uint64_t pass) {
    raw->Post(
        [raw, pass](absl::Time now) { raw->core_.OnAllPushed(pass, now); });
  };
  callbacks.on_end = [raw](WorkerCore::PassEnd end) {
    raw->Post([raw, end = std::move(end)](absl::Time now) {
      raw->core_.OnPassEnded(end, now);
      if (!end.status.ok() && !absl::IsCancelled(end.status)) {
        LogEvent(Severity::kWarn, "pass_failed",
                 {{"step", raw->core_.step()}, {"why", end.status.message()}});
      }
    });
  };
  BALLAST_ASSIGN_OR_RETURN(worker->runner_,
                           PassRunner::Create(job, name, std::move(callbacks)));
  return worker;
}

void Worker::Post(Event event) {
  MutexLock lock(&mutex_);
  events_.push_back(std::move(event));
  changed_.NotifyAll();
}

bool Worker::Term() {
  if (!is_member_) {
    return false;
  }
  Post([this](absl::Time now) { core_.OnTerm(now); });
  return true;
}

v1::MemberStats Worker::Stats() const {
  v1::MemberStats stats = runner_->Stats();
  MutexLock lock(&mutex_);
  stats.set_step(step_);
  if (stats.waits_for().empty() && !waits_for_.empty()) {
    stats.set_waits_for(waits_for_);
    stats.set_waits_ms(
        absl::ToInt64Milliseconds(MonotonicNow() - waits_since_));
  }
  return stats;
}

v1::JoinRequest Worker::MakeJoin() const {
  v1::JoinRequest join;
  join.set_role(v1::ROLE_WORKER);
  join.set_name(name_);
  join.set_pid(getpid());
  std::array<char, 256> host = {};
  gethostname(host.data(), host.size() - 1);
  join.set_host(host.data());
  const auto add = [](const std::string& key, const std::string& value,
                      google::protobuf::RepeatedPtrField<v1::ConfigField>* to) {
    v1::ConfigField* const field = to->Add();
    field->set_key(key);
    field->set_value(value);
  };
  for (const auto& [key, value] : NumericsFields(job_)) {
    add(key, value, join.mutable_numerics());
  }
  add("kernels", runner_->kernels(), join.mutable_numerics());
  for (const auto& [key, value] : OperationsFields(job_)) {
    add(key, value, join.mutable_operations());
  }
  join.set_layout(runner_->layout().Encode());
  *join.mutable_plan() = runner_->plan();
  return join;
}

absl::Status Worker::Join() {
  is_member_ = false;
  if (session_ != nullptr) {
    session_->Stop();
  }
  const uint64_t life = ++lives_;
  MemberSession::Options options;
  options.coordinator = coordinator_;
  options.join = MakeJoin();
  options.silence_max = job_.cluster.give_up_after;
  options.stats = [this] { return Stats(); };
  options.on_directive = [this, life](const v1::PollReply& reply) {
    Post([this, life, reply](absl::Time now) {
      if (life == lives_) {
        core_.OnDirective(reply, now);
      }
    });
  };
  options.on_end = [this, life](const absl::Status& status) {
    Post([this, life, status](absl::Time now) {
      if (life == lives_) {
        core_.OnSessionOver(status, now);
      }
    });
  };
  BALLAST_ASSIGN_OR_RETURN(session_, MemberSession::Start(std::move(options)));
  is_member_ = true;
  const v1::JoinReply& admission = session_->admission();
  LogEvent(Severity::kInfo, "joined",
           {{"incarnation", admission.incarnation()},
            {"timeline", admission.timeline()}});
  core_.OnJoined(admission, MonotonicNow());
  return absl::OkStatus();
}

absl::Status Worker::Run() {
  BALLAST_RETURN_IF_ERROR(Join());
  while (true) {
    // What was asked for first, so that the core knows when to be called.
    if (std::optional<absl::Status> end = CarryOut(core_.TakeActions())) {
      return *end;
    }
    ShowWait();
    const Event event = NextEvent();
    const absl::Time now = MonotonicNow();
    NoteProgress(now);
    if (event) {
      event(now);
    } else {
      core_.Tick(now);
    }
  }
}

Worker::Event Worker::NextEvent() {
  const absl::Time wake = core_.NextWake();
  MutexLock lock(&mutex_);
  while (events_.empty()) {
    const absl::Duration left = wake - MonotonicNow();
    if (left <= absl::ZeroDuration()) {
      return {};
    }
    // The system's clock knows no infinity.
    changed_.WaitFor(&mutex_, std::min(left, absl::Hours(1)));
  }
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void Worker::NoteProgress(absl::Time now) {
  const uint64_t progress = runner_->progress();
  if (progress != progress_) {
    progress_ = progress;
    core_.OnPassProgress(pass_, now);
  }
}

void Worker::ShowWait() {
  MutexLock lock(&mutex_);
  step_ = core_.step();
  waits_for_ = core_.waits_for();
  waits_since_ = core_.waits_since();
}

std::optional<absl::Status> Worker::CarryOut(WorkerCore::Actions actions) {
  if (actions.call_off.has_value()) {
    LogEvent(Severity::kInfo, "pass_called_off", {{"step", core_.step()}});
    runner_->CallOff(*actions.call_off);
  }
  if (actions.start.has_value()) {
    pass_ = actions.start->id;
    runner_->Run(*std::move(actions.start), placement_);
  }
  for (size_t i = 0; i < actions.reports.size(); ++i) {
    v1::ReportRequest& report = actions.reports[i];
    if (actions.exit.has_value() && i + 1 == actions.reports.size()) {
      session_->Report(std::move(report), kFarewellMax).IgnoreError();
    } else {
      session_->Post(std::move(report));
    }
  }
  if (actions.exit.has_value()) {
    LogEvent(Severity::kInfo, "leaving", {{"why", actions.exit->ToString()}});
    return actions.exit;
  }
  if (actions.rejoin) {
    LogEvent(Severity::kWarn, "fenced", {{"was", lives_}});
    if (absl::Status status = Join(); !status.ok()) {
      return status;
    }
    return CarryOut(core_.TakeActions());
  }
  if (actions.want_placement) {
    AskPlacement();
    return CarryOut(core_.TakeActions());
  }
  return std::nullopt;
}

void Worker::AskPlacement() {
  const absl::StatusOr<v1::Placement> placement =
      session_->TryPlacement(kPlacementMax);
  const absl::Time now = MonotonicNow();
  if (!placement.ok()) {
    core_.OnPlacementFailed(now);
    return;
  }
  absl::StatusOr<PlacementMap> map =
      PlacementMap::Create(*placement, runner_->layout());
  if (!map.ok()) {
    core_.OnError(map.status(), now);
    return;
  }
  placement_ = std::make_shared<const PlacementMap>(*std::move(map));
  core_.OnPlacement(WorkerCore::ViewOf(*placement), now);
}

}  // namespace ballast
