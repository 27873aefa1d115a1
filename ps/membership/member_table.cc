// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/member_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

std::string DescribeTensor(const TensorSpec& tensor) {
  return absl::StrCat(
      tensor.name, " [", absl::StrJoin(tensor.shape, ", "),
      "] uses=", tensor.use_count, " by_rows=", tensor.by_rows ? 1 : 0,
      " decay=", tensor.decay ? 1 : 0, " init=", static_cast<int>(tensor.init),
      "/", tensor.init_std, " served=", DTypeBytes(tensor.served), " bytes");
}

// Whether the numbers that grow with work differ. The phase is left out: a
// member that tries in vain changes it too.
bool ShowsWork(const v1::MemberStats& before, const v1::MemberStats& after) {
  return before.step() != after.step() ||
         before.fetched_bytes() != after.fetched_bytes() ||
         before.pushed_bytes() != after.pushed_bytes() ||
         before.spilled_bytes_written() != after.spilled_bytes_written() ||
         before.spilled_bytes_read() != after.spilled_bytes_read() ||
         before.chunks_resident() != after.chunks_resident();
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

MemberTable::MemberTable(Limits limits, uint64_t first_incarnation)
    : limits_(std::move(limits)),
      leases_(limits_.lease),
      last_incarnation_(first_incarnation) {}

absl::Status MemberTable::CheckName(const v1::JoinRequest& request) const {
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
      return absl::FailedPreconditionError(absl::StrCat(
          "the name ", request.name(), " belongs to ", member.Describe(),
          "; start under another name, or "
          "stop that process and wait for its lease"));
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

absl::Status MemberTable::CheckJoin(const v1::JoinRequest& request) const {
  BALLAST_RETURN_IF_ERROR(CheckName(request));
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
  if (!same.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        request.name(), " is configured differently: ", same.message()));
  }
  if (Active(request.role()).size() >= wanted(request.role())) {
    return absl::UnavailableError(absl::StrCat(
        "the run has its ", wanted(request.role()),
        request.role() == v1::ROLE_SERVER ? " servers" : " workers", "; ",
        request.name(), " is not needed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<const Member*> MemberTable::Admit(const v1::JoinRequest& request,
                                                 bool open, absl::Time now) {
  for (const auto& [incarnation, member] : members_) {
    if (member.join.life_id() == request.life_id() &&
        member.name() == request.name()) {
      if (member.gone) {
        return absl::AbortedError(
            absl::StrCat("this life of ", request.name(),
                         " is over; join again under a new life id"));
      }
      leases_.Renew(incarnation, now);
      return &member;
    }
  }
  if (!open) {
    return absl::UnavailableError(
        absl::StrCat("the run takes no new members now; ", request.name(),
                     " may try again when it forms"));
  }
  BALLAST_RETURN_IF_ERROR(CheckJoin(request));
  if (request.role() == v1::ROLE_WORKER) {
    BALLAST_ASSIGN_OR_RETURN(ModelLayout layout,
                             ModelLayout::Decode(request.layout()));
    if (limits_.layout.has_value()) {
      const absl::Status same = CheckLayout(*limits_.layout, layout);
      if (!same.ok()) {
        return absl::FailedPreconditionError(absl::StrCat(
            request.name(), " has another model: ", same.message()));
      }
    } else {
      limits_.layout = std::move(layout);
    }
  }
  Member& member = members_[++last_incarnation_];
  member.join = request;
  member.incarnation = last_incarnation_;
  leases_.Renew(last_incarnation_, now);
  ++generation_;
  return &member;
}

absl::StatusOr<bool> MemberTable::Heartbeat(uint64_t incarnation,
                                            const v1::MemberStats* stats,
                                            absl::Time now) {
  const auto place = members_.find(incarnation);
  if (place == members_.end() || place->second.gone) {
    return absl::AbortedError(
        absl::StrCat("incarnation ", incarnation,
                     " is not a member; join again under a new life id"));
  }
  leases_.Renew(incarnation, now);
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
}

std::vector<uint64_t> MemberTable::TakeExpired(absl::Time now) {
  const std::vector<uint64_t> expired = leases_.TakeExpired(now);
  for (const uint64_t incarnation : expired) {
    Leave(incarnation);
  }
  return expired;
}

const Member* MemberTable::Find(uint64_t incarnation) const {
  const auto place = members_.find(incarnation);
  return place == members_.end() ? nullptr : &place->second;
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

bool MemberTable::Full() const {
  return Active(v1::ROLE_SERVER).size() >= limits_.servers &&
         Active(v1::ROLE_WORKER).size() >= limits_.workers;
}

}  // namespace ballast
