// SPDX-License-Identifier: Apache-2.0
// A Fetch or Push stream as the engine sees it: whole messages, no gRPC thread.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "rpc/bulk_message.h"

namespace ballast {

// Thread-safe. Calls after the stream is gone do nothing.
class BulkStream {
 public:
  virtual ~BulkStream() = default;
  // Asks for the next message; one at a time.
  virtual void Read() = 0;
  // One at a time: the next after OnWritten.
  virtual void Write(const grpc::ByteBuffer& message) = 0;
  // Ends the stream after the write in flight. Once.
  virtual void Finish(const absl::Status& status) = 0;
  // Breaks it off, the write in flight included.
  virtual void Cancel() = 0;
};

// What happens on streams, told on the engine's thread. `id` is never used
// twice.
class BulkStreamHandler {
 public:
  virtual ~BulkStreamHandler() = default;
  virtual void OnOpen(uint64_t id, std::shared_ptr<BulkStream> stream) = 0;
  // The message, or INVALID_ARGUMENT for one that is malformed.
  virtual void OnMessage(uint64_t id, absl::StatusOr<BulkMessage> message) = 0;
  // The client sends nothing more.
  virtual void OnHalfClose(uint64_t id) = 0;
  virtual void OnWritten(uint64_t id) = 0;
  // Last: nothing follows.
  virtual void OnGone(uint64_t id) = 0;
};

}  // namespace ballast
