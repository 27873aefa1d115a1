// SPDX-License-Identifier: Apache-2.0
// The simulated network: calls and streams between processes, with delays,
// losses, repetitions and cuts. What gRPC promises holds (a stream keeps its
// order, a reset is seen by both sides unless the wire is cut); nothing else
// does.
//
// A place is a name ("coordinator", "server-0"); what listens there is one life
// of a process, or nothing. Not thread-safe.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/sim/world.h"

namespace ballast::sim {

// How bad the network is, outside of cuts.
struct Weather {
  absl::Duration delay_min = absl::Microseconds(50);
  absl::Duration delay_max = absl::Milliseconds(2);
  double slow = 0.0;       // Share of messages that take 50 times as long.
  double drop = 0.0;       // Of calls and of answers.
  double duplicate = 0.0;  // Of calls.
};

class SimStream;

// Kinds of streams.
inline constexpr int kFetchStream = 1;
inline constexpr int kPushStream = 2;
inline constexpr int kReplicateStream = 3;

// What a process takes in. Runs in the life that listens.
class StreamAcceptor {
 public:
  virtual ~StreamAcceptor() = default;
  // `kind` says which of its streams the client asked for.
  virtual void Accept(int kind, std::shared_ptr<SimStream> stream) = 0;
};

class Network {
 public:
  explicit Network(World* world)
      : world_(*world), random_(world->random().Fork(3)) {}

  void set_weather(const Weather& weather) { weather_ = weather; }
  // Nothing goes from one place to the other until then.
  void Cut(const std::string& from, const std::string& to, absl::Time until);
  bool IsCut(const std::string& from, const std::string& to) const;
  // A message's way.
  absl::Duration Delay();

  // `life` takes calls and streams at `address` until it dies.
  void Listen(const std::string& address, const LifePointer& life,
              StreamAcceptor* acceptor);
  void Unlisten(const std::string& address);
  // Null: connection refused.
  LifePointer Listener(const std::string& address) const;

  // One call from `caller` to whatever listens at `address`. `serve` runs in
  // the callee and answers through its argument, once, when it likes; `done`
  // runs in the caller, once: the answer, UNAVAILABLE when nobody listens or
  // the callee dies, DEADLINE_EXCEEDED after `timeout`.
  template <typename Reply>
  using Answer = std::function<void(absl::StatusOr<Reply>)>;
  template <typename Reply>
  void Call(const LifePointer& caller, const std::string& address,
            absl::Duration timeout, std::function<void(Answer<Reply>)> serve,
            Answer<Reply> done);

  // Opens a stream; `kind` is told to the acceptor. The end of a stream that
  // nobody accepts comes soon.
  std::shared_ptr<SimStream> Open(const LifePointer& client,
                                  const std::string& address, int kind);

  // A life ended. `silently`: the machine is gone, so nobody hears a reset.
  void OnDeath(const LifePointer& life, bool silently);
  // Breaks a stream of this process, if it has one.
  void BreakStreamOf(const std::string& name);

 private:
  friend class SimStream;
  struct Port {
    LifePointer life;
    StreamAcceptor* acceptor = nullptr;
  };
  // A call under way: whoever settles it first wins.
  struct Pending {
    LifePointer caller;
    LifePointer callee;  // Once it has arrived.
    std::function<void(const absl::Status&)> fail;
    bool settled = false;
  };
  void Watch(const std::shared_ptr<Pending>& pending);

  World& world_;
  Random random_;
  Weather weather_;
  std::map<std::pair<std::string, std::string>, absl::Time> cuts_;
  std::map<std::string, Port> ports_;
  std::vector<std::weak_ptr<Pending>> pending_;
  std::vector<std::weak_ptr<SimStream>> streams_;
};

// One stream between two processes: messages in order, both ways. The client's
// end is used through Client*, the server's through Server*.
class SimStream : public std::enable_shared_from_this<SimStream> {
 public:
  using Message = std::shared_ptr<const std::string>;
  struct ClientEvents {
    std::function<void(grpc::ByteBuffer)> on_message;
    // Last. OK: the server ended it well.
    std::function<void(const absl::Status&)> on_end;
  };
  struct ServerEvents {
    std::function<void(grpc::ByteBuffer)> on_message;
    std::function<void()> on_half_close;
    std::function<void()> on_written;
    std::function<void()> on_gone;  // Last.
  };

