// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/coordinator_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

MemberTable::Limits LimitsOf(const CoreOptions& options,
                             const std::optional<CheckpointManifest>& from) {
  MemberTable::Limits limits;
  limits.servers = options.job.server.count;
  limits.workers = options.job.worker.count;
  limits.lease = options.job.cluster.lease;
  limits.numerics = options.numerics;
  if (from.has_value()) {
    limits.layout = from->layout;
  }
  return limits;
}

uint64_t TokensPerMicroBatch(const Job& job) {
  return uint64_t{job.batch.micro_batch_size} * job.model.context;
}

// The run that this process continues or begins, with timeline and term raised.
absl::StatusOr<RunIdentity> NextIdentity(const CoreOptions& options,
                                         const RunState& state) {
  RunIdentity next;
  next.run_id = options.new_run_id;
  next.name = options.job.run.name;
  next.numerics = options.numerics;
  next.timeline = 1;
  next.term = 1;
  if (!state.identity.has_value()) {
    if (options.resume) {
      return absl::FailedPreconditionError(
          absl::StrCat("there is nothing to resume in ", options.job.run.dir,
                       "; start the run without --resume"));
    }
    return next;
  }
  const RunIdentity& before = *state.identity;
  next.run_id = before.run_id;
  next.timeline = before.timeline + 1;
  next.term = before.term + 1;
  if (state.decisions.empty() && state.checkpoints.empty()) {
    return next;  // Nothing happened yet, so nothing can differ.
  }
  if (!options.resume) {
    const std::vector<v1::Decision> history = state.History();
    return absl::FailedPreconditionError(absl::StrCat(
        options.job.run.dir, " holds the run '", before.name, "' at step ",
        history.empty() ? 0 : history.back().step(),
        "; pass --resume to continue it, or choose another run.dir"));
  }
  if (before.name != next.name) {
    return absl::FailedPreconditionError(
        absl::StrCat(options.job.run.dir, " holds the run '", before.name,
                     "'; run.name is '", next.name, "'"));
  }
  const absl::Status same = CheckFields(before.numerics, options.numerics,
                                        "the run to resume", false);
  if (!same.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the job differs from the run: ", same.message()));
  }
  return next;
}

absl::StatusOr<v1::Decision> DecisionOf(const CheckpointManifest& manifest,
                                        const RunIdentity& identity) {
  v1::Decision decision;
  if (!decision.ParseFromString(manifest.decision) ||
      decision.step() != manifest.step ||
      HashHex(manifest.run) != identity.run_id) {
    return absl::DataLossError(absl::StrCat(
        "the manifest of step ", manifest.step, " belongs to run ",
        HashHex(manifest.run), " or is damaged; want run ", identity.run_id));
  }
  return decision;
}

}  // namespace

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

absl::StatusOr<std::unique_ptr<CoordinatorCore>> CoordinatorCore::Create(
    CoreOptions options, const RunState& state,
    std::optional<CheckpointManifest> checkpoint, absl::Time now) {
  BALLAST_ASSIGN_OR_RETURN(RunIdentity identity, NextIdentity(options, state));
  Branch branch;
  v1::Decision last;
  if (checkpoint.has_value()) {
    BALLAST_ASSIGN_OR_RETURN(last, DecisionOf(*checkpoint, identity));
    branch.parent = {checkpoint->timeline, checkpoint->step};
  }
  // The constructor is private, so make_unique cannot reach it.
  std::unique_ptr<CoordinatorCore> core(
      new CoordinatorCore(std::move(options), std::move(identity), state,
                          std::move(checkpoint), now));
  core->last_ = std::move(last);
  core->base_step_ = core->last_.step();
  core->actions_.changes.push_back(PutIdentity(core->identity_));
  core->actions_.changes.push_back(PutBranch(core->identity_.timeline, branch));
  return core;
}

