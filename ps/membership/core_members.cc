// SPDX-License-Identifier: Apache-2.0
// Deaths and changes of the group.
#include <string>

#include "absl/strings/str_cat.h"
#include "ps/membership/coordinator_core.h"

namespace ballast {

void CoordinatorCore::ConnectionLost(uint64_t incarnation, absl::Time now) {
  const Member* member = members_.Find(incarnation);
  if (member == nullptr || member->gone) {
    return;
  }
  if (member->is_server()) {
    actions_.probes.push_back({incarnation, member->join.address()});
  }
  Settle(now);
}

void CoordinatorCore::ProbeResult(uint64_t incarnation, bool alive,
                                  absl::Time now) {
  const Member* member = members_.Find(incarnation);
  if (alive || member == nullptr || member->gone) {
    return;
  }
  const std::string who = member->Describe();
  members_.Leave(incarnation);
  if (!over()) {
    Fail(absl::UnavailableError(
             absl::StrCat(who, " refuses connections; it is dead")),
         now);
  }
  Settle(now);
}

void CoordinatorCore::ExitReported(const v1::ExitReport& report,
                                   absl::Time now) {
  for (const Member* member : members_.All()) {
    if (!member->gone && member->name() == report.name() &&
        (report.pid() == 0 || report.pid() == member->join.pid())) {
      ProbeResult(member->incarnation, /*alive=*/false, now);
      return;
    }
  }
}

absl::StatusOr<v1::ScaleReply> CoordinatorCore::Scale(
    const v1::ScaleRequest& request, absl::Time now) {
  (void)now;
  return absl::FailedPreconditionError(absl::StrCat(
      "the group of this run is fixed (asked: ", request.ShortDebugString(),
      ")"));
}

}  // namespace ballast
