// SPDX-License-Identifier: Apache-2.0
// How a server opens a Replicate stream to another one. The stream's events
// come as those of a served stream do: on the engine's thread, as tasks of its
// mailbox.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "ps/shard/bulk_stream.h"
#include "ps/shard/mailbox.h"

namespace ballast {

class ReplicaDialer {
 public:
  virtual ~ReplicaDialer() = default;
  // Opens Shard.Replicate at host:port `address`. `handler` hears OnOpen, then
  // whatever happens, OnGone last (a refused connection too); it outlives the
  // mailbox's last task. `id` is never used twice. Finish of the stream
  // half-closes it.
  virtual void Dial(const std::string& address, uint64_t id,
                    BulkStreamHandler* handler) = 0;
};

// Over gRPC, a connection for each call.
std::unique_ptr<ReplicaDialer> MakeReplicaDialer(
    std::shared_ptr<Mailbox> mailbox);

}  // namespace ballast
