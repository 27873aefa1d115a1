// SPDX-License-Identifier: Apache-2.0
// How the run stands, for people: every wait has a name.
#include <limits>
#include <string>
#include <vector>

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

bool CoordinatorCore::HashMissingFrom(uint64_t server) const {
  if (!hash_.step().has_value() || hash_.Done()) {
    return false;
  }
  for (int i = 0; i < placement_.owner_size(); ++i) {
    if (servers_[placement_.owner(i)] == server &&
        !hash_.HasChunk(static_cast<uint32_t>(i))) {
      return true;
    }
  }
  return false;
}

std::string CoordinatorCore::OwedByServer(const Member& server) const {
  const auto version = confirmed_.find(server.incarnation);
  if (version == confirmed_.end()) {
    return phase_ == Phase::kLoading ? absl::StrCat("version ", base_step_)
                                     : "";
  }
  std::vector<std::string> owed;
  if (version->second < committed()) {
    owed.push_back(absl::StrCat("its update to version ", committed()));
  }
  if (phase_ == Phase::kTraining && !step_->HasVote(server.incarnation)) {
    owed.push_back(absl::StrCat("its vote for step ", committed() + 1));
  }
  for (const StepKey& key : checkpoints_.Expected()) {
    if (checkpoints_.Owes(server.incarnation, key)) {
      owed.push_back(
          absl::StrCat("its part of the checkpoint of step ", key.step));
    }
  }
  if (HashMissingFrom(server.incarnation)) {
    owed.push_back(absl::StrCat("its digests of version ", *hash_.step()));
  }
  return absl::StrJoin(owed, ", ");
}

std::string CoordinatorCore::Owes(const Member& member) const {
  if (member.is_server()) {
    return OwedByServer(member);
  }
  if (phase_ == Phase::kTraining &&
      !metrics_.IsDone(member.incarnation, committed() + 1)) {
    const std::vector<Span> spans = TrainingSpans(member.incarnation);
    return spans.empty()
               ? ""
               : absl::StrCat("gradients of step ", committed() + 1,
                              " (micro-batches ", SpanText(spans), ")");
  }
  if (evaluation_.Owes(member.incarnation)) {
    return absl::StrCat("losses of version ", *evaluation_.step(),
                        " (micro-batches ",
                        SpanText(evaluation_.SpansOf(member.incarnation)), ")");
  }
  return "";
}

std::string CoordinatorCore::AllOwed() const {
  std::string all = absl::StrCat(PhaseName(phase_), committed());
  for (const Member* member : members_.All()) {
    absl::StrAppend(&all, "\n", member->gone ? "" : Owes(*member));
  }
  return all;
}

std::string CoordinatorCore::MissingNames(v1::Role role) const {
  const std::vector<const Member*> active = members_.Active(role);
  std::vector<std::string> missing;
  for (uint32_t i = 0; i < members_.wanted(role); ++i) {
    const std::string name =
        absl::StrCat(role == v1::ROLE_SERVER ? "server-" : "worker-", i);
    bool found = false;
    for (const Member* member : active) {
      found = found || member->name() == name;
    }
    // Names are the launcher's choice; these are the usual ones.
    if (!found && missing.size() + active.size() < members_.wanted(role)) {
      missing.push_back(name);
    }
  }
  return absl::StrJoin(missing, ", ");
}

std::string CoordinatorCore::WaitsFor() const {
  if (phase_ == Phase::kForming) {
    std::vector<std::string> parts;
    for (const v1::Role role : {v1::ROLE_SERVER, v1::ROLE_WORKER}) {
      const std::string missing = MissingNames(role);
      if (!missing.empty()) {
        parts.push_back(absl::StrCat(
            members_.Active(role).size(), " of ", members_.wanted(role),
            role == v1::ROLE_SERVER ? " servers" : " workers",
            " have joined, missing ", missing));
      }
    }
    return absl::StrJoin(parts, "; ");
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

v1::StatusReply CoordinatorCore::GetStatus(absl::Time now) const {
  v1::StatusReply reply;
  reply.set_run_name(identity_.name);
  reply.set_run_id(identity_.run_id);
  reply.set_phase(std::string(PhaseName(phase_)));
  reply.set_timeline(identity_.timeline);
  reply.set_generation(members_.generation());
  reply.set_placement_version(placement_.placement_version());
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
    v1::MemberStatus* status = reply.add_members();
    status->set_name(member->name());
    status->set_role(member->join.role());
    status->set_incarnation(member->incarnation);
    status->set_address(member->join.address());
    status->set_pid(member->join.pid());
    const bool joining = phase_ == Phase::kForming ||
                         (phase_ == Phase::kLoading && !Owes(*member).empty());
    status->set_state(member->gone ? "gone" : joining ? "joining" : "active");
    status->set_silent_ms(
        absl::ToInt64Milliseconds(members_.Silence(member->incarnation, now)));
    *status->mutable_stats() = member->stats;
    *status->mutable_plan() = member->join.plan();
  }
  if (!over()) {
    const std::string waits = WaitsFor();
    if (!waits.empty()) {
      reply.set_waits_for(
          absl::StrCat(waits, ", for ",
                       absl::FormatDuration(absl::Trunc(
                           now - progress_at_, absl::Milliseconds(100)))));
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
