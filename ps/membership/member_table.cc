// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/member_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/rule.h"
#include "common/status_macros.h"
#include "ps/membership/progress_watch.h"

namespace ballast {
namespace {

std::string DescribeTensor(const TensorSpec& tensor) {
  return absl::StrCat(
      tensor.name, " [", absl::StrJoin(tensor.shape, ", "),
      "] uses=", tensor.use_count, " by_rows=", tensor.by_rows ? 1 : 0,
      " decay=", tensor.decay ? 1 : 0, " init=", static_cast<int>(tensor.init),
      "/", tensor.init_std, " served=", DTypeBytes(tensor.served), " bytes");
}

ConfigFields Fields(
    const google::protobuf::RepeatedPtrField<v1::ConfigField>& fields) {
  ConfigFields pairs;
  for (const v1::ConfigField& field : fields) {
    pairs.emplace_back(field.key(), field.value());
  }
  return pairs;
}

}  // namespace

absl::Status CheckLayout(const ModelLayout& reference,
                         const ModelLayout& theirs) {
  const size_t tensors =
      std::max(reference.tensors.size(), theirs.tensors.size());
  for (size_t i = 0; i < tensors; ++i) {
    const std::string ours = i < reference.tensors.size()
                                 ? DescribeTensor(reference.tensors[i])
                                 : "nothing";
    const std::string other = i < theirs.tensors.size()
                                  ? DescribeTensor(theirs.tensors[i])
                                  : "nothing";
    if (ours != other) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", i, " of the model is ", other, "; the run has ", ours));
    }
  }
  if (reference == theirs) {
    return absl::OkStatus();
  }
  const size_t units = std::min(reference.units.size(), theirs.units.size());
  size_t unit = 0;
  while (unit < units && reference.units[unit] == theirs.units[unit]) {
    ++unit;
  }
  const auto name = [unit](const ModelLayout& layout) {
    return unit < layout.units.size() ? layout.units[unit].name : "nothing";
  };
  return absl::InvalidArgumentError(absl::StrCat(
      "unit ", unit, " of the model is ", name(theirs), "; the run has ",
      name(reference), ", or reads other tensors there"));
}

absl::Status CheckFields(const ConfigFields& reference,
                         const ConfigFields& theirs, const std::string& whose,
                         bool extra_allowed) {
  const std::map<std::string, std::string> left(reference.begin(),
                                                reference.end());
  const std::map<std::string, std::string> right(theirs.begin(), theirs.end());
  std::vector<std::string> differences;
  for (const auto& [key, value] : left) {
    const auto other = right.find(key);
    if (other == right.end()) {
      differences.push_back(
          absl::StrCat(key, " is not set; ", whose, " has ", value));
    } else if (other->second != value) {
      differences.push_back(absl::StrCat(key, " is ", other->second, "; ",
                                         whose, " has ", value));
    }
  }
  for (const auto& [key, value] : right) {
    if (!extra_allowed && !left.contains(key)) {
      differences.push_back(
          absl::StrCat(key, " is ", value, "; ", whose, " has none"));
    }
  }
  if (differences.empty()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrJoin(differences, ", "));
}

std::string Member::Describe() const {
  return absl::StrCat(name(), " (pid ", join.pid(), " on ", join.host(), ")");
}

MemberTable::MemberTable(Limits limits, uint64_t first_incarnation,
                         uint64_t generation)
    : limits_(std::move(limits)),
      leases_(limits_.lease),
      last_incarnation_(first_incarnation),
      generation_(generation) {}

void MemberTable::Restore(uint64_t incarnation, const v1::JoinRequest& join,
                          absl::Time now) {
  Member& member = members_[incarnation];
  member.join = join;
  member.incarnation = incarnation;
  // Without a fresh lease everyone is dead: nobody could be heard meanwhile.
  leases_.Renew(incarnation, BALLAST_RULE(kFreshLeasesAfterRestart)
                                 ? now
                                 : now - limits_.lease);
  ++generation_;
}

absl::StatusOr<const Member*> MemberTable::FindLife(
    const v1::JoinRequest& request, absl::Time now) {
  for (const auto& [incarnation, member] : members_) {
    if (member.join.life_id() != request.life_id() ||
        member.name() != request.name()) {
      continue;
    }
    if (member.gone) {
      return absl::AbortedError(
          absl::StrCat("this life of ", request.name(),
                       " is over; join again under a new life id"));
    }
    leases_.Renew(incarnation, now);
    return &member;
  }
  return nullptr;
}

absl::Status MemberTable::CheckName(const v1::JoinRequest& request,
                                    absl::Time now) {
  if (request.name().empty() || request.life_id() == 0 ||
      (request.role() != v1::ROLE_SERVER &&
       request.role() != v1::ROLE_WORKER)) {
    return absl::InvalidArgumentError(
        "a join needs a name, a role and a life id that is not 0");
  }
  if (request.role() == v1::ROLE_SERVER && request.address().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.name(), " joins as a server without an address"));
  }
  for (const auto& [incarnation, member] : members_) {
    if (member.gone) {
      continue;
    }
    if (member.name() == request.name()) {
      if (contenders_.size() >= kGoneMax) {
        contenders_.clear();
      }
      const absl::Time first =
          contenders_.try_emplace(request.life_id(), now).first->second;
      // A dead one's last call may come in late, but not this late.
      const absl::Duration late = std::min(absl::Seconds(1), limits_.lease / 2);
      if (now - leases_.Silence(incarnation, now) >= first + late) {
        return absl::FailedPreconditionError(absl::StrCat(
            "the name ", request.name(), " belongs to ", member.Describe(),
            ", which lives; start under another name, or stop that process"));
      }
      return absl::UnavailableError(
          absl::StrCat("the name ", request.name(), " belongs to ",
                       member.Describe(), " until it is known to be dead (",
                       absl::FormatDuration(limits_.lease), " at most)"));
    }
    if (request.role() == v1::ROLE_SERVER && member.is_server() &&
        member.join.address() == request.address()) {
      return absl::FailedPreconditionError(
          absl::StrCat(request.name(), " says it serves at ", request.address(),
                       "; ", member.Describe(), " does"));
    }
  }
  return absl::OkStatus();
}

