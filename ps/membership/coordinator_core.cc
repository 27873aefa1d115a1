// SPDX-License-Identifier: Apache-2.0
// Events: what members, people and the disk say.
#include "ps/membership/coordinator_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rule.h"
#include "common/status_macros.h"

namespace ballast {

absl::string_view PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kForming:
      return "forming";
    case Phase::kLoading:
      return "loading";
    case Phase::kTraining:
      return "training";
    case Phase::kEvaluating:
      return "evaluating";
    case Phase::kFinishing:
      return "finishing";
    case Phase::kDone:
      return "done";
    case Phase::kFailed:
      return "failed";
  }
  return "unknown";
}

absl::Status CoordinatorCore::Heartbeat(const v1::PollRequest& request,
                                        absl::Time now) {
  BALLAST_ASSIGN_OR_RETURN(
      const bool works,
      members_.Heartbeat(request.incarnation(),
                         request.has_stats() ? &request.stats() : nullptr,
                         now));
  suspects_.erase(request.incarnation());
  if (works && phase_ != Phase::kForming) {
    progress_at_ = now;
  }
  return absl::OkStatus();
}

absl::Status CoordinatorCore::Report(const v1::ReportRequest& request,
                                     absl::Time now) {
  BALLAST_RETURN_IF_ERROR(
      members_
          .Heartbeat(request.incarnation(),
                     request.has_stats() ? &request.stats() : nullptr, now)
          .status());
  suspects_.erase(request.incarnation());
  const Member& member = *members_.Find(request.incarnation());
  if (request.has_fatal() || request.has_leaving()) {
    TakeDeparture(member, request, now);
    Settle(now);
    return absl::OkStatus();
  }
  if (request.timeline() > identity_.timeline) {
    return absl::AbortedError(
        absl::StrCat(member.name(), " reports on timeline ", request.timeline(),
                     "; the run is on ", identity_.timeline, "; join again"));
  }
  // What is said of an abandoned branch comes too late; the member's next
  // directive names the new timeline.
  const bool abandoned = request.timeline() < identity_.timeline &&
                         BALLAST_RULE(kOldTimelineRefused);
  if (over() || (abandoned && !request.has_draining())) {
    return absl::OkStatus();
  }
  const absl::Status taken = TakeReport(member, request);
  if (!taken.ok()) {
    // A member that says what cannot be is broken, and so is the step.
    Fail(absl::Status(
             taken.code(),
             absl::StrCat(member.Describe(), " reported: ", taken.message())),
         now);
  }
  Settle(now);
  return taken;
}

absl::Status CoordinatorCore::TakeReport(const Member& member,
                                         const v1::ReportRequest& request) {
  const bool of_server =
      request.has_loaded() || request.has_vote() || request.has_confirm() ||
      request.has_checkpoint_saved() || request.has_state_digests();
  if (of_server) {
    const auto slot = servers_.Find(member.name());
    if (!member.is_server() || !slot.has_value()) {
      return absl::InvalidArgumentError("only a server can report that");
    }
    return TakeServerReport(member, *slot, request);
  }
  if (request.has_eval_result() &&
      request.eval_result().timeline() == identity_.timeline) {
    evaluation_.AddResult(request.eval_result());
  }
  if (request.has_worker_done() &&
      request.worker_done().timeline() == identity_.timeline) {
    TakeWorkerDone(member, request.worker_done());
  }
  if (request.has_draining()) {
    drained_.try_emplace(member.incarnation, committed());
    checkpoint_wanted_ =
        checkpoint_wanted_ || (member.is_server() && !durable());
  }
  return absl::OkStatus();
}

absl::Status CoordinatorCore::TakeServerReport(
    const Member& member, uint32_t slot, const v1::ReportRequest& request) {
  switch (request.event_case()) {
    case v1::ReportRequest::kLoaded:
      return TakeLoaded(slot, request.loaded());
    case v1::ReportRequest::kVote:
      return TakeVote(slot, request.vote());
    case v1::ReportRequest::kConfirm:
      return TakeConfirm(member, slot, request.confirm());
    case v1::ReportRequest::kCheckpointSaved:
      return checkpoints_.AddPart(request.checkpoint_saved());
    case v1::ReportRequest::kStateDigests:
      return hash_.Add(request.state_digests());
    default:
      return absl::OkStatus();
  }
}

void CoordinatorCore::TakeWorkerDone(const Member& member,
                                     const v1::WorkerDone& done) {
  if (done.step() > committed() + 1) {
    return;
  }
  metrics_.WorkerDone(member.incarnation, done);
  // An answer to an earlier directive says nothing about what a server that
  // came back since then misses.
  const auto issued = issued_.find(member.incarnation);
  if (done.step() == committed() + 1 && issued != issued_.end() &&
      done.number() >= issued->second.reply.number()) {
    done_.insert(member.incarnation);
  }
}

absl::Status CoordinatorCore::TakeLoaded(uint32_t slot,
                                         const v1::ServerLoaded& loaded) {
  ServerSlot& place = servers_.at(slot);
  if (loaded.step() > committed()) {
    return absl::DataLossError(absl::StrCat(
        "version ", loaded.step(), " is loaded, but the step log ends at ",
        committed(), "; the coordinator's state is older than the servers'"));
  }
  if (phase_ == Phase::kForming || loaded.step() < log_.base().step) {
    return absl::InvalidArgumentError(
        absl::StrCat("version ", loaded.step(), " is loaded; want version ",
                     place.load_step, " after all have joined"));
  }
  // A late copy of what this life said long ago may come first.
  if (place.version.value_or(0) > loaded.step() ||
      !log_.Bridges(loaded.step(), committed())) {
    return absl::OkStatus();
  }
  place.version = loaded.step();
  place.loaded = loaded.step();
  if (!durable()) {
    place.base = loaded.step();
  }
  return absl::OkStatus();
}

