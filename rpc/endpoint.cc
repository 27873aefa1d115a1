// SPDX-License-Identifier: Apache-2.0
#include "rpc/endpoint.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server_builder.h>

#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace ballast {
namespace {

// A silent peer is found within 20 s even when no call is in flight; servers
// accept pings twice as often and count no strikes, so that no peer is ever
// told to go away for them.
constexpr int kKeepaliveMs = 10000;
constexpr int kKeepaliveTimeoutMs = 10000;
constexpr int kPingIntervalMinMs = 5000;
// gRPC takes the shortest back-off as the time that one attempt to connect may
// take: on a machine with more processes than cores that is seconds, and an
// attempt given up too early is begun anew for ever. A port where nobody
// listens is known at once, whatever this is.
constexpr int kConnectTimeoutMs = 10000;
// Between attempts where nobody listens: a process that was started again on
// its port is found in less than a step.
constexpr int kReconnectFirstMs = 20;
constexpr int kReconnectLastMs = 250;

}  // namespace

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  arguments.SetMaxSendMessageSize(kMessageBytesMax);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Bulk streams must not share a connection with the small calls beside them.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectFirstMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectLastMs);
  // A proxy named in the environment has no business between members.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(),
                                   arguments);
}

absl::StatusOr<std::unique_ptr<Endpoint>> Endpoint::Start(
    const std::string& host, uint32_t port,
    const std::vector<grpc::Service*>& services, int receive_bytes_max) {
  static std::once_flag plugins;
  std::call_once(plugins, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
  grpc::ServerBuilder builder;
  int bound_port = 0;
  builder.AddListeningPort(absl::StrCat(host, ":", port),
                           grpc::InsecureServerCredentials(), &bound_port);
  builder.SetMaxReceiveMessageSize(receive_bytes_max);
  builder.SetMaxSendMessageSize(kMessageBytesMax);
  // A second server on the same port must fail, not share it.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(
      GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
      kPingIntervalMinMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  for (grpc::Service* service : services) {
    builder.RegisterService(service);
  }
  auto endpoint = std::unique_ptr<Endpoint>(new Endpoint());
  endpoint->server_ = builder.BuildAndStart();
  if (endpoint->server_ == nullptr || bound_port == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cannot listen on ", host, ":", port,
        "; the port is in use or the address is not this machine's; set "
        "cluster.port to another one, or to 0 for any free port"));
  }
  endpoint->address_ = absl::StrCat(host, ":", bound_port);
  return endpoint;
}

Endpoint::~Endpoint() { Stop(absl::ZeroDuration()); }

void Endpoint::Stop(absl::Duration grace) {
  if (server_ != nullptr) {
    server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
    server_->Wait();
    server_.reset();
  }
}

}  // namespace ballast
