// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/shard_service.h"

#include <grpcpp/server_context.h>

#include <atomic>
#include <utility>

#include "common/mutex.h"
#include "proto/ballast.grpc.pb.h"
#include "rpc/status.h"

namespace ballast {
namespace {

using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// The engine's end of a stream. shared: gRPC deletes the reactor when it is
// done with it, the engine lets go when it hears of that.
class Link final : public BulkStream {
 public:
  Link(Reactor* reactor, grpc::CallbackServerContext* context,
       grpc::ByteBuffer* inbox, grpc::ByteBuffer* outbox)
      : reactor_(reactor), context_(context), inbox_(inbox), outbox_(outbox) {}

  void Read() override {
    MutexLock lock(&mutex_);
    if (IsOpen()) {
      reactor_->StartRead(inbox_);
    }
  }
  void Write(const grpc::ByteBuffer& message) override {
    MutexLock lock(&mutex_);
    if (IsOpen()) {
      *outbox_ = message;
      reactor_->StartWrite(outbox_);
    }
  }
  void Finish(const absl::Status& status) override {
    MutexLock lock(&mutex_);
    if (IsOpen()) {
      finished_ = true;
      reactor_->Finish(ToGrpcStatus(status));
    }
  }
  void Cancel() override {
    MutexLock lock(&mutex_);
    if (reactor_ != nullptr) {
      context_->TryCancel();
    }
  }
  // gRPC is done: the reactor is about to be deleted.
  void Detach() {
    MutexLock lock(&mutex_);
    reactor_ = nullptr;
  }

 private:
  bool IsOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return reactor_ != nullptr && !finished_;
  }

  Mutex mutex_;
  Reactor* reactor_ ABSL_GUARDED_BY(mutex_);
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const inbox_;
  grpc::ByteBuffer* const outbox_;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

class StreamReactor final : public Reactor {
 public:
  StreamReactor(uint64_t id, grpc::CallbackServerContext* context,
                std::shared_ptr<Mailbox> mailbox, BulkStreamHandler* handler)
      : id_(id),
        mailbox_(std::move(mailbox)),
        handler_(handler),
        link_(std::make_shared<Link>(this, context, &inbox_, &outbox_)) {
    mailbox_->Post([handler, id, link = link_] { handler->OnOpen(id, link); });
    link_->Read();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      mailbox_->Post(
          [handler = handler_, id = id_] { handler->OnHalfClose(id); });
      return;
    }
    // shared: a task must be copyable.
    auto message = std::make_shared<absl::StatusOr<BulkMessage>>(
        BulkMessage::Parse(inbox_));
    inbox_.Clear();
    mailbox_->Post([handler = handler_, id = id_, message] {
      handler->OnMessage(id, std::move(*message));
    });
  }
  void OnWriteDone(bool ok) override {
    outbox_.Clear();
    if (ok) {
      mailbox_->Post(
          [handler = handler_, id = id_] { handler->OnWritten(id); });
    }
  }
  void OnCancel() override { link_->Finish(absl::CancelledError("cancelled")); }
  void OnDone() override {
    link_->Detach();
    mailbox_->Post([handler = handler_, id = id_] { handler->OnGone(id); });
    delete this;
  }

 private:
  const uint64_t id_;
  const std::shared_ptr<Mailbox> mailbox_;
  BulkStreamHandler* const handler_;
  grpc::ByteBuffer inbox_;
  grpc::ByteBuffer outbox_;
  const std::shared_ptr<Link> link_;
};

class ShardService final
    : public v1::Shard::WithRawCallbackMethod_Fetch<
          v1::Shard::WithRawCallbackMethod_Push<
              v1::Shard::WithRawCallbackMethod_Replicate<v1::Shard::Service>>> {
 public:
  ShardService(std::shared_ptr<Mailbox> mailbox, BulkStreamHandler* fetch,
               BulkStreamHandler* push, BulkStreamHandler* replicate)
      : mailbox_(std::move(mailbox)),
        fetch_(fetch),
        push_(push),
        replicate_(replicate) {}

  Reactor* Fetch(grpc::CallbackServerContext* context) override {
    return new StreamReactor(NextId(), context, mailbox_, fetch_);
  }
  Reactor* Push(grpc::CallbackServerContext* context) override {
    return new StreamReactor(NextId(), context, mailbox_, push_);
  }
  Reactor* Replicate(grpc::CallbackServerContext* context) override {
    return new StreamReactor(NextId(), context, mailbox_, replicate_);
  }

 private:
  uint64_t NextId() { return next_id_.fetch_add(1, std::memory_order_relaxed); }

  const std::shared_ptr<Mailbox> mailbox_;
  BulkStreamHandler* const fetch_;
  BulkStreamHandler* const push_;
  BulkStreamHandler* const replicate_;
  std::atomic<uint64_t> next_id_{1};  // relaxed: only unique.
};

}  // namespace

std::unique_ptr<grpc::Service> MakeShardService(
    std::shared_ptr<Mailbox> mailbox, BulkStreamHandler* fetch,
    BulkStreamHandler* push, BulkStreamHandler* replicate) {
  return std::make_unique<ShardService>(std::move(mailbox), fetch, push,
                                        replicate);
}

}  // namespace ballast
