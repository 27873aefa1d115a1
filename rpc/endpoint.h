// SPDX-License-Identifier: Apache-2.0
// How processes of Ballast reach each other: channels and servers with the same
// message limits and keepalive on both sides, health and reflection on every
// server, a deadline on every call.

#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/server.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "rpc/status.h"

namespace ballast {

// Largest message: a header and chunks of up to 256 Mi elements.
inline constexpr int kMessageBytesMax = 0x7fffffff;

// A channel of its own connection (not shared with another channel to the same
// address). Does not block.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address);

// Calls `method` (a stub's unary member function bound to its stub) once.
// Returns its status; the deadline is `timeout` from now.
template <typename Request, typename Reply, typename Method>
absl::Status CallOnce(Method method, const Request& request, Reply* reply,
                      absl::Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  return FromGrpcStatus(method(&context, request, reply));
}

// A running server and the address it listens on.
class Endpoint {
 public:
  // Listens on host:port; port 0 lets the system choose. A call that is sent a
  // message above `receive_bytes_max` ends with RESOURCE_EXHAUSTED.
  // Errors: FAILED_PRECONDITION  the port is in use or the host is not ours;
  //         the message names address and key.
  static absl::StatusOr<std::unique_ptr<Endpoint>> Start(
      const std::string& host, uint32_t port,
      const std::vector<grpc::Service*>& services,
      int receive_bytes_max = kMessageBytesMax);
  ~Endpoint();

  const std::string& address() const { return address_; }
  // Refuses new calls, lets the ones in flight end for `grace`, then cancels.
  void Stop(absl::Duration grace);

 private:
  Endpoint() = default;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ballast