CoordinatorCore::CoordinatorCore(CoreOptions options, RunIdentity identity,
                                 const RunState& state,
                                 std::optional<CheckpointManifest> checkpoint,
                                 absl::Time now)
    : options_(std::move(options)),
      identity_(std::move(identity)),
      members_(LimitsOf(options_, checkpoint), identity_.term << 32),
      checkpoints_(options_.job.checkpoint.keep, state.checkpoints),
      evaluation_(options_.job.eval.micro_batches,
                  TokensPerMicroBatch(options_.job)),
      checkpoint_(std::move(checkpoint)),
      progress_at_(now),
      step_since_(now),
      exit_since_(now),
      last_number_(identity_.term << 32) {
  for (const auto& [key, decision] : state.decisions) {
    log_.insert(key);
  }
}

absl::StatusOr<v1::JoinReply> CoordinatorCore::Join(
    const v1::JoinRequest& request, absl::Time now) {
  const uint64_t generation = members_.generation();
  BALLAST_ASSIGN_OR_RETURN(
      const Member* member,
      members_.Admit(request, phase_ == Phase::kForming, now));
  v1::JoinReply reply;
  reply.set_incarnation(member->incarnation);
  reply.set_timeline(identity_.timeline);
  reply.set_lease_ms(absl::ToInt64Milliseconds(members_.lease()));
  reply.set_life_id(member->join.life_id());
  reply.set_run_id(identity_.run_id);
  if (members_.generation() != generation) {
    progress_at_ = now;
    Settle(now);
  }
  return reply;
}

absl::Status CoordinatorCore::Heartbeat(const v1::PollRequest& request,
                                        absl::Time now) {
  BALLAST_ASSIGN_OR_RETURN(
      const bool works,
      members_.Heartbeat(request.incarnation(),
                         request.has_stats() ? &request.stats() : nullptr,
                         now));
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
  const Member& member = *members_.Find(request.incarnation());
  if (request.has_fatal() || request.has_leaving()) {
    TakeDeparture(member, request, now);
    Settle(now);
    return absl::OkStatus();
  }
  if (request.timeline() != identity_.timeline) {
    return absl::AbortedError(
        absl::StrCat(member.name(), " reports on timeline ", request.timeline(),
                     "; the run is on ", identity_.timeline, "; join again"));
  }
  if (over()) {
    return absl::OkStatus();
  }
  const std::string owed = AllOwed();
  const absl::Status taken = TakeReport(member, request);
  if (!taken.ok()) {
    // A member that says what cannot be is broken, and so is the step.
    Fail(absl::Status(
             taken.code(),
             absl::StrCat(member.Describe(), " reported: ", taken.message())),
         now);
  } else if (AllOwed() != owed) {
    progress_at_ = now;
  }
  Settle(now);
  return taken;
}

absl::Status CoordinatorCore::TakeReport(const Member& member,
                                         const v1::ReportRequest& request) {
  if (request.has_loaded() || request.has_vote() || request.has_confirm() ||
      request.has_checkpoint_saved() || request.has_state_digests()) {
    if (!member.is_server()) {
      return absl::InvalidArgumentError("only a server can report that");
    }
  }
  switch (request.event_case()) {
    case v1::ReportRequest::kLoaded:
      return TakeLoaded(member, request.loaded());
    case v1::ReportRequest::kVote:
      return TakeVote(member, request.vote());
    case v1::ReportRequest::kConfirm:
      return TakeConfirm(member, request.confirm());
    case v1::ReportRequest::kCheckpointSaved:
      checkpoints_.AddPart(member.incarnation, request.checkpoint_saved());
      return absl::OkStatus();
    case v1::ReportRequest::kStateDigests:
      return hash_.Add(request.state_digests());
    case v1::ReportRequest::kEvalResult:
      if (request.eval_result().timeline() == identity_.timeline) {
        evaluation_.AddResult(request.eval_result());
      }
      return absl::OkStatus();
    case v1::ReportRequest::kWorkerDone:
      if (request.worker_done().timeline() == identity_.timeline &&
          request.worker_done().step() <= committed() + 1) {
        metrics_.WorkerDone(member.incarnation, request.worker_done());
      }
      return absl::OkStatus();
    default:
      return absl::OkStatus();  // Stats alone.
  }
}