absl::Status CoordinatorCore::TakeVote(uint32_t slot, const v1::Vote& vote) {
  if (vote.step() > committed() + 1) {
    return absl::DataLossError(absl::StrCat("a vote for step ", vote.step(),
                                            ", but the step log ends at ",
                                            committed()));
  }
  if (!step_.has_value() || vote.step() != step_->step() ||
      !servers_.Owns(slot)) {
    return absl::OkStatus();  // Late: that step is committed.
  }
  TakeInSync(slot, vote);
  return step_->AddVote(slot, vote);
}

absl::Status CoordinatorCore::TakeConfirm(const Member& member, uint32_t slot,
                                          const v1::Confirm& confirm) {
  if (confirm.step() > committed()) {
    return absl::DataLossError(
        absl::StrCat("version ", confirm.step(),
                     " is made, but the step log ends at ", committed()));
  }
  metrics_.Confirmed(member.incarnation, confirm, member.stats.minor_faults());
  ServerSlot& place = servers_.at(slot);
  if (!place.version.has_value() || *place.version >= confirm.step()) {
    return absl::OkStatus();  // It is to say first what it has loaded.
  }
  place.version = confirm.step();
  place.base = durable() ? confirm.base_step() : confirm.step();
  for (const StepKey& key : checkpoints_.OwedBy(slot)) {
    // It was asked for this one since it loaded a later version, and has gone
    // on since: it cannot save it.
    if (place.came_back && key.step < place.loaded) {
      checkpoints_.Abandon(key);
      checkpoint_wanted_ = checkpoints_.Expected().empty();
    }
  }
  Prune();
  return absl::OkStatus();
}

void CoordinatorCore::Tick(absl::Time now) {
  // A coordinator that was held up must not blame members for that.
  if (now - ticked_at_ >= members_.lease() / 2) {
    members_.RenewAll(now);
    watch_.Restart(now);
    for (auto& [life, since] : suspects_) {
      since = now;
    }
  }
  ticked_at_ = now;
  TakeExpired(now);
  TakeStuck(now);
  TakeOver(now);
  Settle(now);
  JudgeWaits(now);
}

void CoordinatorCore::Stop(const v1::StopRequest& request, absl::Time now) {
  if (request.abort() && !over()) {
    Fail(absl::CancelledError(
             absl::StrCat("stopped on request without a checkpoint after step ",
                          committed(), ": ", request.reason())),
         now);
  }
  if (!stop_requested_) {
    stop_requested_ = true;
    stop_step_ = committed();
    const bool in_flight = phase_ == Phase::kTraining;
    // Only a decision can ask for a checkpoint, so an evaluated version without
    // one is left by one more step.
    const bool bare = phase_ == Phase::kEvaluating &&
                      committed() != log_.base().step && !last_.checkpoint();
    if (in_flight || bare) {
      stop_step_ = std::min(committed() + 1, options_.job.run.steps);
    }
    if (phase_ == Phase::kForming || phase_ == Phase::kLoading) {
      phase_ = Phase::kDone;  // Nothing was made that is not on disk.
    }
  }
  if (phase_ == Phase::kDone && !exiting_) {
    exiting_ = true;
    exit_since_ = now;
  }
  Settle(now);
}

void CoordinatorCore::ManifestWritten(const StepKey& key,
                                      const absl::StatusOr<std::string>& path,
                                      absl::Time now) {
  if (!path.ok()) {
    Fail(absl::Status(
             path.status().code(),
             absl::StrCat("the manifest of step ", key.step,
                          " cannot be written: ", path.status().message())),
         now);
    return;
  }
  if (!checkpoints_.IsExpected(key)) {
    // Given up while its manifest was written: nobody will hear of it.
    actions_.manifests_to_remove.push_back(*path);
    return;
  }
  actions_.changes.push_back(PutCheckpoint(key, *path));
  const std::map<StepKey, std::string> before = checkpoints_.standing();
  for (const StepKey& dropped : checkpoints_.Logged(key, *path)) {
    actions_.changes.push_back(DeleteCheckpoint(dropped));
    const std::string& old_path = before.at(dropped);
    if (old_path != *path) {
      actions_.manifests_to_remove.push_back(old_path);
    }
  }
  Prune();
  progress_at_ = now;
  Settle(now);
}

void CoordinatorCore::Fail(const absl::Status& status, absl::Time now) {
  if (over()) {
    return;
  }
  phase_ = Phase::kFailed;
  failure_ = status;
  exiting_ = true;
  servers_exit_ = true;
  exit_since_ = now;
  Reissue();
}

void CoordinatorCore::Settle(absl::Time now) {
  Advance(now);
  if (NoteDebts(now)) {
    progress_at_ = now;
  }
  Reissue();
}

CoreActions CoordinatorCore::TakeActions() {
  lines_out_ = metrics_.next_step();
  return std::exchange(actions_, CoreActions());
}

}  // namespace ballast
