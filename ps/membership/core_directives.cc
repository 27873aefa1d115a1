// SPDX-License-Identifier: Apache-2.0
// What each member is told, as a function of the state.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ps/membership/coordinator_core.h"

namespace ballast {

std::vector<Span> CoordinatorCore::TrainingSpans(uint64_t worker) const {
  const auto place = std::find(workers_.begin(), workers_.end(), worker);
  if (place == workers_.end()) {
    return {};
  }
  const uint32_t total = options_.job.batch.micro_batches;
  const auto dealt =
      static_cast<uint32_t>(std::min<uint64_t>(workers_.size(), total));
  const auto index = static_cast<uint32_t>(place - workers_.begin());
  return index < dealt ? Cover(DealSpans(total, dealt)[index], total)
                       : std::vector<Span>{};
}

v1::WorkerDirective CoordinatorCore::WorkerDirectiveFor(
    const Member& member) const {
  v1::WorkerDirective directive;
  directive.set_timeline(identity_.timeline);
  directive.set_placement_version(placement_.placement_version());
  std::vector<Span> spans;
  if (exiting_) {
    directive.set_task(v1::WORKER_EXIT);
    directive.set_reason(std::string(failure_.message()));
  } else if (phase_ == Phase::kTraining) {
    directive.set_task(v1::WORKER_TRAIN);
    directive.set_step(committed() + 1);
    spans = TrainingSpans(member.incarnation);
  } else if (phase_ == Phase::kEvaluating) {
    directive.set_task(v1::WORKER_EVALUATE);
    directive.set_step(committed());
    spans = evaluation_.SpansOf(member.incarnation);
  }
  const bool works = directive.task() == v1::WORKER_TRAIN ||
                     directive.task() == v1::WORKER_EVALUATE;
  if (works && spans.empty()) {
    directive.set_task(v1::WORKER_WAIT);  // More workers than micro-batches.
  }
  for (const Span& span : spans) {
    v1::MicroBatchSpan* entry = directive.add_spans();
    entry->set_first(span.first);
    entry->set_count(span.count);
  }
  return directive;
}

v1::ServerDirective CoordinatorCore::ServerDirectiveFor(
    const Member& member) const {
  v1::ServerDirective directive;
  directive.set_timeline(identity_.timeline);
  directive.set_placement_version(placement_.placement_version());
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
  // Stopped before anything was loaded: servers wait for the workers' exit.
  if (phase_ == Phase::kForming || !confirmed_.contains(member.incarnation)) {
    if (phase_ == Phase::kLoading) {
      directive.set_task(v1::SERVER_LOAD);
      directive.set_load_step(base_step_);
      if (checkpoint_.has_value()) {
        directive.set_load_manifest(checkpoints_.standing().at(
            {checkpoint_->timeline, checkpoint_->step}));
      }
    }
    return directive;
  }
  directive.set_task(v1::SERVER_RUN);
  const bool more = phase_ == Phase::kTraining || phase_ == Phase::kEvaluating;
  if (more && committed() < target()) {
    directive.set_collecting_step(committed() + 1);
  }
  for (const uint64_t worker : workers_) {
    directive.add_workers(worker);
  }
  const uint64_t confirmed = confirmed_.at(member.incarnation);
  for (const auto& [key, decision] : unconfirmed_) {
    if (key.step > confirmed) {
      *directive.add_decisions() = decision;
    }
  }
  if (hash_.step().has_value()) {
    directive.set_state_hash_wanted(true);
    directive.set_state_hash_step(*hash_.step());
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
  if (!table_.has_value()) {
    return absl::UnavailableError(
        absl::StrCat("there is no placement yet: ", WaitsFor()));
  }
  return placement_;
}

}  // namespace ballast
