// SPDX-License-Identifier: Apache-2.0
// Waiting to lead: while another coordinator does, or the store is silent.

#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ps/coordinator/leadership.h"
#include "storage/state_store.h"

namespace ballast {

struct StandbyOptions {
  std::string address;           // Of this coordinator, for when it leads.
  absl::Duration give_up_after;  // Longest silence of the store.
  // What callers are told meanwhile: "standby; leader is host:port".
  std::function<void(const std::string& reason)> on_wait;
  // Asked every 100 ms; true ends the wait.
  std::function<bool()> stop;
};

struct Accession {
  std::unique_ptr<Leadership> leadership;
  // Another was found leading, so there is a run to go on with.
  bool stood_by = false;
};

// Blocks until this coordinator leads.
// Errors: CANCELLED    options.stop said so.
//         UNAVAILABLE  the store was silent for give_up_after.
//         Others are the store's.
absl::StatusOr<Accession> WaitToLead(SharedStateStore* store,
                                     const StandbyOptions& options);

}  // namespace ballast
