// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/network.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ballast::sim {
namespace {

// When a peer that cannot be reached is noticed by keepalive.
constexpr absl::Duration kKeepaliveMin = absl::Seconds(1);
constexpr absl::Duration kKeepaliveMax = absl::Seconds(15);

// The bytes as they are on the wire: no longer the sender's memory.
grpc::ByteBuffer Detach(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  if (!message.Dump(&slices).ok()) {
    return {};
  }
  std::string all;
  for (const grpc::Slice& slice : slices) {
    all.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  const grpc::Slice copy(all);
  return {&copy, 1};
}

}  // namespace

void Network::Cut(const std::string& from, const std::string& to,
                  absl::Time until) {
  absl::Time& cut = cuts_[{from, to}];
  cut = std::max(cut, until);
}

bool Network::IsCut(const std::string& from, const std::string& to) const {
  const auto found = cuts_.find({from, to});
  return found != cuts_.end() && found->second > world_.now();
}

absl::Duration Network::Delay() {
  const absl::Duration delay =
      random_.Between(weather_.delay_min, weather_.delay_max);
  return random_.Chance(weather_.slow) ? delay * 50 : delay;
}

void Network::Listen(const std::string& address, const LifePointer& life,
                     StreamAcceptor* acceptor) {
  ports_[address] = {life, acceptor};
}

void Network::Unlisten(const std::string& address) { ports_.erase(address); }

LifePointer Network::Listener(const std::string& address) const {
  const auto found = ports_.find(address);
  return found == ports_.end() ? nullptr : found->second.life;
}

void Network::Watch(const std::shared_ptr<Pending>& pending) {
  if (pending_.size() > 256) {
    std::erase_if(pending_, [](const std::weak_ptr<Pending>& entry) {
      const auto held = entry.lock();
      return held == nullptr || held->settled;
    });
  }
  pending_.push_back(pending);
}

std::shared_ptr<SimStream> Network::Open(const LifePointer& client,
                                         const std::string& address, int kind) {
  auto stream = std::make_shared<SimStream>(this, client, address);
  std::erase_if(streams_, [](const auto& entry) { return entry.expired(); });
  streams_.push_back(stream);
  world_.After(Delay(), [stream, kind] { stream->Connect(kind); });
  return stream;
}

void Network::OnDeath(const LifePointer& life, bool silently) {
  std::erase_if(ports_,
                [&](const auto& port) { return port.second.life == life; });
  for (const auto& entry : pending_) {
    const auto pending = entry.lock();
    if (pending && !pending->settled && pending->callee == life && !silently &&
        !IsCut(life->name, pending->caller->name)) {
      pending->fail(absl::UnavailableError("connection reset"));
    }
  }
  const std::vector<std::weak_ptr<SimStream>> streams = streams_;
  for (const auto& entry : streams) {
    const auto stream = entry.lock();
    if (stream && (stream->client_ == life || stream->server_ == life)) {
      if (silently) {
        stream->Stall();
      } else {
        stream->Break(absl::UnavailableError("connection reset"));
      }
    }
  }
}

void Network::BreakStreamOf(const std::string& name) {
  const std::vector<std::weak_ptr<SimStream>> streams = streams_;
  for (const auto& entry : streams) {
    const auto stream = entry.lock();
    if (stream && !stream->client_ended_ && stream->client_->name == name &&
        random_.Chance(0.5)) {
      stream->Break(absl::UnavailableError("connection reset"));
      return;
    }
  }
}

absl::Duration SimStream::NextDelay(absl::Time* last) {
  const absl::Time now = network_.world_.now();
  *last = std::max(*last, now + network_.Delay());
  return *last - now;
}

bool SimStream::CutToServer() const {
  return server_ != nullptr && network_.IsCut(client_->name, server_->name);
}

bool SimStream::CutToClient() const {
  return server_ != nullptr && network_.IsCut(server_->name, client_->name);
}

void SimStream::Stall() {
  if (stalled_) {
    return;
  }
  stalled_ = true;
  World& world = network_.world_;
  const absl::Status why = absl::UnavailableError("keepalive timed out");
  EndClient(network_.random_.Scaled(kKeepaliveMin, kKeepaliveMax), why);
  EndServer(network_.random_.Scaled(kKeepaliveMin, kKeepaliveMax));
  if (world.tracing()) {
    world.Trace(
        absl::StrCat("stream ", client_->name, " - ", address_, " met a cut"));
  }
}

void SimStream::Connect(int kind) {
  const auto port = network_.ports_.find(address_);
  if (port == network_.ports_.end()) {
    EndClient(network_.Delay(), absl::UnavailableError(absl::StrCat(
                                    address_, " refused the connection")));
    return;
  }
  server_ = port->second.life;
  if (CutToServer() || CutToClient()) {
    Stall();
    return;
  }
  auto self = shared_from_this();
  network_.world_.After(absl::ZeroDuration(), server_,
                        [self, acceptor = port->second.acceptor, kind] {
                          self->Accepted(self->server_, acceptor, kind);
                        });
}

void SimStream::Accepted(const LifePointer&, StreamAcceptor* acceptor,
                         int kind) {
  if (server_ended_) {
    return;
  }
  if (acceptor == nullptr) {
    EndClient(network_.Delay(), absl::UnimplementedError("no such service"));
    return;
  }
  acceptor->Accept(kind, shared_from_this());
  for (const grpc::ByteBuffer& message : std::exchange(early_, {})) {
    inbox_.push_back(message);
  }
  DeliverToServer();
}

void SimStream::ClientWrite(const grpc::ByteBuffer& message) {
  if (client_ended_ || stalled_ || !client_->alive) {
    return;
  }
  if (CutToServer()) {
    Stall();
    return;
  }
  auto self = shared_from_this();
  network_.world_.After(NextDelay(&last_to_server_),
                        [self, copy = Detach(message)] {
                          if (self->on_server_.on_message == nullptr) {
                            self->early_.push_back(copy);
                            return;
                          }
                          self->inbox_.push_back(copy);
                          self->DeliverToServer();
                        });
}

void SimStream::ClientHalfClose() {
  if (!client_->alive) {
    return;
  }
  auto self = shared_from_this();
  network_.world_.After(NextDelay(&last_to_server_), [self] {
    self->half_closed_ = true;
    self->DeliverToServer();
  });
}

void SimStream::ClientCancel() {
  if (!client_->alive) {
    return;
  }
  EndClient(absl::ZeroDuration(), absl::CancelledError("cancelled"));
  if (!CutToServer()) {
    EndServer(network_.Delay());
  } else {
    Stall();
  }
}

void SimStream::ServerRead() {
  reading_ = true;
  DeliverToServer();
}

// Hands over what was asked for. In the server's life, which may stand still.
void SimStream::DeliverToServer() {
  if (server_ == nullptr || on_server_.on_message == nullptr) {
    return;
  }
  auto self = shared_from_this();
  network_.world_.After(absl::ZeroDuration(), server_, [self] {
    if (self->server_ended_ || !self->reading_) {
      return;
    }
    if (!self->inbox_.empty()) {
      self->reading_ = false;
      grpc::ByteBuffer message = self->inbox_.front();
      self->inbox_.erase(self->inbox_.begin());
      self->on_server_.on_message(std::move(message));
    } else if (self->half_closed_ && !self->half_close_told_) {
      self->half_close_told_ = true;
      self->on_server_.on_half_close();
    }
  });
}

void SimStream::ServerWrite(const grpc::ByteBuffer& message) {
  if (server_ended_ || stalled_ || !server_->alive) {
    return;
  }
  if (CutToClient()) {
    Stall();
    return;
  }
  auto self = shared_from_this();
  network_.world_.After(NextDelay(&last_to_client_), client_,
                        [self, message = grpc::ByteBuffer(message)]() mutable {
                          const grpc::ByteBuffer copy = Detach(message);
                          message.Clear();
                          self->network_.world_.After(
                              absl::ZeroDuration(), self->server_, [self] {
                                if (!self->server_ended_) {
                                  self->on_server_.on_written();
                                }
                              });
                          if (!self->client_ended_) {
                            self->on_client_.on_message(copy);
                          }
                        });
}

void SimStream::ServerFinish(const absl::Status& status) {
  if (server_ended_ || !server_->alive) {
    return;
  }
  EndClient(NextDelay(&last_to_client_), status);
  EndServer(network_.Delay());
}

void SimStream::Break(const absl::Status& why) {
  EndClient(network_.Delay(), why);
  EndServer(network_.Delay());
}

void SimStream::EndClient(absl::Duration delay, const absl::Status& why) {
  auto self = shared_from_this();
  network_.world_.After(delay, client_, [self, why] {
    if (!self->client_ended_) {
      self->client_ended_ = true;
      if (self->on_client_.on_end) {
        self->on_client_.on_end(why);
      }
      self->on_client_ = {};
    }
  });
}

void SimStream::EndServer(absl::Duration delay) {
  if (server_ == nullptr) {
    server_ended_ = true;
    return;
  }
  auto self = shared_from_this();
  network_.world_.After(delay, server_, [self] {
    if (!self->server_ended_) {
      self->server_ended_ = true;
      if (self->on_server_.on_gone) {
        self->on_server_.on_gone();
      }
      self->on_server_ = {};
    }
  });
}

}  // namespace ballast::sim
