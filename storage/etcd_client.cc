// SPDX-License-Identifier: Apache-2.0
#include "storage/etcd_client.h"

#include <grpcpp/create_channel.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"

namespace ballast {
namespace {

// etcd takes pings as often as every 5 s.
constexpr int kKeepaliveMs = 10000;
// A restarted etcd is found again within this.
constexpr int kReconnectMs = 100;
// What one attempt to connect may take (gRPC calls it the shortest back-off).
constexpr int kConnectMs = 5000;
// How long a call waits for a connection before it tries the next server.
constexpr absl::Duration kConnectWait = absl::Milliseconds(500);
// Ranges are read in pages, but a page of large values passes gRPC's 4 MB.
constexpr int kMessageBytesMax = 0x7fffffff;

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2 * kReconnectMs);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(),
                                   arguments);
}

}  // namespace

EtcdClient::EtcdClient(const std::vector<std::string>& endpoints,
                       absl::Duration call_timeout)
    : call_timeout_(call_timeout) {
  names_ = absl::StrJoin(endpoints, ", ");
  for (const std::string& address : endpoints) {
    const std::shared_ptr<grpc::Channel> channel = Connect(address);
    auto server = std::make_unique<Server>();
    server->address = address;
    server->channel = channel;
    server->kv = etcdserverpb::KV::NewStub(channel);
    server->watch = etcdserverpb::Watch::NewStub(channel);
    server->lease = etcdserverpb::Lease::NewStub(channel);
    servers_.push_back(std::move(server));
  }
}

void EtcdClient::GoOn(const Server& server) {
  size_t turn = turn_.load(std::memory_order_relaxed);
  if (servers_[turn % servers_.size()].get() == &server) {
    turn_.compare_exchange_strong(turn, turn + 1, std::memory_order_relaxed);
  }
}

// A call on a channel that is not connected fails at once, and while no call
// waits nobody drives the connection, so it has to be waited for.
absl::StatusOr<const EtcdClient::Server*> EtcdClient::Connected() {
  const absl::Duration wait = std::min(kConnectWait, call_timeout_);
  for (size_t i = 0; i < servers_.size(); ++i) {
    const Server& server = current();
    if (server.channel->GetState(/*try_to_connect=*/true) ==
            GRPC_CHANNEL_READY ||
        server.channel->WaitForConnected(
            absl::ToChronoTime(absl::Now() + wait))) {
      return &server;
    }
    GoOn(server);
  }
  return absl::UnavailableError(absl::StrCat("no etcd answers at ", names_));
}

void EtcdClient::SetDeadline(grpc::ClientContext* context) const {
  context->set_deadline(absl::ToChronoTime(absl::Now() + call_timeout_));
}

absl::Status EtcdClient::Judge(const Server& server,
                               const grpc::Status& status) {
  if (status.ok()) {
    return absl::OkStatus();
  }
  const std::string text =
      absl::StrCat("etcd at ", server.address, ": ", status.error_message());
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::CANCELLED:
      GoOn(server);
      return absl::UnavailableError(text);
    default:
      return {static_cast<absl::StatusCode>(status.error_code()), text};
  }
}

}  // namespace ballast
