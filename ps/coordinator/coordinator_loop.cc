// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/coordinator_loop.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/job_file.h"
#include "common/log.h"
#include "common/memory_setup.h"
#include "common/status_macros.h"
#include "storage/checkpoint.h"

namespace ballast {
namespace {

// Leases and timeouts are judged this often.
constexpr absl::Duration kTick = absl::Milliseconds(100);
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

}  // namespace

CoordinatorLoop::CoordinatorLoop(const Job& job,
                                 std::unique_ptr<CoordinatorCore> core,
                                 StateStore* store, RunFolder* folder,
                                 Clock clock)
    : job_(job),
      store_(store),
      folder_(folder),
      clock_(std::move(clock)),
      core_(std::move(core)),
      summary_(job) {}

CoordinatorLoop::~CoordinatorLoop() {
  {
    MutexLock lock(&mutex_);
    abandoned_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) {
    thread_.join();
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
        answers_.push_back([answer, reply = work(now)] { answer(reply); });
      });
  if (!posted) {
    answer(absl::UnavailableError(
        "the run has ended or too many calls are queued; try again"));
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
      answers_.push_back([answer, alive] { answer(alive); });
      return;
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
  while (!core_->ended() && !Abandoned()) {
    // All queued heartbeats count before a lease is judged: a loop that was
    // held up by its disk must not blame members for that.
    for (const Event& event : TakeEvents(tick_at)) {
      event(clock_());
    }
    const absl::Time now = clock_();
    if (now >= tick_at) {
      core_->Tick(now);
      tick_at = now + kTick;
    }
    CarryOut(now);
    LogProgress();
    const bool write_summary =
        core_->over() && (!summary_written || core_->ended());
    if (write_summary) {
      summary_written = true;
      const absl::Status written =
          folder_->WriteSummary(summary_.Json(*core_, now));
      if (!written.ok()) {
        LogEvent(Severity::kError, "summary_not_written",
                 {{"reason", std::string(written.message())}});
      }
    }
    for (const std::function<void()>& answer : std::exchange(answers_, {})) {
      answer();
    }
    AnswerPolls(now, /*closing=*/false);
  }
  Close();
}

void CoordinatorLoop::CarryOut(absl::Time now) {
  for (int round = 0; round < kRoundsMax; ++round) {
    const CoreActions actions = core_->TakeActions();
    if (actions.empty() || broken_) {
      return;
    }
    const absl::Status done = CarryOutOnce(actions, now);
    if (!done.ok()) {
      // What could not be made durable is told to nobody: the run ends.
      broken_ = true;
      core_->Fail(absl::Status(done.code(),
                               absl::StrCat("the coordinator cannot write: ",
                                            done.message())),
                  now);
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
  if (!actions.changes.empty()) {
    BALLAST_RETURN_IF_ERROR(store_->Apply(actions.changes));
  }
  for (const std::string& path : actions.manifests_to_remove) {
    BALLAST_RETURN_IF_ERROR(folder_->RemoveManifest(path));
  }
  BALLAST_RETURN_IF_ERROR(folder_->AppendMetrics(actions.metrics));
  for (const StepMetrics& line : actions.metrics) {
    summary_.Add(line, MinorFaults());
  }
  BALLAST_RETURN_IF_ERROR(folder_->AppendEvaluations(actions.evaluations));
  for (const CheckpointManifest& manifest : actions.manifests_to_write) {
    const StepKey key = {manifest.timeline, manifest.step};
    const absl::Status written =
        WriteManifest(folder_->checkpoints_dir(), manifest);
    if (written.ok()) {
      core_->ManifestWritten(key, folder_->ManifestPath(manifest.step), now);
    } else {
      core_->ManifestWritten(key, written, now);
    }
  }
  return absl::OkStatus();
}

void CoordinatorLoop::AnswerPolls(absl::Time now, bool closing) {
  for (auto poll = polls_.begin(); poll != polls_.end();) {
    absl::StatusOr<v1::PollReply> reply =
        core_->Directive(poll->incarnation, poll->seen_number);
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
    outcome_ = core_->failure();
    late = std::exchange(events_, {});
    changed_.NotifyAll();
  }
  const absl::Time now = clock_();
  for (const Event& event : late) {
    event(now);
  }
  for (const std::function<void()>& answer : std::exchange(answers_, {})) {
    answer();
  }
  AnswerPolls(now, /*closing=*/true);
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
