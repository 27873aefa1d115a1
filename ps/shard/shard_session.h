// SPDX-License-Identifier: Apache-2.0
// The coordinator as a shard server's engine sees it: an admission, reports out
// and the placement on request. Directives come the other way, through
// ShardEngine::Deliver.

#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "proto/ballast.pb.h"

namespace ballast {

// Called on the engine's thread; never blocks.
class ShardSession {
 public:
  virtual ~ShardSession() = default;
  virtual const v1::JoinReply& admission() const = 0;
  // Queues an event: sent in order, each repeated until it is taken. `request`
  // has its event and timeline; identity and stats are filled in.
  virtual void Post(v1::ReportRequest request) = 0;
  // Asks for the placement until there is an answer. `done` runs on any thread,
  // once, or never when the session ends.
  virtual void AskPlacement(
      std::function<void(absl::StatusOr<v1::Placement>)> done) = 0;
};

}  // namespace ballast
