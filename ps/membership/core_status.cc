// SPDX-License-Identifier: Apache-2.0
// How the run stands, for people: every wait has a name.
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ps/membership/coordinator_core.h"
#include "ps/membership/placement.h"

namespace ballast {
namespace {

std::string SpanText(const std::vector<Span>& spans) {
  return spans.empty() ? "none"
                       : absl::StrCat(spans.front().first, " to ",
                                      spans.back().end() - 1);
}

}  // namespace

bool CoordinatorCore::HashMissingFrom(uint32_t slot) const {
  if (!hash_.step().has_value() || hash_.Done()) {
    return false;
  }
  const std::vector<uint32_t>& owners = servers_.owners();
  for (uint32_t chunk = 0; chunk < owners.size(); ++chunk) {
    if (owners[chunk] == slot && !hash_.HasChunk(chunk)) {
      return true;
    }
  }
  return false;
}

std::string CoordinatorCore::OwedByServer(uint32_t slot) const {
  const ServerSlot& place = servers_.at(slot);
  if (phase_ == Phase::kForming || over()) {
    return "";
  }
  if (!place.version.has_value()) {
    return absl::StrCat("version ", place.load_step);
  }
  std::vector<std::string> owed;
  if (*place.version < committed()) {
    owed.push_back(absl::StrCat("its update to version ", committed()));
  }
  if (phase_ == Phase::kTraining && servers_.Owns(slot) &&
      !step_->HasVote(slot)) {
    owed.push_back(absl::StrCat("its vote for step ", committed() + 1));
  }
  for (const StepKey& key : checkpoints_.OwedBy(slot)) {
    owed.push_back(
        absl::StrCat("its part of the checkpoint of step ", key.step));
  }
  if (HashMissingFrom(slot)) {
    owed.push_back(absl::StrCat("its digests of version ", *hash_.step()));
  }
  return absl::StrJoin(owed, ", ");
}

std::string CoordinatorCore::Owes(const Member& member) const {
  if (member.is_server()) {
    const auto slot = servers_.FindLife(member.incarnation);
    return slot.has_value() ? OwedByServer(*slot) : "";
  }
  const std::vector<Span> spans = TrainingSpans(member.incarnation);
  if (!spans.empty() && !done_.contains(member.incarnation)) {
    return absl::StrCat("gradients of step ", committed() + 1,
                        " (micro-batches ", SpanText(spans), ")");
  }
  if (phase_ == Phase::kEvaluating && evaluation_.Owes(member.incarnation)) {
    return absl::StrCat("losses of version ", *evaluation_.step(),
                        " (micro-batches ",
                        SpanText(evaluation_.SpansOf(member.incarnation)), ")");
  }
  return "";
}

bool CoordinatorCore::WorkersOwe() const {
  for (const Member* worker : members_.Active(v1::ROLE_WORKER)) {
    if (!Owes(*worker).empty()) {
      return true;
    }
  }
  return false;
}

// A server's vote can only come when the workers are through, so until then it
// owes only what it is asked for by name: at the end of a chain of waits in
// which nobody else works.
bool CoordinatorCore::OwesNow(const Member& member) const {
  const std::string owes = Owes(member);
  if (!member.is_server() || owes.empty()) {
    return !owes.empty();
  }
  const ServerSlot& slot = servers_.at(*servers_.FindLife(member.incarnation));
  if (!slot.version.has_value() || *slot.version < committed()) {
    return true;
  }
  bool blamed = false;
  for (const Member* other : members_.All()) {
    if (other->gone || other->is_server() || Owes(*other).empty()) {
      continue;
    }
    if (other->stats.waits_for().empty()) {
      return false;  // It works: what it makes may be what is missing here.
    }
    blamed = blamed || absl::StartsWith(other->stats.waits_for(),
                                        absl::StrCat(member.name(), ":"));
  }
  const bool idle =
      !WorkersOwe() && !work_.has_left() && !evaluation_.has_left();
  return blamed || idle;
}

bool CoordinatorCore::NoteDebts(absl::Time now) {
  bool changed = false;
  for (const Member* member : members_.All()) {
    if (member->gone) {
      continue;
    }
    std::string owes = Owes(*member);
    Debt& debt = debts_[member->incarnation];
    if (debt.owes != owes) {
      debt = {std::move(owes), now};
      changed = true;
    }
  }
  return changed;
}

std::string CoordinatorCore::WhoIsMissing() const {
  std::vector<std::string> parts;
  const bool forms = phase_ == Phase::kForming;
  std::vector<std::string> missing;
  const std::vector<std::string> servers = wanted_.Names(v1::ROLE_SERVER);
  for (const std::string& name : servers) {
    const auto slot = servers_.Find(name);
    const bool needed = forms || (slot.has_value() && servers_.Owns(*slot));
    if (needed && members_.FindName(name) == nullptr) {
      missing.push_back(name);
    }
  }
  if (!missing.empty()) {
    parts.push_back(absl::StrCat(
        members_.Active(v1::ROLE_SERVER).size(), " of ", servers.size(),
        forms ? " servers have joined" : " servers are in", ", missing ",
        absl::StrJoin(missing, ", ")));
  }
  const bool works = phase_ == Phase::kTraining || phase_ == Phase::kEvaluating;
  const uint32_t want = forms   ? options_.job.worker.count
                        : works ? std::max(1u, options_.job.cluster.min_workers)
                                : 0;
  const size_t in = Eligible().size();
  if (in < want) {
    missing.clear();
    for (const std::string& name : wanted_.Names(v1::ROLE_WORKER)) {
      if (members_.FindName(name) == nullptr && missing.size() + in < want) {
        missing.push_back(name);
      }
    }
    parts.push_back(absl::StrCat(
        in, " of ", want, forms ? "" : " needed",
        forms ? " workers have joined" : " workers are in",
        missing.empty() ? "" : ", missing ", absl::StrJoin(missing, ", ")));
  }
  return absl::StrJoin(parts, "; ");
}

std::string CoordinatorCore::WaitsFor() const {
  const std::string missing = WhoIsMissing();
  if (phase_ == Phase::kForming || !missing.empty()) {
    return missing;
  }
  // A server can only vote when workers have pushed, so while a worker owes,
  // servers are named for what else they owe.
  std::vector<std::string> waits;
  for (const v1::Role role : {v1::ROLE_WORKER, v1::ROLE_SERVER}) {
    for (const Member* member : members_.Active(role)) {
      const std::string owes = Owes(*member);
      if (owes.empty() || (role == v1::ROLE_SERVER && !waits.empty() &&
                           phase_ == Phase::kTraining)) {
        continue;
      }
      std::string text = absl::StrCat(member->name(), " owes ", owes);
      if (!member->stats.phase().empty()) {
        absl::StrAppend(&text, " [", member->stats.phase(),
                        member->stats.waits_for().empty() ? "" : ", waits for ",
                        member->stats.waits_for(), "]");
      }
      waits.push_back(std::move(text));
    }
  }
  return absl::StrJoin(waits, "; ");
}

v1::MemberStatus CoordinatorCore::StatusOf(const Member& member,
                                           absl::Time now) const {
  v1::MemberStatus status;
  status.set_name(member.name());
  status.set_role(member.join.role());
  status.set_incarnation(member.incarnation);
  status.set_address(member.join.address());
  status.set_pid(member.join.pid());
  const auto slot = servers_.FindLife(member.incarnation);
  const bool loads =
      slot.has_value() && !servers_.at(*slot).version.has_value();
  const WantedMember* wanted = wanted_.Find(member.name());
  status.set_state(member.gone                 ? "gone"
                   : phase_ == Phase::kForming ? "joining"
                   : Leaves(member)            ? "draining"
                   : wanted->draining          ? "draining"
                   : loads && !over()          ? "loading"
                                               : "active");
  status.set_silent_ms(
      absl::ToInt64Milliseconds(members_.Silence(member.incarnation, now)));
  *status.mutable_stats() = member.stats;
  *status.mutable_plan() = member.join.plan();
  const auto debt = debts_.find(member.incarnation);
  if (debt != debts_.end() && !debt->second.owes.empty()) {
    status.set_owes(
        absl::StrCat(debt->second.owes, ", for ",
                     absl::FormatDuration(absl::Trunc(
                         now - debt->second.since, absl::Milliseconds(100)))));
  }
  return status;
}

v1::StatusReply CoordinatorCore::GetStatus(absl::Time now) const {
  v1::StatusReply reply;
  reply.set_run_name(identity_.name);
  reply.set_run_id(identity_.run_id);
  reply.set_phase(std::string(PhaseName(phase_)));
  reply.set_timeline(identity_.timeline);
  reply.set_generation(members_.generation());
  reply.set_placement_version(servers_.placement_version());
  reply.set_step(committed());
  reply.set_steps(target());
  *reply.mutable_last() = last_;
  absl::Duration recent;
  for (const absl::Duration& took : recent_) {
    recent += took;
  }
  if (recent > absl::ZeroDuration()) {
    reply.set_tokens_per_s(
        static_cast<double>(recent_.size() * options_.job.tokens_per_step()) /
        absl::ToDoubleSeconds(recent));
  }
  if (training_since_.has_value()) {
    reply.set_elapsed_seconds(absl::ToDoubleSeconds(
        training_ended_.value_or(now) - *training_since_));
  }
  reply.set_validation_loss(std::numeric_limits<double>::quiet_NaN());
  if (last_evaluation_.has_value()) {
    reply.set_validation_loss(last_evaluation_->loss);
    reply.set_validation_step(last_evaluation_->at.step);
  }
  if (!checkpoints_.standing().empty()) {
    reply.set_last_checkpoint(checkpoints_.standing().rbegin()->second);
  }
  for (const Member* member : members_.All()) {
    // Of lives that are gone only the last one of a name that is not in.
    const Member* later = members_.FindLast(member->name());
    if (!member->gone || later == member) {
      *reply.add_members() = StatusOf(*member, now);
    }
  }
  for (const WantedMember& member : wanted_.members()) {
    reply.add_wanted(member.name);
  }
  for (const auto& [number, fault] : faults_.faults()) {
    *reply.add_faults() = fault;
  }
  if (!over()) {
    const std::string waits = WaitsFor();
    if (!waits.empty()) {
      reply.set_waits_for(
          absl::StrCat(waits, ", for ",
                       absl::FormatDuration(absl::Trunc(
                           now - missing_since_.value_or(progress_at_),
                           absl::Milliseconds(100)))));
    }
  }
  if (phase_ == Phase::kFailed) {
    reply.set_failure(std::string(failure_.message()));
  }
  if (members_.layout().has_value()) {
    const ModelLayout& layout = *members_.layout();
    reply.set_parameters(layout.parameter_count());
    reply.set_weights_bytes(layout.served_bytes());
    reply.set_state_bytes(StateBytes(layout, options_.job.optimizer.kind));
  }
  // The optimizer counts updates, the run counts steps.
  reply.set_skipped_steps(last_.step() - last_.optimizer_step());
  return reply;
}

}  // namespace ballast
