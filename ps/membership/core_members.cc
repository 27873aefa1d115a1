// SPDX-License-Identifier: Apache-2.0
// Who comes and goes: joins, deaths, drains, and how long anyone is waited for.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/rule.h"
#include "common/status_macros.h"
#include "ps/membership/coordinator_core.h"

namespace ballast {

absl::StatusOr<v1::JoinReply> CoordinatorCore::Join(
    const v1::JoinRequest& request, absl::Time now) {
  BALLAST_ASSIGN_OR_RETURN(const Member* member,
                           members_.FindLife(request, now));
  if (member == nullptr) {
    if (over()) {
      return absl::UnavailableError(
          absl::StrCat("the run is over (", PhaseName(phase_), "); ",
                       request.name(), " may join the next"));
    }
    EndPredecessor(request, now);
    BALLAST_RETURN_IF_ERROR(members_.Check(request, now));
    if (request.role() == v1::ROLE_SERVER) {
      BALLAST_RETURN_IF_ERROR(CheckServer(request, now));
    } else if (!table_.has_value()) {
      BALLAST_RETURN_IF_ERROR(TakeLayout(request.layout()));
      actions_.changes.push_back(PutLayout(request.layout()));
    }
    member = members_.Admit(request, now);
    actions_.changes.push_back(PutMember(member->incarnation, member->join));
    joined_at_ = now;
    progress_at_ = now;
    if (member->is_server()) {
      EnterServer(*member);
    } else if (!wanted_.Has(member->name())) {
      wanted_.Add(member->name(), v1::ROLE_WORKER);
      actions_.changes.push_back(PutWanted(wanted_.members()));
    }
    Settle(now);
  }
  v1::JoinReply reply;
  reply.set_incarnation(member->incarnation);
  reply.set_timeline(identity_.timeline);
  reply.set_lease_ms(absl::ToInt64Milliseconds(members_.lease()));
  reply.set_life_id(member->join.life_id());
  reply.set_run_id(identity_.run_id);
  return reply;
}

void CoordinatorCore::EndPredecessor(const v1::JoinRequest& request,
                                     absl::Time now) {
  const Member* before = members_.FindName(request.name());
  // Whoever opens a data directory holds its lock until it ends.
  if (before != nullptr && before->is_server() &&
      request.role() == v1::ROLE_SERVER && !request.data_dir().empty() &&
      before->join.data_dir() == request.data_dir() &&
      before->join.host() == request.host()) {
    Die(before->incarnation, "lost",
        "another process has locked its data directory", now);
  }
}

absl::Status CoordinatorCore::CheckServer(const v1::JoinRequest& request,
                                          absl::Time now) {
  if (!request.run_id().empty() && request.run_id() != identity_.run_id) {
    return absl::FailedPreconditionError(
        absl::StrCat(request.data_dir(), " of ", request.name(),
                     " holds the run ", request.run_id(), "; this is ",
                     identity_.run_id, "; give it another server.data_dir"));
  }
  const WantedMember* wanted = wanted_.Find(request.name());
  if (wanted == nullptr || wanted->role != v1::ROLE_SERVER) {
    return absl::FailedPreconditionError(
        absl::StrCat(request.name(), " is none of the run's servers (",
                     absl::StrJoin(wanted_.Names(v1::ROLE_SERVER), ", "),
                     "); `ballast server add` makes a place for one more"));
  }
  const auto slot = servers_.Find(request.name());
  if (!durable() || !slot.has_value() || !servers_.Owns(*slot) ||
      !BALLAST_RULE(kHoldingsJudged)) {
    return absl::OkStatus();
  }
  const absl::Status holds =
      JudgeHoldings(log_, committed(), servers_.ChunksOf(*slot), request)
          .status();
  if (absl::IsDataLoss(holds)) {
    Fail(holds, now);
  }
  // What the timeline began with can be made anew by anyone.
  const bool begins =
      committed() == log_.base().step &&
      (committed() == 0 || checkpoints_.standing().contains(log_.base()));
  return begins && !absl::IsDataLoss(holds) ? absl::OkStatus() : holds;
}

void CoordinatorCore::PlanLoad(uint32_t slot, const v1::JoinRequest& join) {
  ServerSlot& place = servers_.at(slot);
  place.load_step = committed();
  place.load_base = committed();
  place.load_own = false;
  place.redoable = 0;
  if (!durable() || !servers_.placed()) {
    return;
  }
  const auto holdings =
      JudgeHoldings(log_, committed(), servers_.ChunksOf(slot), join);
  if (holdings.ok()) {
    place.load_own = true;
    place.load_base = holdings->base;
    place.redoable = holdings->redoable;
  } else {
    place.load_own = committed() != log_.base().step;
  }
}

void CoordinatorCore::EnterServer(const Member& member) {
  const uint32_t slot = servers_.Add(member.name());
  servers_.Enter(slot, member.incarnation, member.join.address());
  ServerSlot& place = servers_.at(slot);
  PlanLoad(slot, member.join);
  place.came_back = phase_ != Phase::kForming;
  place.base = place.load_base;
  if (phase_ == Phase::kForming) {
    return;
  }
  actions_.changes.push_back(PutPlacement(PlacementRecord()));
  const bool redoes = place.redoable >= committed() + 1;
  if (!redoes) {
    // What its place had voted for was lost with its disk.
    step_->Withdraw(slot);
  }
  if (servers_.Owns(slot) && !step_->HasVote(slot)) {
    // It misses gradients of this step, or may: they are pushed again.
    work_.Reopen();
    done_.clear();
  }
  PlanMoves();
}

void CoordinatorCore::TakeDeparture(const Member& member,
                                    const v1::ReportRequest& request,
                                    absl::Time now) {
  const uint64_t incarnation = member.incarnation;
  if (request.has_leaving()) {
    const bool asked = drained_.contains(incarnation);
    if (over() || phase_ == Phase::kForming || (Leaves(member) && !asked)) {
      Remove(incarnation, now);
    } else {
      Die(incarnation, "left", asked ? "it was asked to leave (SIGTERM)" : "",
          now);
    }
    return;
  }
  auto code = static_cast<absl::StatusCode>(request.fatal().code());
  // A server's full disk may have space again for its next life; a worker's
  // budget will not.
  const bool disk_full =
      code == absl::StatusCode::kResourceExhausted && member.is_server();
  if (disk_full || code == absl::StatusCode::kUnavailable ||
      code == absl::StatusCode::kAborted ||
      code == absl::StatusCode::kDeadlineExceeded) {
    Die(incarnation, "exit", request.fatal().message(), now);
    return;
  }
  if (code == absl::StatusCode::kOk) {
    code = absl::StatusCode::kInternal;
  }
  const std::string who = member.Describe();
  Fail(absl::Status(code,
                    absl::StrCat(who, " cannot go on after step ", committed(),
                                 ": ", request.fatal().message())),
       now);
  Remove(incarnation, now);
}

void CoordinatorCore::AddFault(uint64_t incarnation, const std::string& member,
                               const std::string& kind,
                               const std::string& detail, absl::Time noticed) {
  v1::Fault fault;
  fault.set_member(member);
  fault.set_kind(kind);
  fault.set_step(committed());
  fault.set_detail(detail);
  faults_.Add(incarnation, std::move(fault), noticed, &actions_.changes);
}

void CoordinatorCore::Die(uint64_t incarnation, const std::string& kind,
                          const std::string& detail, absl::Time now) {
  const Member* member = members_.Find(incarnation);
  if (member == nullptr || member->gone) {
    return;
  }
  if (phase_ == Phase::kFailed) {
    // Perhaps the cause: others notice a death before its lease runs out.
    failure_ = absl::Status(failure_.code(),
                            absl::StrCat(failure_.message(), "; ",
                                         member->Describe(), ": ", detail));
  } else if (phase_ != Phase::kDone && phase_ != Phase::kForming) {
    AddFault(incarnation, member->name(), kind, detail, now);
  }
  Remove(incarnation, now);
}

void CoordinatorCore::Remove(uint64_t incarnation, absl::Time now) {
  work_.Remove(incarnation, done_.contains(incarnation));
  evaluation_.Remove(incarnation);
  members_.Leave(incarnation);
  actions_.changes.push_back(DeleteMember(incarnation));
  done_.erase(incarnation);
  drained_.erase(incarnation);
  suspects_.erase(incarnation);
  debts_.erase(incarnation);
  issued_.erase(incarnation);
  watch_.Forget(incarnation);
  metrics_.Forget(incarnation);
  progress_at_ = now;
  const auto slot = servers_.FindLife(incarnation);
  if (!slot.has_value()) {
    return;
  }
  servers_.Lose(*slot, now);
  if (!durable() && !over() && phase_ != Phase::kForming &&
      servers_.Owns(*slot)) {
    Rollback(now);
  }
}

void CoordinatorCore::TakeExpired(absl::Time now) {
  for (const uint64_t incarnation : members_.TakeExpired(now)) {
    Die(incarnation, "silent",
        absl::StrCat("it has been silent for ",
                     absl::FormatDuration(members_.lease()),
                     " (cluster.lease)"),
        now);
  }
  std::vector<uint64_t> lost;
  for (const auto& [incarnation, since] : suspects_) {
    if (now - since >= kReturnMax) {
      lost.push_back(incarnation);
    }
  }
  for (const uint64_t incarnation : lost) {
    Die(incarnation, "lost",
        absl::StrCat("its connection broke and it was not heard of for ",
                     absl::FormatDuration(kReturnMax)),
        now);
  }
}

void CoordinatorCore::TakeStuck(absl::Time now) {
  if (over() || phase_ == Phase::kForming) {
    return;
  }
  std::vector<std::pair<uint64_t, std::string>> stuck;
  for (const Member* member : members_.All()) {
    if (member->gone) {
      continue;
    }
    const uint64_t life = member->incarnation;
    watch_.Observe(life, member->stats, OwesNow(*member), now);
    if (watch_.IsStuck(life, now)) {
      stuck.emplace_back(
          life, absl::StrCat("it owes ", Owes(*member),
                             ", waits for nobody and got ", "no further for ",
                             absl::FormatDuration(watch_.Stalled(life, now)),
                             " (cluster.progress_limit) [",
                             member->stats.phase(), "]"));
    }
  }
  for (const auto& [life, detail] : stuck) {
    Die(life, "stuck", detail, now);
  }
}

void CoordinatorCore::ConnectionLost(uint64_t incarnation, absl::Time now) {
  const Member* member = members_.Find(incarnation);
  if (member == nullptr || member->gone || over()) {
    return;
  }
  if (suspects_.try_emplace(incarnation, now).second && member->is_server()) {
    actions_.probes.push_back({incarnation, member->join.address()});
  }
}

void CoordinatorCore::ProbeResult(uint64_t incarnation, bool alive,
                                  absl::Time now) {
  if (alive) {
    suspects_.erase(incarnation);
  } else if (suspects_.contains(incarnation)) {
    Die(incarnation, "lost", "its address refuses connections", now);
    Settle(now);
  }
}

void CoordinatorCore::ExitReported(const v1::ExitReport& report,
                                   absl::Time now) {
  if (over()) {
    return;
  }
  const bool killed = report.signal() != 0;
  const std::string kind = killed ? "killed" : "exit";
  const std::string detail =
      killed ? absl::StrCat("signal ", report.signal())
             : absl::StrCat("exit code ", report.exit_code());
  const auto is_meant = [&report](const Member& member) {
    return member.name() == report.name() &&
           (report.pid() == 0 || report.pid() == member.join.pid()) &&
           (report.host().empty() || report.host() == member.join.host());
  };
  if (report.name() == "coordinator") {
    AddFault(0, report.name(), kind, detail,
             now - absl::Seconds(report.seconds_ago()));
  }
  std::vector<uint64_t> dead;
  for (const Member* member : members_.All()) {
    if (is_meant(*member)) {
      dead.push_back(member->incarnation);
    }
  }
  for (const uint64_t life : dead) {
    // Something else may have shown its death first, without saying why.
    if (members_.Find(life)->gone) {
      faults_.Amend(life, kind, detail, &actions_.changes);
    } else {
      Die(life, kind, detail, now);
    }
  }
  Settle(now);
}

std::vector<uint64_t> CoordinatorCore::Eligible() const {
  std::vector<uint64_t> workers;
  for (const Member* member : members_.Active(v1::ROLE_WORKER)) {
    if (!Leaves(*member)) {
      workers.push_back(member->incarnation);
    }
  }
  return workers;
}

bool CoordinatorCore::Leaves(const Member& member) const {
  if (!wanted_.Has(member.name())) {
    return true;
  }
  const auto drained = drained_.find(member.incarnation);
  if (drained == drained_.end()) {
    return false;
  }
  if (!member.is_server() || durable()) {
    return true;
  }
  // Everyone will go back to the newest checkpoint: let there be a new one.
  const auto& standing = checkpoints_.standing();
  return !standing.empty() && standing.rbegin()->first.step > drained->second;
}

void CoordinatorCore::JudgeWaits(absl::Time now) {
  const ClusterOptions& cluster = options_.job.cluster;
  if (over()) {
    return;
  }
  const std::string missing = WhoIsMissing();
  if (!missing.empty()) {
    missing_since_ = missing_since_.value_or(now);
    progress_at_ = now;
    if (now - *missing_since_ >= cluster.give_up_after) {
      Fail(absl::UnavailableError(absl::StrCat(
               "gave up after ", absl::FormatDuration(cluster.give_up_after),
               " (cluster.give_up_after) after step ", committed(), ": ",
               missing, "; start what is missing and continue with --resume")),
           now);
    }
    return;
  }
  missing_since_.reset();
  if (now - progress_at_ >= cluster.progress_timeout) {
    Fail(absl::DeadlineExceededError(absl::StrCat(
             "no progress for ", absl::FormatDuration(cluster.progress_timeout),
             " (cluster.progress_timeout): ", WaitsFor())),
         now);
  }
}

absl::Status CoordinatorCore::CheckDrain(const WantedMember& member) const {
  const uint32_t staying = wanted_.CountStaying(member.role);
  const uint32_t least =
      member.role == v1::ROLE_WORKER
          ? std::max(1u, options_.job.cluster.min_workers)
      : options_.job.server.durability == Durability::kReplica ? 2u
                                                               : 1u;
  if (!member.draining && staying <= least) {
    return absl::FailedPreconditionError(absl::StrCat(
        member.name, " cannot go: the run has ", staying,
        member.role == v1::ROLE_WORKER ? " workers and needs "
                                       : " servers and needs ",
        least, member.role == v1::ROLE_WORKER ? " (cluster.min_workers)" : "",
        "; add another one first"));
  }
  return absl::OkStatus();
}

absl::Status CoordinatorCore::CheckScale(
    const v1::ScaleRequest& request) const {
  const bool drains = !request.drain().empty();
  if (drains == (request.add() > 0)) {
    return absl::InvalidArgumentError(
        "want a number of members to add, or the name of one to drain");
  }
  if (over()) {
    return absl::FailedPreconditionError("the run is over");
  }
  const WantedMember* member = wanted_.Find(request.drain());
  if (drains && (member == nullptr || (request.role() != v1::ROLE_UNSPECIFIED &&
                                       request.role() != member->role))) {
    std::vector<std::string> names = wanted_.Names(v1::ROLE_SERVER);
    for (const std::string& name : wanted_.Names(v1::ROLE_WORKER)) {
      names.push_back(name);
    }
    return absl::FailedPreconditionError(
        absl::StrCat("there is no ", request.drain(), " to drain; the run has ",
                     absl::StrJoin(names, ", ")));
  }
  const v1::Role role = drains ? member->role : request.role();
  if (role == v1::ROLE_SERVER && !durable()) {
    return absl::FailedPreconditionError(
        "server.durability is checkpoint, so chunks cannot move while the run "
        "goes on; set it to step, or stop and resume with another "
        "server.count");
  }
  if (drains) {
    return CheckDrain(*member);
  }
  if (role == v1::ROLE_UNSPECIFIED) {
    return absl::InvalidArgumentError("want a role to add to");
  }
  const uint64_t most = role == v1::ROLE_WORKER ? members_.max_workers()
                        : table_.has_value()    ? table_->chunks().size()
                                                : wanted_.members().size();
  if (uint64_t{wanted_.CountStaying(role)} + request.add() > most) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cannot add ", request.add(), " to ", wanted_.CountStaying(role),
        role == v1::ROLE_WORKER ? " workers: at most " : " servers: at most ",
        most,
        role == v1::ROLE_WORKER ? " (cluster.max_workers)"
                                : ", one for each chunk"));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::ScaleReply> CoordinatorCore::Scale(
    const v1::ScaleRequest& request, absl::Time now) {
  BALLAST_RETURN_IF_ERROR(CheckScale(request));
  v1::ScaleReply reply;
  if (request.drain().empty()) {
    for (const std::string& name :
         wanted_.AddNew(request.role(), request.add())) {
      reply.add_names(name);
    }
  } else {
    reply.add_names(request.drain());
    if (wanted_.Find(request.drain())->role == v1::ROLE_WORKER) {
      wanted_.Remove(request.drain());
    } else {
      wanted_.Drain(request.drain());  // Its chunks move first.
      PlanMoves();
    }
  }
  actions_.changes.push_back(PutWanted(wanted_.members()));
  Settle(now);
  return reply;
}

}  // namespace ballast
