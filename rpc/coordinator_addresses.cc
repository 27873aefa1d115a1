// SPDX-License-Identifier: Apache-2.0
#include "rpc/coordinator_addresses.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ballast {
namespace {

bool IsAddress(absl::string_view text) {
  const size_t colon = text.rfind(':');
  uint32_t port = 0;
  return colon != absl::string_view::npos && colon > 0 &&
         absl::SimpleAtoi(text.substr(colon + 1), &port) && port > 0 &&
         port <= 65535;
}

// What follows "leader is " in a standby's answer; empty when nothing does.
absl::string_view NamedLeader(absl::string_view message) {
  constexpr absl::string_view kPrefix = "leader is ";
  const size_t begin = message.find(kPrefix);
  if (begin == absl::string_view::npos) {
    return {};
  }
  const absl::string_view rest = message.substr(begin + kPrefix.size());
  const absl::string_view name = rest.substr(0, rest.find_first_of(" ,;\n"));
  return IsAddress(name) ? name : absl::string_view();
}

}  // namespace

absl::StatusOr<CoordinatorAddresses> CoordinatorAddresses::Parse(
    absl::string_view list) {
  CoordinatorAddresses addresses;
  addresses.list_ = std::string(list);
  for (const absl::string_view entry : absl::StrSplit(list, ',')) {
    if (!IsAddress(entry)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the coordinator's address is '", entry, "'; want host:port, or ",
          "several of them with commas between"));
    }
    addresses.addresses_.emplace_back(entry);
  }
  return addresses;
}

void CoordinatorAddresses::Failed(const std::string& address,
                                  const absl::Status& status) {
  if (address != current()) {
    return;
  }
  const std::string leader(NamedLeader(status.message()));
  if (leader.empty() || leader == address) {
    current_ = (current_ + 1) % addresses_.size();
    return;
  }
  const auto known = std::find(addresses_.begin(), addresses_.end(), leader);
  current_ = static_cast<size_t>(known - addresses_.begin());
  if (known == addresses_.end()) {
    addresses_.push_back(leader);
  }
}

}  // namespace ballast
