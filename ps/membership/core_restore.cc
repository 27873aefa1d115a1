// SPDX-License-Identifier: Apache-2.0
// Where a run begins, branches off or goes on: from what the store holds to a
// core that is ready.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "common/rule.h"
#include "common/status_macros.h"
#include "ps/membership/coordinator_core.h"

namespace ballast {
namespace {

uint64_t TokensPerMicroBatch(const Job& job) {
  return uint64_t{job.batch.micro_batch_size} * job.model.context;
}

std::string NameOf(Durability durability) {
  switch (durability) {
    case Durability::kCheckpoint:
      return "checkpoint";
    case Durability::kStep:
      return "step";
    case Durability::kReplica:
      return "replica";
  }
  return "unknown";
}

MemberTable::Limits LimitsOf(const CoreOptions& options) {
  MemberTable::Limits limits;
  limits.max_workers = options.job.cluster.max_workers;
  if (limits.max_workers == 0) {
    limits.max_workers = options.job.batch.micro_batches;
  }
  limits.lease = options.job.cluster.lease;
  limits.numerics = options.numerics;
  return limits;
}

bool IsEmpty(const RunState& state) {
  return state.decisions.empty() && state.checkpoints.empty();
}

absl::Status CheckSameRun(const CoreOptions& options,
                          const RunIdentity& before) {
  if (before.name != options.job.run.name) {
    return absl::FailedPreconditionError(
        absl::StrCat(options.job.run.dir, " holds the run '", before.name,
                     "'; run.name is '", options.job.run.name, "'"));
  }
  const absl::Status same = CheckFields(before.numerics, options.numerics,
                                        "the run to resume", false);
  return same.ok() ? same
                   : absl::FailedPreconditionError(absl::StrCat(
                         "the job differs from the run: ", same.message()));
}

// The run that this process continues or begins, with the term raised, and the
// timeline unless it goes on.
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
  next.term = before.term + 1;
  next.timeline = before.timeline + (options.continue_run ? 0 : 1);
  if (options.continue_run || !IsEmpty(state)) {
    if (!options.continue_run && !options.resume) {
      const std::vector<v1::Decision> history = state.History();
      return absl::FailedPreconditionError(absl::StrCat(
          options.job.run.dir, " holds the run '", before.name, "' at step ",
          history.empty() ? 0 : history.back().step(),
          "; pass --resume to continue it, or choose another run.dir"));
    }
    BALLAST_RETURN_IF_ERROR(CheckSameRun(options, before));
  }
  return next;  // When nothing happened yet, nothing can differ.
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

// Whether the servers of the run kept logs, so that its newest step can be had
// from what they hold.
bool ServersKeepSteps(const CoreOptions& options, const RunState& state) {
  return options.job.server.durability != Durability::kCheckpoint &&
         !state.durability.empty() &&
         state.durability != NameOf(Durability::kCheckpoint) &&
         state.placement.has_value() && !state.layout.empty();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CoordinatorCore>> CoordinatorCore::Create(
    CoreOptions options, const RunState& state,
    std::optional<CheckpointManifest> checkpoint, absl::Time now) {
  BALLAST_ASSIGN_OR_RETURN(RunIdentity identity, NextIdentity(options, state));
  const bool goes_on = options.continue_run && state.identity.has_value();
  // The constructor is private, so make_unique cannot reach it.
  std::unique_ptr<CoordinatorCore> core(
      new CoordinatorCore(std::move(options), std::move(identity), state, now));
  BALLAST_RETURN_IF_ERROR(core->Begin(state, goes_on, checkpoint));
  if (goes_on) {
    core->GoOn(state, now);
  }
  return core;
}

CoordinatorCore::CoordinatorCore(CoreOptions options, RunIdentity identity,
                                 const RunState& state, absl::Time now)
    : options_(std::move(options)),
      identity_(std::move(identity)),
      members_(LimitsOf(options_), identity_.term << 32,
               state.decisions.empty()
                   ? 0
                   : state.decisions.rbegin()->second.generation()),
      wanted_(options_.job.server.count, options_.job.worker.count),
      servers_(identity_.term << 32),
      chunk_elems_(options_.job.server.chunk_elems),
      log_(state, identity_.timeline),
      checkpoints_(options_.job.checkpoint.keep, state.checkpoints),
      evaluation_(options_.job.eval.micro_batches,
                  TokensPerMicroBatch(options_.job)),
      watch_(options_.job.cluster.progress_limit),
      evaluations_(state.evaluations),
      joined_at_(now),
      ticked_at_(now),
      progress_at_(now),
      step_since_(now),
      exit_since_(now),
      last_number_(BALLAST_RULE(kDirectiveNumbersGrow) ? identity_.term << 32
                                                       : 0) {}

absl::Status CoordinatorCore::TakeLayout(const std::string& encoded) {
  BALLAST_ASSIGN_OR_RETURN(const ModelLayout layout,
                           ModelLayout::Decode(encoded));
  BALLAST_ASSIGN_OR_RETURN(table_, ChunkTable::Build(layout, chunk_elems_));
  step_.emplace(options_.job, table_->layout());
  return absl::OkStatus();
}

absl::Status CoordinatorCore::Begin(
    const RunState& state, bool goes_on,
    const std::optional<CheckpointManifest>& checkpoint) {
  const bool keeps_steps = ServersKeepSteps(options_, state);
  actions_.changes.push_back(PutIdentity(identity_));
  actions_.changes.push_back(
      PutDurability(NameOf(options_.job.server.durability)));
  if (!goes_on) {
    StepKey parent;
    const std::vector<v1::Decision> history = state.History();
    if (options_.resume && keeps_steps && !history.empty()) {
      parent = {history.back().timeline(), history.back().step()};
      last_ = history.back();
    } else if (options_.resume && checkpoint.has_value()) {
      parent = {checkpoint->timeline, checkpoint->step};
      BALLAST_ASSIGN_OR_RETURN(last_, DecisionOf(*checkpoint, identity_));
    }
    log_.Branch(identity_.timeline, parent);
    actions_.changes.push_back(PutBranch(identity_.timeline, {parent}));
    for (const auto& [incarnation, join] : state.members) {
      actions_.changes.push_back(DeleteMember(incarnation));
    }
    for (const auto& [number, fault] : state.faults) {
      actions_.changes.push_back(DeleteFault(number));
    }
  }
  const bool same_model = goes_on || options_.resume;
  const bool same_places = goes_on || (options_.resume && keeps_steps);
  if (same_places && state.placement.has_value()) {
    // Chunks are named by number, so they stay as they were cut.
    chunk_elems_ = state.placement->chunk_elems();
  }
  if (same_model && !state.layout.empty()) {
    BALLAST_RETURN_IF_ERROR(TakeLayout(state.layout));
    members_.set_layout(table_->layout());
  } else if (same_model && checkpoint.has_value()) {
    BALLAST_RETURN_IF_ERROR(TakeLayout(checkpoint->layout.Encode()));
    members_.set_layout(table_->layout());
    actions_.changes.push_back(PutLayout(checkpoint->layout.Encode()));
  }
  if (same_places && state.placement.has_value()) {
    servers_ = ServerTable(*state.placement, identity_.term << 32);
    if (!table_.has_value() ||
        servers_.owners().size() != table_->chunks().size()) {
      return absl::DataLossError(
          "the coordinator's state has a placement that does not fit its "
          "model; it is damaged");
    }
  } else if (state.placement.has_value()) {
    actions_.changes.push_back(DeletePlacement());
  }
  MakeWanted(state, goes_on);
  return absl::OkStatus();
}

void CoordinatorCore::MakeWanted(const RunState& state, bool goes_on) {
  if (goes_on && !state.wanted.empty()) {
    wanted_ = WantedList(state.wanted);
  }
  // Places of an earlier part of the run that has had more servers.
  for (const uint32_t slot : servers_.Owners()) {
    const std::string& name = servers_.at(slot).name;
    if (!wanted_.Has(name)) {
      wanted_.Add(name, v1::ROLE_SERVER);
      wanted_.Drain(name);
    }
  }
  for (const std::string& name : wanted_.Names(v1::ROLE_SERVER)) {
    if (!servers_.placed()) {
      servers_.Add(name);  // In this order, whoever joins first.
    }
  }
  actions_.changes.push_back(PutWanted(wanted_.members()));
}

void CoordinatorCore::RestoreMembers(const RunState& state, absl::Time now) {
  for (const auto& [incarnation, join] : state.members) {
    members_.Restore(incarnation, join, now);
    if (join.role() != v1::ROLE_SERVER) {
      continue;
    }
    // What it holds by now is not known before it answers; it is asked to load
    // and says what it has.
    const uint32_t slot = servers_.Add(join.name());
    servers_.Enter(slot, incarnation, join.address());
    PlanLoad(slot, join);
  }
}

// Checkpoints that were decided and do not stand yet, with the owners of that
// time: moves are undone step by step.
void CoordinatorCore::RestoreCheckpoints() {
  const auto& standing = checkpoints_.standing();
  const uint64_t newest = standing.empty() ? 0 : standing.rbegin()->first.step;
  std::vector<uint32_t> owners = servers_.owners();
  for (uint64_t step = committed(); step > newest; --step) {
    const v1::Decision* decision = log_.At(step);
    if (decision == nullptr || decision->timeline() != identity_.timeline) {
      return;
    }
    if (decision->checkpoint()) {
      checkpoints_.Expect(*decision, owners);
    }
    for (const v1::ChunkMove& move : decision->moves()) {
      for (const v1::ChunkRange& range : move.chunks()) {
        for (uint32_t i = 0; i < range.count(); ++i) {
          owners[range.first() + i] = move.from();
        }
      }
    }
  }
}

// The coordinator before this one is gone; its members are not. They are asked
// for everything that only it had in memory.
void CoordinatorCore::GoOn(const RunState& state, absl::Time now) {
  std::vector<v1::Decision> history = state.History();
  if (!BALLAST_RULE(kStepNumbersContiguous) && history.size() > 1) {
    history.pop_back();
  }
  for (const v1::Decision& decision : history) {
    skips_in_a_row_ = decision.skip() ? skips_in_a_row_ + 1 : 0;
  }
  if (!history.empty()) {
    last_ = history.back();
  }
  for (const auto& [at, loss] : state.evaluations) {
    if (log_.Contains(at)) {
      last_evaluation_ = {at, loss, 0.0};
    }
  }
  faults_ = FaultBook(state.faults, now);
  RestoreMembers(state, now);
  const auto end = state.ends.find(identity_.timeline);
  if (end != state.ends.end()) {
    state_hash_ = end->second.state_hash;
    phase_ = Phase::kDone;
    exiting_ = !options_.keep_up;
  } else if (servers_.placed()) {
    RestoreCheckpoints();
    if (options_.job.run.state_hash_every && committed() > log_.base().step) {
      WantHash();
    }
    // Members that are in the middle of a step stay there.
    if (committed() > log_.base().step) {
      VersionStands(/*made_here=*/true, now);
      PlanMoves();
    } else {
      phase_ = Phase::kLoading;
    }
  }
  Settle(now);
}

}  // namespace ballast
