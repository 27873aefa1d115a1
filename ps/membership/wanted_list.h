// SPDX-License-Identifier: Apache-2.0
// Who should be in: the names that supervisors keep alive. It starts as the job
// says, grows with joins and `ballast worker add`, and shrinks with drains. A
// server that drains stays on the list until its chunks have moved, so that one
// that dies on the way is started again.
//
// Pure. Not thread-safe.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "proto/ballast.pb.h"
#include "ps/membership/run_state.h"

namespace ballast {

class WantedList {
 public:
  WantedList() = default;
  explicit WantedList(std::vector<WantedMember> members)
      : members_(std::move(members)) {}
  // server-0.. and worker-0.., as many as given.
  WantedList(uint32_t servers, uint32_t workers);

  // Null when the name is not on the list.
  const WantedMember* Find(absl::string_view name) const;
  bool Has(absl::string_view name) const { return Find(name) != nullptr; }
  // Names of one role, in the list's order.
  std::vector<std::string> Names(v1::Role role) const;
  // Of one role, those that drain left out.
  uint32_t CountStaying(v1::Role role) const;

  // Puts it on the list, or takes its wish to drain back.
  void Add(const std::string& name, v1::Role role);
  // The names with the lowest free indices: "server-2", "worker-1".
  std::vector<std::string> AddNew(v1::Role role, uint32_t count);
  void Drain(absl::string_view name);
  void Remove(absl::string_view name);

  const std::vector<WantedMember>& members() const { return members_; }

 private:
  std::vector<WantedMember> members_;
};

}  // namespace ballast
