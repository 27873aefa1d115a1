// SPDX-License-Identifier: Apache-2.0
// Calls to a group of etcd servers: one connection each, and when one does not
// answer, the next call goes to the next. gRPC stays behind this header's users
// (storage/etcd_*.cc).

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/etcd.grpc.pb.h"

namespace ballast {

// Thread-safe.
class EtcdClient {
 public:
  struct Server {
    std::string address;
    std::shared_ptr<grpc::Channel> channel;  // As gRPC hands it out.
    std::unique_ptr<etcdserverpb::KV::Stub> kv;
    std::unique_ptr<etcdserverpb::Watch::Stub> watch;
    std::unique_ptr<etcdserverpb::Lease::Stub> lease;
  };

  EtcdClient(const std::vector<std::string>& endpoints,
             absl::Duration call_timeout);

  absl::Duration call_timeout() const { return call_timeout_; }

  // The server that calls go to now, connected.
  // Errors: UNAVAILABLE  none can be reached; nothing was sent.
  absl::StatusOr<const Server*> Connected();
  // `server` did not answer: later calls go to the next one.
  void GoOn(const Server& server);

  // Calls once, at a server that can be reached, with `method(server,
  // context)`. Errors: UNAVAILABLE  no answer in time: the outcome is unknown.
  // Others as
  //         etcd says; the message names the server.
  template <typename Method>
  absl::Status Call(Method method) {
    const absl::StatusOr<const Server*> server = Connected();
    if (!server.ok()) {
      return server.status();
    }
    grpc::ClientContext context;
    SetDeadline(&context);
    return Judge(**server, method(**server, &context));
  }
  // As Call, at every server in turn until one answers: for what may be
  // repeated.
  template <typename Method>
  absl::Status CallAny(Method method) {
    absl::Status status;
    for (size_t i = 0; i < servers_.size(); ++i) {
      status = Call(method);
      if (!absl::IsUnavailable(status)) {
        break;
      }
    }
    return status;
  }

 private:
  const Server& current() const {
    return *servers_[turn_.load(std::memory_order_relaxed) % servers_.size()];
  }
  void SetDeadline(grpc::ClientContext* context) const;
  // What a call's end means; a server that is silent loses its turn.
  absl::Status Judge(const Server& server, const grpc::Status& status);

  const absl::Duration call_timeout_;
  std::string names_;
  std::vector<std::unique_ptr<Server>> servers_;
  // Only a hint where to call; nothing else hangs on it.
  std::atomic<size_t> turn_ = 0;
};

}  // namespace ballast
