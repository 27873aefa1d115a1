// SPDX-License-Identifier: Apache-2.0
// How far a change of a running cluster's size has come. Pure.

#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/ballast.pb.h"

namespace ballast {

// The member that a user means by "worker-1" or "1".
// Errors: INVALID_ARGUMENT  neither, or of the other role.
absl::StatusOr<std::string> MemberName(v1::Role role, absl::string_view id);

// "worker" or "server".
absl::string_view RoleWord(v1::Role role);

// Of the members that were asked for, those that do not take part yet, with
// what each does: "worker-2 is joining". Empty: all do.
std::vector<std::string> NotInYet(const v1::StatusReply& status,
                                  const std::vector<std::string>& names);

// Of the servers that were asked for, those that hold no chunk yet. Empty: all
// do.
std::vector<std::string> WithoutChunks(const v1::Placement& placement,
                                       const std::vector<std::string>& names);

// Of the members that should leave, those that are still in. Empty: none is.
std::vector<std::string> NotOutYet(const v1::StatusReply& status,
                                   const std::vector<std::string>& names);

}  // namespace ballast
