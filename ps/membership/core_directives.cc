// SPDX-License-Identifier: Apache-2.0
// What each member is told, as a function of the state.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rule.h"
#include "ps/membership/coordinator_core.h"

namespace ballast {

std::vector<Span> CoordinatorCore::TrainingSpans(uint64_t worker) const {
  return phase_ == Phase::kTraining ? work_.SpansOf(worker)
                                    : std::vector<Span>{};
}

v1::WorkerDirective CoordinatorCore::WorkerDirectiveFor(
    const Member& member) const {
  v1::WorkerDirective directive;
  directive.set_timeline(identity_.timeline);
  directive.set_placement_version(servers_.placement_version());
  directive.set_address_version(servers_.address_version());
  std::vector<Span> spans = TrainingSpans(member.incarnation);
  const bool evaluates = phase_ == Phase::kEvaluating;
  if (evaluates) {
    spans = evaluation_.SpansOf(member.incarnation);
  }
  const bool owes = evaluates
                        ? evaluation_.Owes(member.incarnation)
                        : !spans.empty() && !done_.contains(member.incarnation);
  if (exiting_) {
    directive.set_task(v1::WORKER_EXIT);
    directive.set_reason(std::string(failure_.message()));
    return directive;
  }
  if (Leaves(member) && !owes) {
    directive.set_task(v1::WORKER_EXIT);
    directive.set_reason("drained");
    return directive;
  }
  if (spans.empty()) {
    return directive;  // Waits: nothing is dealt, or it came later.
  }
  directive.set_task(evaluates ? v1::WORKER_EVALUATE : v1::WORKER_TRAIN);
  directive.set_step(evaluates ? committed() : committed() + 1);
  for (const Span& span : spans) {
    v1::MicroBatchSpan* entry = directive.add_spans();
    entry->set_first(span.first);
    entry->set_count(span.count);
  }
  for (const uint32_t i : servers_.Owners()) {
    const ServerSlot& slot = servers_.at(i);
    if (!evaluates && slot.incarnation != 0 && step_->HasVote(i) &&
        slot.redoable >= committed() + 1) {
      directive.add_voted(slot.incarnation);
    }
  }
  return directive;
}

// Frozen when the life came, so that it hears the same until it has loaded.
void CoordinatorCore::FillLoad(const ServerSlot& slot,
                               v1::ServerDirective* directive) const {
  directive->set_task(v1::SERVER_LOAD);
  directive->set_load_step(slot.load_step);
  directive->set_load_own(slot.load_own);
  if (slot.load_own) {
    for (v1::Decision& decision : log_.Range(slot.load_base, slot.load_step)) {
      *directive->add_decisions() = std::move(decision);
    }
    return;
  }
  const auto& standing = checkpoints_.standing();
  const auto manifest = standing.find(log_.base());
  if (slot.load_step != 0 && manifest != standing.end()) {
    directive->set_load_manifest(manifest->second);
  }
}

void CoordinatorCore::FillRun(uint32_t slot,
                              v1::ServerDirective* directive) const {
  directive->set_task(v1::SERVER_RUN);
  const bool more = phase_ == Phase::kTraining || phase_ == Phase::kEvaluating;
  if (more && committed() < target()) {
    directive->set_collecting_step(committed() + 1);
  }
  for (const Member* worker : members_.Active(v1::ROLE_WORKER)) {
    directive->add_workers(worker->incarnation);
  }
  const uint64_t version = *servers_.at(slot).version;
  for (v1::Decision& decision : log_.Range(version, committed())) {
    if (decision.step() == committed() || BALLAST_RULE(kDecisionRepeated)) {
      *directive->add_decisions() = std::move(decision);
    }
  }
  for (const StepKey& key : checkpoints_.OwedBy(slot)) {
    v1::CheckpointId* owed = directive->add_owed_checkpoints();
    owed->set_timeline(key.timeline);
    owed->set_step(key.step);
  }
  if (hash_.step().has_value()) {
    directive->set_state_hash_wanted(true);
    directive->set_state_hash_step(*hash_.step());
  }
  AddOrders(slot, directive);
}

v1::ServerDirective CoordinatorCore::ServerDirectiveFor(
    const Member& member) const {
  v1::ServerDirective directive;
  directive.set_timeline(identity_.timeline);
  directive.set_placement_version(servers_.placement_version());
  directive.set_address_version(servers_.address_version());
  for (const StepKey& key : checkpoints_.Kept()) {
    v1::CheckpointId* kept = directive.add_keep_checkpoints();
    kept->set_timeline(key.timeline);
    kept->set_step(key.step);
  }
  if (exiting_ && servers_exit_) {
    directive.set_task(v1::SERVER_EXIT);
    directive.set_reason(std::string(failure_.message()));
    return directive;
  }
  if (!exiting_ && Leaves(member)) {
    directive.set_task(v1::SERVER_EXIT);
    directive.set_reason("drained");
    return directive;
  }
  const auto slot = servers_.FindLife(member.incarnation);
  // Stopped before anything was loaded: servers wait for the workers' exit.
  if (phase_ == Phase::kForming || !slot.has_value()) {
    return directive;
  }
  if (servers_.at(*slot).version.has_value()) {
    FillRun(*slot, &directive);
  } else if (!over()) {
    FillLoad(servers_.at(*slot), &directive);
  }
  return directive;
}

v1::PollReply CoordinatorCore::DirectiveFor(const Member& member) const {
  v1::PollReply reply;
  if (member.is_server()) {
    *reply.mutable_server() = ServerDirectiveFor(member);
  } else {
    *reply.mutable_worker() = WorkerDirectiveFor(member);
  }
  return reply;
}

void CoordinatorCore::Reissue() {
  for (const Member* member : members_.All()) {
    if (member->gone) {
      issued_.erase(member->incarnation);
      continue;
    }
    v1::PollReply reply = DirectiveFor(*member);
    std::string content = reply.SerializeAsString();
    Issued& issued = issued_[member->incarnation];
    if (issued.reply.number() != 0 && issued.content == content) {
      continue;
    }
    if (reply.worker().task() == v1::WORKER_TRAIN) {
      done_.erase(member->incarnation);  // It is told something else now.
    }
    reply.set_number(++last_number_);
    issued.reply = std::move(reply);
    issued.content = std::move(content);
  }
}

absl::StatusOr<v1::PollReply> CoordinatorCore::Directive(
    uint64_t incarnation, uint64_t seen_number) const {
  const auto issued = issued_.find(incarnation);
  if (issued == issued_.end()) {
    return absl::AbortedError(
        absl::StrCat("incarnation ", incarnation,
                     " is not a member; join again under a new life id"));
  }
  if (issued->second.reply.number() > seen_number) {
    return issued->second.reply;
  }
  v1::PollReply nothing_new;
  nothing_new.set_number(issued->second.reply.number());
  return nothing_new;
}

absl::StatusOr<v1::Placement> CoordinatorCore::GetPlacement() const {
  if (!servers_.placed()) {
    return absl::UnavailableError(
        absl::StrCat("there is no placement yet: ", WaitsFor()));
  }
  v1::Placement placement = PlacementRecord();
  placement.set_layout(table_->layout().Encode());
  return placement;
}

}  // namespace ballast
