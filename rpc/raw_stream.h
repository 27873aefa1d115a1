// SPDX-License-Identifier: Apache-2.0
// The client's end of a Fetch or Push stream: whole ByteBuffers, blocking.

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/byte_buffer.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ballast {

inline constexpr char kFetchMethod[] = "/ballast.v1.Shard/Fetch";
inline constexpr char kPushMethod[] = "/ballast.v1.Shard/Push";

// One thread may write while another reads; Cancel from any thread.
class RawStream {
 public:
  // Opens the stream; every call on it ends at `timeout` from now at latest.
  // `method` is one of the constants above.
  static std::unique_ptr<RawStream> Open(
      const std::shared_ptr<grpc::Channel>& channel, const char* method,
      absl::Duration timeout);
  virtual ~RawStream() = default;

  // Blocks until gRPC took the message. Errors: as Finish().
  virtual absl::Status Write(const grpc::ByteBuffer& message) = 0;
  // Blocks for the next message. Errors: OUT_OF_RANGE  the server ended the
  // stream well; otherwise why it broke.
  virtual absl::StatusOr<grpc::ByteBuffer> Read() = 0;
  // Half-closes, then waits for the end. The stream is over afterwards.
  virtual absl::Status Finish() = 0;
  virtual void Cancel() = 0;
};

}  // namespace ballast