absl::Status CoordinatorCore::TakeLoaded(const Member& member,
                                         const v1::ServerLoaded& loaded) {
  if (phase_ == Phase::kForming || loaded.step() != base_step_) {
    return absl::InvalidArgumentError(
        absl::StrCat("version ", loaded.step(), " is loaded; want version ",
                     base_step_, " after all have joined"));
  }
  confirmed_.try_emplace(member.incarnation, loaded.step());
  return absl::OkStatus();
}

absl::Status CoordinatorCore::TakeVote(const Member& member,
                                       const v1::Vote& vote) {
  if (vote.step() > committed() + 1) {
    return absl::DataLossError(absl::StrCat("a vote for step ", vote.step(),
                                            ", but the step log ends at ",
                                            committed()));
  }
  if (!step_.has_value() || vote.step() != step_->step()) {
    return absl::OkStatus();  // Late: that step is committed.
  }
  return step_->AddVote(member.incarnation, vote);
}

absl::Status CoordinatorCore::TakeConfirm(const Member& member,
                                          const v1::Confirm& confirm) {
  if (confirm.step() > committed()) {
    return absl::DataLossError(
        absl::StrCat("version ", confirm.step(),
                     " is made, but the step log ends at ", committed()));
  }
  uint64_t& version = confirmed_[member.incarnation];
  version = std::max(version, confirm.step());
  metrics_.Confirmed(member.incarnation, confirm, member.stats.minor_faults());
  uint64_t everywhere = committed();
  for (const uint64_t server : servers_) {
    const auto place = confirmed_.find(server);
    everywhere =
        std::min(everywhere, place == confirmed_.end() ? 0 : place->second);
  }
  std::erase_if(unconfirmed_, [everywhere](const auto& entry) {
    return entry.first.step <= everywhere;
  });
  return absl::OkStatus();
}

void CoordinatorCore::TakeDeparture(const Member& member,
                                    const v1::ReportRequest& request,
                                    absl::Time now) {
  const std::string owes = Owes(member);
  members_.Leave(member.incarnation);
  if (over() || (phase_ == Phase::kForming && request.has_leaving())) {
    return;
  }
  if (request.has_leaving()) {
    Fail(absl::UnavailableError(absl::StrCat(
             member.Describe(), " left after step ", committed(),
             owes.empty() ? "" : absl::StrCat("; it owed ", owes))),
         now);
    return;
  }
  auto code = static_cast<absl::StatusCode>(request.fatal().code());
  if (code == absl::StatusCode::kOk) {
    code = absl::StatusCode::kInternal;
  }
  Fail(absl::Status(code,
                    absl::StrCat(member.Describe(), " cannot go on after step ",
                                 committed(), ": ", request.fatal().message())),
       now);
}

void CoordinatorCore::TakeExpired(absl::Time now) {
  for (const uint64_t incarnation : members_.TakeExpired(now)) {
    const Member& member = *members_.Find(incarnation);
    const std::string silent =
        absl::StrCat(member.Describe(), " has been silent for ",
                     absl::FormatDuration(members_.lease()));
    if (phase_ == Phase::kFailed) {
      // Perhaps the cause: others notice a death before its lease runs out.
      failure_ = absl::Status(failure_.code(),
                              absl::StrCat(failure_.message(), "; ", silent));
    } else if (phase_ != Phase::kDone) {
      const std::string owes = Owes(member);
      Fail(absl::UnavailableError(absl::StrCat(
               silent, " and is taken for dead after step ", committed(),
               owes.empty() ? "" : absl::StrCat("; it owed ", owes))),
           now);
    }
  }
}

void CoordinatorCore::Tick(absl::Time now) {
  TakeExpired(now);
  const absl::Duration patience = options_.job.cluster.progress_timeout;
  if (!over() && now - progress_at_ >= patience) {
    Fail(absl::DeadlineExceededError(
             absl::StrCat("no progress for ", absl::FormatDuration(patience),
                          " (cluster.progress_timeout): ", WaitsFor())),
         now);
  }
  Settle(now);
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
                      committed() != base_step_ && !last_.checkpoint();
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
  Reissue();
}

CoreActions CoordinatorCore::TakeActions() {
  lines_out_ = metrics_.next_step();
  return std::exchange(actions_, CoreActions());
}

}  // namespace ballast
