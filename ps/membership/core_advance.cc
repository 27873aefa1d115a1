// SPDX-License-Identifier: Apache-2.0
// Transitions of the run: what follows when everything that a phase waits for
// is there.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "common/rule.h"
#include "ps/membership/coordinator_core.h"
#include "ps/membership/placement.h"
#include "ps/membership/step_chain.h"

namespace ballast {
namespace {

// How long members are given to leave, workers and then servers.
constexpr absl::Duration kExitPatience = absl::Seconds(10);
// Steps over which status reports the speed.
constexpr size_t kRecentSteps = 10;
// A group that is large enough waits this long for more to join.
constexpr absl::Duration kJoinPatience = absl::Seconds(5);
// Records of the step log dropped in one batch.
constexpr size_t kDropsMax = 64;

}  // namespace

uint64_t CoordinatorCore::target() const {
  uint64_t last = options_.job.run.steps;
  if (options_.stop_after.has_value()) {
    last = std::min(last, *options_.stop_after);
  }
  if (stop_requested_) {
    last = std::min(last, stop_step_);
  }
  return std::max(last, committed());
}

void CoordinatorCore::Advance(absl::Time now) {
  // Every transition needs a new fact, so this ends; the bound is for us.
  for (int i = 0; i < 16 && AdvanceOnce(now); ++i) {
    progress_at_ = now;
  }
  DealLeft();
  RetireServers();
  if (over()) {
    std::vector<StepMetrics> lines = metrics_.TakeAll();
    std::move(lines.begin(), lines.end(), std::back_inserter(actions_.metrics));
    AdvanceExit(now);
  }
}

bool CoordinatorCore::AdvanceOnce(absl::Time now) {
  AdvanceHash();
  std::vector<StepMetrics> lines = metrics_.TakeReady(now);
  std::move(lines.begin(), lines.end(), std::back_inserter(actions_.metrics));
  AdvanceCheckpoints();
  switch (phase_) {
    case Phase::kForming:
      return AdvanceForming(now);
    case Phase::kLoading:
      return AdvanceLoading(now);
    case Phase::kTraining:
      return AdvanceTraining(now);
    case Phase::kEvaluating:
      return AdvanceEvaluating(now);
    case Phase::kFinishing:
      return AdvanceFinishing(now);
    case Phase::kDone:
    case Phase::kFailed:
      return false;
  }
  return false;
}

bool CoordinatorCore::AdvanceForming(absl::Time now) {
  const Job& job = options_.job;
  const size_t workers = Eligible().size();
  const bool enough = workers >= job.worker.count ||
                      (workers >= std::max(1u, job.cluster.min_workers) &&
                       now - joined_at_ >= kJoinPatience);
  bool servers = servers_.Missing().empty();
  for (const std::string& name : wanted_.Names(v1::ROLE_SERVER)) {
    servers = servers && members_.FindName(name) != nullptr;
  }
  if (!enough || !servers || !table_.has_value()) {
    return false;
  }
  if (!servers_.placed()) {
    servers_.Place(PlaceChunks(*table_, job.optimizer.kind, servers_.size()));
  }
  actions_.changes.push_back(PutPlacement(PlacementRecord()));
  phase_ = Phase::kLoading;
  return true;
}

bool CoordinatorCore::AdvanceLoading(absl::Time now) {
  if (!servers_.AllLoaded()) {
    return false;
  }
  VersionStands(/*made_here=*/false, now);
  return true;
}

// Version committed() exists: evaluate it, go on, or finish.
void CoordinatorCore::VersionStands(bool made_here, absl::Time now) {
  step_->Begin(committed() + 1);
  if (!made_here) {
    PlanMoves();
  }
  const EvalOptions& eval = options_.job.eval;
  const bool by_count =
      made_here && eval.every != 0 && committed() % eval.every == 0;
  const bool at_end = committed() == target();
  const bool is_known =
      made_here && std::any_of(evaluations_.begin(), evaluations_.end(),
                               [this](const auto& entry) {
                                 return entry.first.step == committed() &&
                                        log_.Contains(entry.first);
                               });
  if (!stop_requested_ && eval.micro_batches != 0 && (by_count || at_end) &&
      !is_known) {
    evaluation_.Begin(committed(), Eligible());
    step_since_ = now;
    phase_ = Phase::kEvaluating;
    return;
  }
  NextStep(now);
}

void CoordinatorCore::NextStep(absl::Time now) {
  step_since_ = now;
  if (committed() < target()) {
    if (!training_since_.has_value()) {
      training_since_ = now;
    }
    phase_ = Phase::kTraining;
    const bool enough = Eligible().size() >= options_.job.cluster.min_workers;
    work_.Begin(options_.job.batch.micro_batches,
                enough ? Eligible() : std::vector<uint64_t>{});
    done_.clear();
    return;
  }
  training_ended_ = now;
  if (hash_.step() != committed()) {
    WantHash();
  }
  phase_ = Phase::kFinishing;
}

void CoordinatorCore::WantHash() {
  state_hash_.clear();
  hash_.Begin(committed(), &*table_, HashedFields(options_.job.optimizer.kind));
}

void CoordinatorCore::AdvanceHash() {
  if (hash_.Done() && state_hash_.empty()) {
    state_hash_ = hash_.Hash();
    if (options_.job.run.state_hash_every) {
      metrics_.Hashed(*hash_.step(), state_hash_);
    }
  }
}

// Work that nobody has, for want of workers or because its worker died.
void CoordinatorCore::DealLeft() {
  const std::vector<uint64_t> workers = Eligible();
  if (workers.empty() || workers.size() < options_.job.cluster.min_workers) {
    return;
  }
  if (phase_ == Phase::kTraining) {
    work_.DealLeft(workers);
  } else if (phase_ == Phase::kEvaluating) {
    evaluation_.DealLeft(workers);
  }
}

bool CoordinatorCore::AdvanceTraining(absl::Time now) {
  for (const uint32_t slot : servers_.Owners()) {
    if (!step_->HasVote(slot)) {
      return false;
    }
  }
  // The next update would overwrite the version whose digests are wanted.
  if (hash_.step().has_value() && !hash_.Done()) {
    return false;
  }
  absl::StatusOr<v1::Decision> decision = step_->Decide(last_);
  if (!decision.ok()) {
    Fail(decision.status(), now);
    return false;
  }
  Commit(*std::move(decision), now);
  return true;
}

void CoordinatorCore::Commit(v1::Decision decision, absl::Time now) {
  const Job& job = options_.job;
  const uint64_t step = decision.step();
  std::set<uint64_t> workers;
  for (const Member* member : members_.Active(v1::ROLE_WORKER)) {
    if (!work_.SpansOf(member->incarnation).empty()) {
      workers.insert(member->incarnation);
    }
  }
  std::set<uint64_t> servers;
  for (const uint32_t slot : servers_.Owners()) {
    if (servers_.at(slot).incarnation != 0) {
      servers.insert(servers_.at(slot).incarnation);
    }
  }
  decision.set_timeline(identity_.timeline);
  decision.set_checkpoint(
      step == target() || checkpoint_wanted_ ||
      (job.checkpoint.every != 0 && step % job.checkpoint.every == 0));
  decision.set_workers(static_cast<uint32_t>(workers.size()));
  decision.set_servers(static_cast<uint32_t>(servers_.Owners().size()));
  decision.set_generation(members_.generation());
  FlipMoves(&decision);
  decision.set_chain(ChainOf(last_.chain(), decision));

  if (BALLAST_RULE(kDecisionLoggedFirst)) {
    actions_.changes.push_back(PutDecision(decision));
  }
  log_.Append(decision);
  if (decision.checkpoint()) {
    checkpoint_wanted_ = false;
    checkpoints_.Expect(decision, servers_.owners());
  }
  const absl::Duration took = now - step_since_;
  recent_.push_back(took);
  if (recent_.size() > kRecentSteps) {
    recent_.pop_front();
  }
  metrics_.Decided(decision, took, workers, servers, job.run.state_hash_every,
                   now);
  faults_.Committed(now, &actions_.changes);
  skips_in_a_row_ = decision.skip() ? skips_in_a_row_ + 1 : 0;
  last_ = std::move(decision);
  if (job.run.state_hash_every) {
    WantHash();
  }
  if (skips_in_a_row_ >= job.cluster.skip_max && last_.skip()) {
    Fail(absl::FailedPreconditionError(absl::StrCat(
             "step ", step, " is the ", skips_in_a_row_,
             "th skipped in a row (cluster.skip_max): ", last_.skip_reason(),
             "; lower optimizer.lr or look at the data")),
         now);
    return;
  }
  VersionStands(/*made_here=*/true, now);
}

bool CoordinatorCore::AdvanceEvaluating(absl::Time now) {
  if (!evaluation_.Done()) {
    return false;
  }
  EvaluationRecord record;
  record.at = {identity_.timeline, committed()};
  record.loss = evaluation_.Loss();
  record.seconds = absl::ToDoubleSeconds(now - step_since_);
  actions_.changes.push_back(PutEvaluation(record.at, record.loss));
  evaluations_[record.at] = record.loss;
  actions_.evaluations.push_back(record);
  last_evaluation_ = record;
  evaluation_.End();
  NextStep(now);
  return true;
}

void CoordinatorCore::AdvanceCheckpoints() {
  if (!table_.has_value()) {
    return;
  }
  std::optional<CheckpointManifest> whole = checkpoints_.TakeComplete(*table_);
  if (whole.has_value()) {
    whole->run = ParseHashHex(identity_.run_id).value();  // Ours.
    whole->run_name = identity_.name;
    whole->config = options_.config;
    whole->optimizer = options_.job.optimizer.kind;
    actions_.manifests_to_write.push_back(*std::move(whole));
  }
}

bool CoordinatorCore::AdvanceFinishing(absl::Time now) {
  for (const uint32_t slot : servers_.Owners()) {
    if (servers_.at(slot).version.value_or(0) < committed() ||
        !servers_.at(slot).version.has_value()) {
      return false;
    }
  }
  if (!checkpoints_.Expected().empty() || !hash_.Done()) {
    return false;
  }
  actions_.changes.push_back(
      PutEnd(identity_.timeline, {committed(), state_hash_}));
  phase_ = Phase::kDone;
  if (!options_.keep_up || stop_requested_) {
    exiting_ = true;
    exit_since_ = now;
  }
  return true;
}

// Workers go first: they hold nothing, and servers must answer them to the end.
void CoordinatorCore::AdvanceExit(absl::Time now) {
  if (!exiting_ || ended_) {
    return;
  }
  const absl::Duration patience = phase_ == Phase::kFailed
                                      ? members_.lease() + absl::Seconds(1)
                                      : kExitPatience;
  bool late = now - exit_since_ >= patience;
  if (!servers_exit_ && (late || members_.Active(v1::ROLE_WORKER).empty())) {
    servers_exit_ = true;
    exit_since_ = now;
    late = false;
  }
  const bool all_gone = members_.Active(v1::ROLE_WORKER).empty() &&
                        members_.Active(v1::ROLE_SERVER).empty();
  ended_ = servers_exit_ && (late || all_gone);
}

// A server that keeps no log of its own died, and its part of the newest
// version with it: everyone goes back to the newest checkpoint, on a timeline
// of its own, so that nothing of the abandoned steps is taken for new.
void CoordinatorCore::Rollback(absl::Time now) {
  const auto& standing = checkpoints_.standing();
  const StepKey parent =
      standing.empty() ? StepKey{} : standing.rbegin()->first;
  const v1::Decision* decision = log_.At(parent.step);
  if (parent.step != 0 && decision == nullptr) {
    Fail(absl::DataLossError(
             absl::StrCat("the step log has no record of step ", parent.step,
                          ", which the newest checkpoint is of")),
         now);
    return;
  }
  last_ = parent.step == 0 ? v1::Decision() : v1::Decision(*decision);
  ++identity_.timeline;
  actions_.changes.push_back(PutIdentity(identity_));
  actions_.changes.push_back(PutBranch(identity_.timeline, {parent}));
  log_.Branch(identity_.timeline, parent);
  // Of metrics that are not written yet only those that stay are.
  std::vector<StepMetrics> lines = metrics_.TakeAll();
  for (std::vector<StepMetrics>* all : {&lines, &actions_.metrics}) {
    std::erase_if(*all, [&parent](const StepMetrics& line) {
      return line.decision.step() > parent.step;
    });
  }
  std::move(lines.begin(), lines.end(), std::back_inserter(actions_.metrics));
  metrics_.Restart(parent.step + 1);
  lines_out_ = 0;
  std::erase_if(actions_.evaluations, [&parent](const EvaluationRecord& line) {
    return line.at.step > parent.step;
  });
  actions_.rollback_to =
      std::min(parent.step, actions_.rollback_to.value_or(parent.step));
  actions_.manifests_to_write.clear();

  checkpoints_.AbandonAll();
  checkpoint_wanted_ = false;
  evaluation_.End();
  hash_.End();
  state_hash_.clear();
  moves_.Clear();
  servers_.ForgetVersions();
  for (uint32_t slot = 0; slot < servers_.size(); ++slot) {
    PlanLoad(slot, v1::JoinRequest());
  }
  recent_.clear();
  skips_in_a_row_ = 0;
  phase_ = Phase::kLoading;
  if (stop_requested_) {
    phase_ = Phase::kDone;  // What it goes back to is on disk.
    exiting_ = true;
    exit_since_ = now;
  }
}

void CoordinatorCore::Prune() {
  if (checkpoints_.standing().empty()) {
    return;
  }
  // A line of metrics that is not written yet may need its record.
  uint64_t lowest =
      std::min(checkpoints_.standing().begin()->first.step, lines_out_);
  for (uint32_t i = 0; i < servers_.size(); ++i) {
    const ServerSlot& slot = servers_.at(i);
    if (!servers_.Owns(i) && slot.incarnation == 0) {
      continue;
    }
    // The record of the base itself is kept: it is the head of the chain.
    lowest = std::min(
        {lowest, slot.base.value_or(0), slot.version.value_or(slot.load_base)});
  }
  for (const StepKey& key : log_.DropBelow(lowest, kDropsMax)) {
    actions_.changes.push_back(DeleteDecision(key));
  }
}

}  // namespace ballast