absl::Status MemberTable::CheckSettings(const v1::JoinRequest& request) const {
  const ConfigFields fields = Fields(request.numerics());
  absl::Status same = CheckFields(limits_.numerics, fields, "the run", true);
  for (const auto& [incarnation, member] : members_) {
    // What the job does not say (a CPU's level, a kernel's version) is compared
    // between members of one role.
    if (same.ok() && !member.gone &&
        member.is_server() == (request.role() == v1::ROLE_SERVER)) {
      same = CheckFields(Fields(member.join.numerics()), fields, member.name(),
                         false);
    }
  }
  return same.ok() ? same
                   : absl::FailedPreconditionError(absl::StrCat(
                         request.name(),
                         " is configured differently: ", same.message()));
}

absl::Status MemberTable::CheckModel(const v1::JoinRequest& request) const {
  BALLAST_ASSIGN_OR_RETURN(const ModelLayout layout,
                           ModelLayout::Decode(request.layout()));
  if (!limits_.layout.has_value()) {
    return absl::OkStatus();
  }
  const absl::Status same = CheckLayout(*limits_.layout, layout);
  return same.ok()
             ? same
             : absl::FailedPreconditionError(absl::StrCat(
                   request.name(), " has another model: ", same.message()));
}

absl::Status MemberTable::Check(const v1::JoinRequest& request,
                                absl::Time now) {
  BALLAST_RETURN_IF_ERROR(CheckName(request, now));
  BALLAST_RETURN_IF_ERROR(CheckSettings(request));
  if (request.role() != v1::ROLE_WORKER) {
    return absl::OkStatus();
  }
  if (Active(v1::ROLE_WORKER).size() >= limits_.max_workers) {
    return absl::UnavailableError(absl::StrCat(
        "the run has ", limits_.max_workers, " workers (cluster.max_workers); ",
        request.name(), " is not needed"));
  }
  return CheckModel(request);
}

const Member* MemberTable::Admit(const v1::JoinRequest& request,
                                 absl::Time now) {
  contenders_.clear();
  if (request.role() == v1::ROLE_WORKER && !limits_.layout.has_value()) {
    limits_.layout = *ModelLayout::Decode(request.layout());  // Checked.
  }
  Member& member = members_[++last_incarnation_];
  member.join = request;
  member.join.clear_layout();  // Known, and large.
  member.incarnation = last_incarnation_;
  leases_.Renew(last_incarnation_, now);
  ++generation_;
  return &member;
}

absl::StatusOr<bool> MemberTable::Heartbeat(uint64_t incarnation,
                                            const v1::MemberStats* stats,
                                            absl::Time now) {
  const auto place = members_.find(incarnation);
  if (place == members_.end() ||
      (BALLAST_RULE(kOldIncarnationRefused) && place->second.gone)) {
    return absl::AbortedError(
        absl::StrCat("incarnation ", incarnation,
                     " is not a member; join again under a new life id"));
  }
  if (!place->second.gone) {
    leases_.Renew(incarnation, now);
  }
  if (stats == nullptr) {
    return false;
  }
  const bool works = ShowsWork(place->second.stats, *stats);
  place->second.stats = *stats;
  return works;
}

void MemberTable::Leave(uint64_t incarnation) {
  const auto place = members_.find(incarnation);
  if (place == members_.end() || place->second.gone) {
    return;
  }
  place->second.gone = true;
  leases_.Remove(incarnation);
  ++generation_;
  std::vector<uint64_t> gone;
  for (const auto& [life, member] : members_) {
    if (member.gone && life != incarnation) {
      gone.push_back(life);
    }
  }
  if (gone.size() >= kGoneMax) {
    members_.erase(gone.front());
  }
}

std::vector<uint64_t> MemberTable::TakeExpired(absl::Time now) {
  return leases_.TakeExpired(now);
}

void MemberTable::RenewAll(absl::Time now) {
  for (const auto& [incarnation, member] : members_) {
    if (!member.gone) {
      leases_.Renew(incarnation, now);
    }
  }
}

const Member* MemberTable::Find(uint64_t incarnation) const {
  const auto place = members_.find(incarnation);
  return place == members_.end() ? nullptr : &place->second;
}

const Member* MemberTable::FindName(absl::string_view name) const {
  for (const auto& [incarnation, member] : members_) {
    if (!member.gone && member.name() == name) {
      return &member;
    }
  }
  return nullptr;
}

const Member* MemberTable::FindLast(absl::string_view name) const {
  const Member* last = nullptr;
  for (const auto& [incarnation, member] : members_) {
    last = member.name() == name ? &member : last;
  }
  return last;
}

std::vector<const Member*> MemberTable::Active(v1::Role role) const {
  std::vector<const Member*> active;
  for (const auto& [incarnation, member] : members_) {
    if (!member.gone && member.join.role() == role) {
      active.push_back(&member);
    }
  }
  std::sort(active.begin(), active.end(), [](const Member* a, const Member* b) {
    return std::pair(a->name().size(), a->name()) <
           std::pair(b->name().size(), b->name());
  });
  return active;
}

std::vector<const Member*> MemberTable::All() const {
  std::vector<const Member*> all;
  for (const auto& [incarnation, member] : members_) {
    all.push_back(&member);
  }
  return all;
}

}  // namespace ballast
