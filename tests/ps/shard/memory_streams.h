// SPDX-License-Identifier: Apache-2.0
// Streams of the Shard service without gRPC: between two engines, and between a
// test and an engine. Everything is heard as tasks of the mailboxes.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "ps/shard/bulk_stream.h"
#include "ps/shard/mailbox.h"
#include "rpc/bulk_message.h"

namespace ballast::testing {

// One end of a stream between two mailboxes. What is written here is heard
// there once it asks for it, in order.
class StreamEnd final : public BulkStream {
 public:
  StreamEnd(std::shared_ptr<Mailbox> mailbox, BulkStreamHandler* handler,
            uint64_t id)
      : mailbox_(std::move(mailbox)), handler_(handler), id_(id) {}
  static void Join(const std::shared_ptr<StreamEnd>& a,
                   const std::shared_ptr<StreamEnd>& b) {
    a->peer_ = b;
    b->peer_ = a;
    for (const auto& end : {a, b}) {
      end->mailbox_->Post(
          [end, h = end->handler_] { h->OnOpen(end->id_, end); });
      end->wanted_ = 1;
    }
  }

  void Read() override {
    ++wanted_;
    Flush();
  }
  void Write(const grpc::ByteBuffer& message) override {
    const auto peer = peer_.lock();
    if (gone_ || !peer) {
      return;
    }
    peer->arrived_.push_back(message);
    peer->Flush();
    mailbox_->Post([h = handler_, id = id_] { h->OnWritten(id); });
  }
  void Finish(const absl::Status&) override { Break(); }
  void Cancel() override { Break(); }
  // Both ends hear that it is gone; what was on its way is lost.
  void Break() {
    if (gone_) {
      return;
    }
    gone_ = true;
    arrived_.clear();
    mailbox_->Post([h = handler_, id = id_] { h->OnGone(id); });
    if (const auto peer = peer_.lock()) {
      peer->Break();
    }
  }
  bool gone() const { return gone_; }

 private:
  void Flush() {
    while (wanted_ > 0 && !arrived_.empty() && !gone_) {
      --wanted_;
      auto message = std::make_shared<absl::StatusOr<BulkMessage>>(
          BulkMessage::Parse(arrived_.front()));
      arrived_.pop_front();
      mailbox_->Post([h = handler_, id = id_, message] {
        h->OnMessage(id, std::move(*message));
      });
    }
  }

  const std::shared_ptr<Mailbox> mailbox_;
  BulkStreamHandler* const handler_;
  const uint64_t id_;
  std::weak_ptr<StreamEnd> peer_;
  std::deque<grpc::ByteBuffer> arrived_;
  uint32_t wanted_ = 0;
  bool gone_ = false;
};

// Keeps what the server answers.
class StreamClient final : public BulkStream {
 public:
  StreamClient(std::shared_ptr<Mailbox> mailbox, BulkStreamHandler* handler,
               uint64_t id)
      : mailbox_(std::move(mailbox)), handler_(handler), id_(id) {}
  void Read() override {}
  void Write(const grpc::ByteBuffer& message) override {
    const auto parsed = BulkMessage::Parse(message);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    if (parsed->header().kind == BulkKind::kError) {
      error = parsed->error();
    } else if (parsed->header().kind == BulkKind::kHello) {
      ++hellos;
    } else {
      ++answers;
    }
    mailbox_->Post([h = handler_, id = id_] { h->OnWritten(id); });
  }
  void Finish(const absl::Status&) override {
    over = true;
    mailbox_->Post([h = handler_, id = id_] { h->OnGone(id); });
  }
  void Cancel() override { Finish(absl::OkStatus()); }
  void Send(const grpc::ByteBuffer& message) {
    auto parsed = std::make_shared<absl::StatusOr<BulkMessage>>(
        BulkMessage::Parse(message));
    mailbox_->Post([h = handler_, id = id_, parsed] {
      h->OnMessage(id, std::move(*parsed));
    });
  }
  static std::shared_ptr<StreamClient> Open(
      const std::shared_ptr<Mailbox>& mailbox, BulkStreamHandler* handler,
      uint64_t id) {
    auto client = std::make_shared<StreamClient>(mailbox, handler, id);
    mailbox->Post([client, handler, id] { handler->OnOpen(id, client); });
    return client;
  }
  // As when its process dies.
  void Vanish() {
    if (!over) {
      over = true;
      mailbox_->Post([h = handler_, id = id_] { h->OnGone(id); });
    }
  }
  void HalfClose() {
    mailbox_->Post([h = handler_, id = id_] { h->OnHalfClose(id); });
  }

  uint64_t hellos = 0;
  uint64_t answers = 0;
  absl::Status error;
  bool over = false;

 private:
  const std::shared_ptr<Mailbox> mailbox_;
  BulkStreamHandler* const handler_;
  const uint64_t id_;
};

}  // namespace ballast::testing
