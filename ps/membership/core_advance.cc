// SPDX-License-Identifier: Apache-2.0
// Transitions of the run: what follows when everything that a phase waits for
// is there.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "ps/membership/coordinator_core.h"
#include "ps/membership/placement.h"

namespace ballast {
namespace {

// How long members are given to leave, workers and then servers.
constexpr absl::Duration kExitPatience = absl::Seconds(10);
// Steps over which status reports the speed.
constexpr size_t kRecentSteps = 10;

std::vector<uint64_t> Incarnations(const std::vector<const Member*>& members) {
  std::vector<uint64_t> incarnations;
  for (const Member* member : members) {
    incarnations.push_back(member->incarnation);
  }
  return incarnations;
}

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
  AdvanceCheckpoints(now);
  switch (phase_) {
    case Phase::kForming:
      return AdvanceForming();
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

bool CoordinatorCore::AdvanceForming() {
  if (!members_.Full() || !members_.layout().has_value()) {
    return false;
  }
  const Job& job = options_.job;
  absl::StatusOr<ChunkTable> table =
      ChunkTable::Build(*members_.layout(), job.server.chunk_elems);
  if (!table.ok()) {
    Fail(table.status(), progress_at_);
    return false;
  }
  table_ = *std::move(table);
  step_.emplace(job, table_->layout());
  const std::vector<const Member*> servers = members_.Active(v1::ROLE_SERVER);
  servers_ = Incarnations(servers);
  workers_ = Incarnations(members_.Active(v1::ROLE_WORKER));

  placement_.set_placement_version(1);
  placement_.set_layout(table_->layout().Encode());
  placement_.set_chunk_elems(job.server.chunk_elems);
  placement_.set_timeline(identity_.timeline);
  placement_.set_optimizer(job.optimizer.kind == OptimizerKind::kAdamW ? "adamw"
                                                                       : "sgd");
  for (const Member* server : servers) {
    v1::ServerEntry* entry = placement_.add_servers();
    entry->set_name(server->name());
    entry->set_address(server->join.address());
    entry->set_incarnation(server->incarnation);
  }
  for (const uint32_t owner :
       PlaceChunks(*table_, job.optimizer.kind,
                   static_cast<uint32_t>(servers.size()))) {
    placement_.add_owner(owner);
  }
  phase_ = Phase::kLoading;
  return true;
}

bool CoordinatorCore::AdvanceLoading(absl::Time now) {
  for (const uint64_t server : servers_) {
    if (!confirmed_.contains(server)) {
      return false;
    }
  }
  VersionStands(/*made_here=*/false, now);
  return true;
}

// Version committed() exists: evaluate it, go on, or finish.
void CoordinatorCore::VersionStands(bool made_here, absl::Time now) {
  step_->Begin(committed() + 1);
  const EvalOptions& eval = options_.job.eval;
  const bool by_count =
      made_here && eval.every != 0 && committed() % eval.every == 0;
  const bool at_end = committed() == target();
  if (!stop_requested_ && eval.micro_batches != 0 && (by_count || at_end)) {
    evaluation_.Begin(committed(), workers_);
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

bool CoordinatorCore::AdvanceTraining(absl::Time now) {
  for (const uint64_t server : servers_) {
    if (!step_->HasVote(server)) {
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
  decision.set_timeline(identity_.timeline);
  decision.set_checkpoint(
      step == target() ||
      (job.checkpoint.every != 0 && step % job.checkpoint.every == 0));
  decision.set_workers(static_cast<uint32_t>(workers_.size()));
  decision.set_servers(static_cast<uint32_t>(servers_.size()));
  decision.set_generation(members_.generation());

  const StepKey key = {decision.timeline(), step};
  actions_.changes.push_back(PutDecision(decision));
  log_.insert(key);
  unconfirmed_[key] = decision;
  if (decision.checkpoint()) {
    checkpoints_.Expect(decision, servers_);
  }
  const absl::Duration took = now - step_since_;
  recent_.push_back(took);
  if (recent_.size() > kRecentSteps) {
    recent_.pop_front();
  }
  metrics_.Decided(decision, took, {workers_.begin(), workers_.end()},
                   {servers_.begin(), servers_.end()}, job.run.state_hash_every,
                   now);
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
  actions_.evaluations.push_back(record);
  last_evaluation_ = record;
  evaluation_.End();
  NextStep(now);
  return true;
}

void CoordinatorCore::AdvanceCheckpoints(absl::Time now) {
  if (!table_.has_value()) {
    return;
  }
  absl::StatusOr<std::optional<CheckpointManifest>> manifest =
      checkpoints_.TakeComplete(*table_);
  if (!manifest.ok()) {
    Fail(manifest.status(), now);
    return;
  }
  if (manifest->has_value()) {
    CheckpointManifest& whole = **manifest;
    whole.run = ParseHashHex(identity_.run_id).value();  // Ours.
    whole.run_name = identity_.name;
    whole.config = options_.config;
    whole.optimizer = options_.job.optimizer.kind;
    actions_.manifests_to_write.push_back(std::move(whole));
  }
}

bool CoordinatorCore::AdvanceFinishing(absl::Time now) {
  for (const uint64_t server : servers_) {
    if (confirmed_.at(server) < committed()) {
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

void CoordinatorCore::Prune() {
  if (checkpoints_.standing().empty()) {
    return;
  }
  const StepKey lowest = checkpoints_.standing().begin()->first;
  for (auto key = log_.begin(); key != log_.end() && *key < lowest;) {
    // A line of metrics that is not written yet may need its record.
    if (key->timeline == identity_.timeline && key->step >= lines_out_) {
      break;
    }
    actions_.changes.push_back(DeleteDecision(*key));
    key = log_.erase(key);
  }
}

}  // namespace ballast
