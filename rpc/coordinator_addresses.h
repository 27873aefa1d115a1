// SPDX-License-Identifier: Apache-2.0
// Where a coordinator may answer: one host:port, or several of which one leads
// and the others stand by.

#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast {

// Thread-compatible.
class CoordinatorAddresses {
 public:
  // "host:port[,host:port]...".
  // Errors: INVALID_ARGUMENT  an entry is not host:port.
  static absl::StatusOr<CoordinatorAddresses> Parse(absl::string_view list);

  // Whom to call now.
  const std::string& current() const { return addresses_[current_]; }
  // As it was given, for messages.
  const std::string& list() const { return list_; }
  // A call to `address` came back with UNAVAILABLE, or not at all: moves on to
  // the leader that the message names ("leader is host:port"), else to the next
  // address; or stays, when another caller has moved on already.
  void Failed(const std::string& address, const absl::Status& status);

 private:
  std::string list_;
  std::vector<std::string> addresses_;
  size_t current_ = 0;
};

}  // namespace ballast