  SimStream(Network* network, LifePointer client, std::string address)
      : network_(*network),
        client_(std::move(client)),
        address_(std::move(address)) {}

  void set_client_events(ClientEvents events) {
    on_client_ = std::move(events);
  }
  void ClientWrite(const grpc::ByteBuffer& message);
  void ClientHalfClose();
  void ClientCancel();

  void set_server_events(ServerEvents events) {
    on_server_ = std::move(events);
  }
  // Asks for the next message; one at a time.
  void ServerRead();
  // One at a time. The bytes are taken when the message leaves, not before.
  void ServerWrite(const grpc::ByteBuffer& message);
  void ServerFinish(const absl::Status& status);

  // Ends it on both sides, but on a side whose wire is cut only when its
  // keepalive notices.
  void Break(const absl::Status& why);

 private:
  friend class Network;
  void Connect(int kind);
  void Accepted(const LifePointer& server, StreamAcceptor* acceptor, int kind);
  void DeliverToServer();
  absl::Duration NextDelay(absl::Time* last);
  void EndClient(absl::Duration delay, const absl::Status& why);
  void EndServer(absl::Duration delay);
  bool CutToServer() const;
  bool CutToClient() const;
  // A message that met a cut: the connection breaks when keepalive notices.
  void Stall();

  Network& network_;
  const LifePointer client_;
  const std::string address_;
  LifePointer server_;  // Null until accepted.
  ClientEvents on_client_;
  ServerEvents on_server_;
  std::vector<grpc::ByteBuffer> early_;  // Written before it was accepted.
  // In the server's hands, not yet asked for.
  std::vector<grpc::ByteBuffer> inbox_;
  bool reading_ = false;
  bool half_closed_ = false;
  bool half_close_told_ = false;
  bool client_ended_ = false;
  bool server_ended_ = false;
  bool stalled_ = false;
  absl::Time last_to_server_ = absl::InfinitePast();
  absl::Time last_to_client_ = absl::InfinitePast();
};

template <typename Reply>
void Network::Call(const LifePointer& caller, const std::string& address,
                   absl::Duration timeout,
                   std::function<void(Answer<Reply>)> serve,
                   Answer<Reply> done) {
  if (!caller->alive) {
    return;
  }
  auto pending = std::make_shared<Pending>();
  pending->caller = caller;
  const auto settle = [this, pending, caller, done](
                          absl::Duration delay, absl::StatusOr<Reply> reply) {
    world_.After(delay, caller, [pending, done, reply = std::move(reply)] {
      if (!pending->settled) {
        pending->settled = true;
        done(reply);
      }
    });
  };
  pending->fail = [this, settle](const absl::Status& why) {
    settle(Delay(), why);
  };
  Watch(pending);
  settle(timeout, absl::DeadlineExceededError("no answer in time"));
  const int copies = random_.Chance(weather_.duplicate) ? 2 : 1;
  for (int copy = 0; copy < copies; ++copy) {
    if (random_.Chance(weather_.drop)) {
      world_.Count("call dropped");
      continue;
    }
    if (copy > 0) {
      world_.Count("call repeated");
    }
    world_.After(Delay(), [this, pending, caller, address, serve, settle] {
      const LifePointer callee = Listener(address);
      if (IsCut(caller->name, address)) {
        return;
      }
      if (callee == nullptr) {
        settle(Delay(), absl::UnavailableError(
                            absl::StrCat(address, " refused the connection")));
        return;
      }
      pending->callee = callee;
      const Answer<Reply> answer = [this, caller, callee, address,
                                    settle](absl::StatusOr<Reply> reply) {
        if (!callee->alive) {
          return;
        }
        if (random_.Chance(weather_.drop)) {
          world_.Count("answer dropped");
        } else if (!IsCut(address, caller->name)) {
          settle(Delay(), std::move(reply));
        }
      };
      world_.After(absl::ZeroDuration(), callee,
                   [serve, answer] { serve(answer); });
    });
  }
}

}  // namespace ballast::sim
