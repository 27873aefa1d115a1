// SPDX-License-Identifier: Apache-2.0
// A whole shard server in a process: engine, streams, membership.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "common/job.h"

namespace ballast {

struct ShardServerOptions {
  Job job;
  std::string coordinator;  // host:port.
  std::string name;         // "server-0".
  std::string data_dir;     // Made absolute.
  std::string host;         // To listen on.
  uint32_t port = 0;        // 0: chosen by the system.
  std::string advertise;    // host:port for others; empty: where it listens.
  // Given, once admitted, what asks the server to leave in good order; that
  // may be called from any thread, at any time. Empty: nobody asks.
  std::function<void(std::function<void()> drain)> on_admitted;
};

// Serves until the coordinator says to leave. Blocks.
// Errors: INVALID_ARGUMENT     server.memory is too small, or a checkpoint is
// of
//                              another model.
//         FAILED_PRECONDITION  the processor lacks what the kernels need, the
//                              port or the data directory is taken or of
//                              another run, or the coordinator refused.
//         UNAVAILABLE          the coordinator is silent for
//                              cluster.give_up_after.
//         RESOURCE_EXHAUSTED   the disk is full, or the system has no memory.
//         DATA_LOSS            the disk lost something.
absl::Status RunShardServer(const ShardServerOptions& options);

}  // namespace ballast
