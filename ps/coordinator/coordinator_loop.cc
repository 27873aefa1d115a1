// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/coordinator_loop.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/crash_point.h"
#include "common/job_file.h"
#include "common/log.h"
#include "common/memory_setup.h"
#include "common/status_macros.h"
#include "storage/checkpoint.h"

namespace ballast {
namespace {

// Leases and timeouts are judged this often, and while a member is suspected,
// so that its death costs little more than it must.
constexpr absl::Duration kTick = absl::Milliseconds(100);
constexpr absl::Duration kSuspectTick = absl::Milliseconds(20);
// Between two attempts at a store or a disk that is not to be had.
constexpr absl::Duration kRetry = absl::Milliseconds(100);
// Between two questions of a leader that is not sure of its lease.
constexpr absl::Duration kCheck = absl::Seconds(1);
// Members have one poll and a few reports in flight each; beyond this many
// queued calls something is wrong, and callers are told to try again.
constexpr size_t kEventsMax = 4096;
// Events handle events: a manifest written logs a checkpoint. Two rounds do.
constexpr int kRoundsMax = 16;

// What may differ between members and does: "server.memory=1073741824".
std::string OwnSettings(const Job& job, const v1::JoinRequest& request) {
  std::map<std::string, std::string> ours;
  for (const auto& [key, value] : OperationsFields(job)) {
    ours[key] = value;
  }
  std::vector<std::string> own;
  for (const v1::ConfigField& field : request.operations()) {
    const auto known = ours.find(field.key());
    if (known == ours.end() || known->second != field.value()) {
      own.push_back(absl::StrCat(field.key(), "=", field.value()));
    }
  }
  return absl::StrJoin(own, ", ");
}

bool Puts(const CoreActions& actions, absl::string_view prefix) {
  return std::any_of(actions.changes.begin(), actions.changes.end(),
                     [prefix](const StateChange& change) {
                       return change.value.has_value() &&
                              absl::StartsWith(change.key, prefix);
                     });
}

void LogFaults(const CoreActions& actions) {
  for (const StateChange& change : actions.changes) {
    v1::Fault fault;
    if (!change.value.has_value() || !absl::StartsWith(change.key, "fault/") ||
        !fault.ParseFromString(*change.value)) {
      continue;
    }
    const bool open = fault.recovered_seconds() < 0.0;
    LogEvent(open ? Severity::kWarn : Severity::kInfo,
             open ? "fault" : "fault_overcome",
             {{"member", fault.member()},
              {"kind", fault.kind()},
              {"step", fault.step()},
              {"seconds", fault.recovered_seconds()},
              {"detail", fault.detail()}});
  }
}

absl::Status Refusal() {
  return absl::UnavailableError(
      "the run has ended or too many calls are queued; try again");
}

}  // namespace

CoordinatorLoop::CoordinatorLoop(const Job& job,
                                 std::unique_ptr<CoordinatorCore> core,
                                 Leadership* leadership, RunFolder* folder,
                                 Clock clock)
    : job_(job),
      leadership_(leadership),
      folder_(folder),
      clock_(std::move(clock)),
      core_(std::move(core)),
      summary_(job) {
  prober_ = std::make_unique<Prober>([this](uint64_t incarnation, bool alive) {
    Post([this, incarnation, alive](absl::Time now) {
      core_->ProbeResult(incarnation, alive, now);
    });
  });
}

CoordinatorLoop::~CoordinatorLoop() {
  {
    MutexLock lock(&mutex_);
    abandoned_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  prober_.reset();  // Before what its answers touch.
}

void CoordinatorLoop::Restore(const std::vector<StepMetrics>& earlier) {
  for (const StepMetrics& line : earlier) {
    summary_.AddEarlier(line);
  }
}

void CoordinatorLoop::Start() {
  thread_ = std::thread([this] { Run(); });
}

template <typename Reply>
void CoordinatorLoop::Submit(
    std::function<absl::StatusOr<Reply>(absl::Time)> work,
    Answer<Reply> answer) {
  const bool posted =
      Post([this, work = std::move(work), answer](absl::Time now) {
        answers_.push_back(
            [answer, reply = work(now)](const absl::Status& instead) {
              answer(instead.ok() ? reply : instead);
            });
      });
  if (!posted) {
    answer(Refusal());
  }
}

void CoordinatorLoop::Join(const v1::JoinRequest& request,
                           Answer<v1::JoinReply> answer) {
  Submit<v1::JoinReply>(
      [this, request](absl::Time now) -> absl::StatusOr<v1::JoinReply> {
        const uint64_t generation = core_->members().generation();
        absl::StatusOr<v1::JoinReply> reply = core_->Join(request, now);
        if (!reply.ok()) {
          LogEvent(Severity::kWarn, "join_refused",
                   {{"member", request.name()},
                    {"reason", std::string(reply.status().message())}});
        } else if (core_->members().generation() != generation) {
          LogEvent(Severity::kInfo, "member_joined",
                   {{"member", request.name()},
                    {"incarnation", reply->incarnation()},
                    {"pid", request.pid()},
                    {"own_settings", OwnSettings(job_, request)}});
        }
        return reply;
      },
      std::move(answer));
}

void CoordinatorLoop::Poll(const v1::PollRequest& request,
                           Answer<v1::PollReply> answer) {
  const bool posted = Post([this, request, answer](absl::Time now) {
    const absl::Status alive = core_->Heartbeat(request, now);
    if (!alive.ok()) {
      answers_.push_back([answer, alive](const absl::Status& instead) {
        answer(instead.ok() ? alive : instead);
      });
      return;
    }
    // A member that polls anew has given the last one up.
    for (PendingPoll& earlier : polls_) {
      if (earlier.incarnation == request.incarnation()) {
        earlier.deadline = now;
      }
    }
    // A held poll must not outlast the lease it renewed.
    const absl::Duration wait =
        std::clamp(absl::Milliseconds(request.wait_ms()), absl::ZeroDuration(),
                   job_.cluster.lease / 3);
    polls_.push_back(
        {request.incarnation(), request.seen_number(), now + wait, answer});
  });
  if (!posted) {
    answer(absl::UnavailableError(
        "the run has ended or too many calls are queued; try again"));
  }
}

void CoordinatorLoop::Report(const v1::ReportRequest& request,
                             Answer<v1::ReportReply> answer) {
  Submit<v1::ReportReply>(
      [this, request](absl::Time now) -> absl::StatusOr<v1::ReportReply> {
        BALLAST_RETURN_IF_ERROR(core_->Report(request, now));
        return v1::ReportReply();
      },
      std::move(answer));
}

void CoordinatorLoop::GetPlacement(Answer<v1::Placement> answer) {
  Submit<v1::Placement>([this](absl::Time) { return core_->GetPlacement(); },
                        std::move(answer));
}

void CoordinatorLoop::GetStatus(Answer<v1::StatusReply> answer) {
  Submit<v1::StatusReply>(
      [this](absl::Time now) -> absl::StatusOr<v1::StatusReply> {
        v1::StatusReply reply = core_->GetStatus(now);
        reply.set_run_dir(folder_->dir());
        reply.set_leader(leadership_->record().address);
        return reply;
      },
      std::move(answer));
}

void CoordinatorLoop::Stop(const v1::StopRequest& request,
                           Answer<v1::StopReply> answer) {
  Submit<v1::StopReply>(
      [this, request](absl::Time now) -> absl::StatusOr<v1::StopReply> {
        LogEvent(Severity::kInfo, "stop_requested",
                 {{"reason", request.reason()}, {"abort", request.abort()}});
        core_->Stop(request, now);
        return v1::StopReply();
      },
      std::move(answer));
}

void CoordinatorLoop::ReportExit(const v1::ExitReport& report,
                                 Answer<v1::ExitReply> answer) {
  Submit<v1::ExitReply>(
      [this, report](absl::Time now) -> absl::StatusOr<v1::ExitReply> {
        core_->ExitReported(report, now);
        return v1::ExitReply();
      },
      std::move(answer));
}

void CoordinatorLoop::Scale(const v1::ScaleRequest& request,
                            Answer<v1::ScaleReply> answer) {
  Submit<v1::ScaleReply>(
      [this, request](absl::Time now) { return core_->Scale(request, now); },
      std::move(answer));
}

void CoordinatorLoop::ConnectionLost(uint64_t incarnation) {
  // When the queue is full the lease tells, later.
  Post([this, incarnation](absl::Time now) {
    core_->ConnectionLost(incarnation, now);
    suspect_until_ = now + CoordinatorCore::kReturnMax + kTick;
  });
}

bool CoordinatorLoop::Post(Event event) {
  MutexLock lock(&mutex_);
  if (closed_ || events_.size() >= kEventsMax) {
    return false;
  }
  events_.push_back(std::move(event));
  changed_.NotifyAll();
  return true;
}

std::vector<CoordinatorLoop::Event> CoordinatorLoop::TakeEvents(
    absl::Time tick_at) {
  MutexLock lock(&mutex_);
  while (events_.empty() && !abandoned_) {
    const absl::Duration left = tick_at - clock_();
    if (left <= absl::ZeroDuration()) {
      break;
    }
    changed_.WaitFor(&mutex_, left);
  }
  return std::exchange(events_, {});
}

bool CoordinatorLoop::Abandoned() {
  MutexLock lock(&mutex_);
  return abandoned_;
}

void CoordinatorLoop::Run() {
  absl::Time tick_at = clock_();
  bool summary_written = false;
  CarryOut(tick_at);  // The term must be durable before anyone is admitted.
  while (!core_->ended() && lost_.ok() && !Abandoned()) {
    // All queued heartbeats count before a lease is judged: a loop that was
    // held up by its disk must not blame members for that.
    for (const Event& event : TakeEvents(tick_at)) {
      event(clock_());
    }
    const absl::Time now = clock_();
    if (now >= tick_at) {
      core_->Tick(now);
      CheckLeadership(now);
      tick_at = now + kTick;
    }
    if (now < suspect_until_) {
      tick_at = std::min(tick_at, now + kSuspectTick);
    }
    CarryOut(now);
    LogProgress();
    if (core_->over() && lost_.ok() && (!summary_written || core_->ended())) {
      summary_written = true;
      WriteSummary(now);
    }
    AnswerAll(now, /*closing=*/false);
  }
  Close();
}

absl::Status CoordinatorLoop::Patiently(
    const std::function<absl::Status()>& work) {
  const absl::Time since = clock_();
  absl::Status status = work();
  bool complained = false;
  while (absl::IsUnavailable(status) || absl::IsResourceExhausted(status)) {
    const absl::Duration waited = clock_() - since;
    if (Abandoned()) {
      return status;
    }
    if (waited >= job_.cluster.give_up_after) {
      return absl::Status(
          status.code(),
          absl::StrCat("waited ", absl::FormatDuration(waited),
                       " (cluster.give_up_after): ", status.message()));
    }
    if (!complained) {
      complained = true;
      LogEvent(Severity::kWarn, "coordinator_waits",
               {{"for", std::string(status.message())},
                {"at_most", absl::FormatDuration(job_.cluster.give_up_after)}});
    }
    {
      MutexLock lock(&mutex_);
      if (!abandoned_) {
        // Every new call wakes it, so the pace is kept by the clock.
        const absl::Time until = clock_() + kRetry;
        while (!abandoned_ && clock_() < until) {
          changed_.WaitFor(&mutex_, until - clock_());
        }
      }
    }
    status = work();
  }
  if (complained) {
    LogEvent(Severity::kInfo, "coordinator_goes_on",
             {{"waited_s", absl::ToDoubleSeconds(clock_() - since)}});
  }
  return status;
}

void CoordinatorLoop::CheckLeadership(absl::Time now) {
  if (leadership_->sure() || now < check_at_ || !lost_.ok()) {
    return;
  }
  check_at_ = now + kCheck;
  const absl::Status leads = leadership_->Apply({});
  if (absl::IsAborted(leads)) {
    lost_ = leads;
  }
}

void CoordinatorLoop::CarryOut(absl::Time now) {
  for (int round = 0; round < kRoundsMax; ++round) {
    const CoreActions actions = core_->TakeActions();
    if (actions.empty() || !broken_.ok() || !lost_.ok()) {
      return;
    }
    const absl::Status done = CarryOutOnce(actions, now);
    if (absl::IsAborted(done) || absl::IsUnavailable(done)) {
      // Another leads or may come to lead: whatever is said now could be wrong.
      lost_ = done;
      return;
    }
    if (!done.ok()) {
      // What could not be made durable is told to nobody: the run ends.
      broken_ = absl::Status(
          done.code(),
          absl::StrCat("the coordinator cannot write: ", done.message()));
      refusal_ = absl::UnavailableError("the coordinator cannot write");
      core_->Fail(broken_, now);
    }
  }
}

absl::Status CoordinatorLoop::CarryOutOnce(const CoreActions& actions,
                                           absl::Time now) {
  const bool drops =
      std::any_of(actions.changes.begin(), actions.changes.end(),
                  [](const StateChange& change) { return !change.value; });
  if (drops) {
    BALLAST_RETURN_IF_ERROR(folder_->Sync());
  }
  if (Puts(actions, "end/")) {
    // Who finds the record of the end finds the summary too.
    WriteSummary(now);
  }
  const bool decides = Puts(actions, "step/");
  if (decides) {
    BALLAST_CRASH_POINT("coordinator.decision.before_log");
  }
  // Files are the leader's too, so it asks even when there is nothing to log.
  BALLAST_RETURN_IF_ERROR(
      Patiently([&] { return leadership_->Apply(actions.changes); }));
  if (decides) {
    BALLAST_CRASH_POINT("coordinator.decision.logged");
  }
  if (Puts(actions, "member/")) {
    BALLAST_CRASH_POINT("coordinator.join.logged");
  }
  if (Puts(actions, "placement")) {
    BALLAST_CRASH_POINT("coordinator.placement.logged");
  }
  LogFaults(actions);
  for (const Probe& probe : actions.probes) {
    prober_->Start(probe);
  }
  return WriteFiles(actions, now);
}

absl::Status CoordinatorLoop::WriteFiles(const CoreActions& actions,
                                         absl::Time now) {
  if (actions.rollback_to.has_value()) {
    LogEvent(Severity::kWarn, "rolled_back", {{"step", *actions.rollback_to}});
    BALLAST_RETURN_IF_ERROR(
        Patiently([&] { return folder_->RollBack(*actions.rollback_to); }));
  }
  for (const std::string& path : actions.manifests_to_remove) {
    BALLAST_RETURN_IF_ERROR(folder_->RemoveManifest(path));
  }
  BALLAST_RETURN_IF_ERROR(
      Patiently([&] { return folder_->AppendMetrics(actions.metrics); }));
  for (const StepMetrics& line : actions.metrics) {
    summary_.Add(line, MinorFaults());
  }
  BALLAST_RETURN_IF_ERROR(Patiently(
      [&] { return folder_->AppendEvaluations(actions.evaluations); }));
  for (const CheckpointManifest& manifest : actions.manifests_to_write) {
    const StepKey key = {manifest.timeline, manifest.step};
    const absl::Status written = Patiently(
        [&] { return WriteManifest(folder_->checkpoints_dir(), manifest); });
    BALLAST_CRASH_POINT("coordinator.manifest.written");
    if (written.ok()) {
      core_->ManifestWritten(key, folder_->ManifestPath(manifest.step), now);
    } else {
      core_->ManifestWritten(key, written, now);
    }
  }
  return absl::OkStatus();
}

void CoordinatorLoop::WriteSummary(absl::Time now) {
  const absl::Status written =
      folder_->WriteSummary(summary_.Json(*core_, now));
  if (!written.ok()) {
    LogEvent(Severity::kError, "summary_not_written",
             {{"reason", std::string(written.message())}});
  }
}

void CoordinatorLoop::AnswerAll(absl::Time now, bool closing) {
  const absl::Status instead =
      lost_.ok()
          ? std::exchange(refusal_, absl::OkStatus())
          : absl::UnavailableError("this coordinator leads no more; try again");
  for (const auto& answer : std::exchange(answers_, {})) {
    answer(instead);
  }
  for (auto poll = polls_.begin(); poll != polls_.end();) {
    absl::StatusOr<v1::PollReply> reply =
        lost_.ok() ? core_->Directive(poll->incarnation, poll->seen_number)
                   : instead;
    const bool news = !reply.ok() || reply->number() > poll->seen_number;
    if (news || closing || now >= poll->deadline) {
      poll->answer(std::move(reply));
      poll = polls_.erase(poll);
    } else {
      ++poll;
    }
  }
}

void CoordinatorLoop::LogProgress() {
  if (core_->phase() == logged_phase_) {
    return;
  }
  const bool steps = core_->phase() == Phase::kTraining ||
                     core_->phase() == Phase::kEvaluating;
  const bool was_steps =
      logged_phase_ == Phase::kTraining || logged_phase_ == Phase::kEvaluating;
  logged_phase_ = core_->phase();
  if (steps && was_steps) {
    return;  // Evaluations come and go.
  }
  LogEvent(
      core_->phase() == Phase::kFailed ? Severity::kError : Severity::kInfo,
      "run_phase",
      {{"phase", PhaseName(core_->phase())},
       {"step", core_->committed()},
       {"timeline", core_->identity().timeline},
       {"failure", std::string(core_->failure().message())}});
}

void CoordinatorLoop::Close() {
  std::vector<Event> late;
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    // A run whose end could not be written has not ended well.
    outcome_ = core_->failure();
    outcome_.Update(broken_);
    outcome_ = lost_.ok() ? outcome_ : lost_;
    late = std::exchange(events_, {});
    changed_.NotifyAll();
  }
  const absl::Time now = clock_();
  for (const Event& event : late) {
    event(now);
  }
  AnswerAll(now, /*closing=*/true);
}

bool CoordinatorLoop::WaitEnded(absl::Duration timeout) {
  const absl::Time deadline = clock_() + timeout;
  MutexLock lock(&mutex_);
  while (!closed_) {
    const absl::Duration left = deadline - clock_();
    if (left <= absl::ZeroDuration()) {
      return false;
    }
    changed_.WaitFor(&mutex_, left);
  }
  return true;
}

absl::Status CoordinatorLoop::outcome() {
  MutexLock lock(&mutex_);
  BALLAST_CHECK(closed_);
  return outcome_;
}

}  // namespace ballast
