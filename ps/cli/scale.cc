// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/scale.h"

#include <algorithm>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace ballast {
namespace {

// The life of that name which is not over; null: none.
const v1::MemberStatus* Find(const v1::StatusReply& status,
                             const std::string& name) {
  for (const v1::MemberStatus& member : status.members()) {
    if (member.name() == name && member.state() != "gone") {
      return &member;
    }
  }
  return nullptr;
}

std::string Doing(const v1::MemberStatus& member) {
  const std::string& what =
      member.owes().empty() ? member.stats().waits_for() : member.owes();
  return absl::StrCat(member.name(), " is ", member.state(),
                      what.empty() ? "" : absl::StrCat(" (", what, ")"));
}

}  // namespace

absl::string_view RoleWord(v1::Role role) {
  return role == v1::ROLE_SERVER ? "server" : "worker";
}

absl::StatusOr<std::string> MemberName(v1::Role role, absl::string_view id) {
  const std::string prefix = absl::StrCat(RoleWord(role), "-");
  absl::string_view digits = id;
  absl::ConsumePrefix(&digits, prefix);
  uint32_t index = 0;
  // Digits alone: SimpleAtoi would also take signs and blanks.
  if (digits.empty() ||
      digits.find_first_not_of("0123456789") != absl::string_view::npos ||
      !absl::SimpleAtoi(digits, &index)) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", id, "` names no ", RoleWord(role), "; want ", prefix,
                     "1 or 1, as `ballast status` lists them"));
  }
  return absl::StrCat(prefix, index);
}

std::vector<std::string> NotInYet(const v1::StatusReply& status,
                                  const std::vector<std::string>& names) {
  std::vector<std::string> missing;
  for (const std::string& name : names) {
    const v1::MemberStatus* member = Find(status, name);
    if (member == nullptr) {
      missing.push_back(absl::StrCat(name, " has not joined"));
    } else if (member->state() != "active") {
      missing.push_back(Doing(*member));
    }
  }
  return missing;
}

std::vector<std::string> WithoutChunks(const v1::Placement& placement,
                                       const std::vector<std::string>& names) {
  std::set<std::string> owners;
  for (const uint32_t owner : placement.owner()) {
    if (owner < static_cast<uint32_t>(placement.servers_size())) {
      owners.insert(placement.servers(static_cast<int>(owner)).name());
    }
  }
  std::vector<std::string> without;
  for (const std::string& name : names) {
    if (!owners.contains(name)) {
      without.push_back(absl::StrCat(name, " holds no chunk yet"));
    }
  }
  return without;
}

std::vector<std::string> NotOutYet(const v1::StatusReply& status,
                                   const std::vector<std::string>& names) {
  std::vector<std::string> left;
  for (const std::string& name : names) {
    const v1::MemberStatus* member = Find(status, name);
    const bool wanted =
        std::find(status.wanted().begin(), status.wanted().end(), name) !=
        status.wanted().end();
    if (member != nullptr) {
      left.push_back(Doing(*member));
    } else if (wanted) {
      left.push_back(absl::StrCat(name, " is away, and its part is needed"));
    }
  }
  return left;
}

}  // namespace ballast
