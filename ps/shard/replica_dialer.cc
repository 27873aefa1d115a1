// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/replica_dialer.h"

#include <grpcpp/client_context.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/support/client_callback.h>

#include <utility>

#include "common/mutex.h"
#include "rpc/endpoint.h"

namespace ballast {
namespace {

constexpr char kReplicateMethod[] = "/ballast.v1.Shard/Replicate";

using Reactor = grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;
// As in rpc/raw_stream.cc: what gRPC's generated code calls takes raw bytes.
using Factory =
    grpc::internal::ClientCallbackReaderWriterFactory<grpc::ByteBuffer,
                                                      grpc::ByteBuffer>;

// The call and the engine's end of it. shared: gRPC lets go in OnDone, the
// engine when it hears of that. A hold keeps gRPC from finishing while
// operations may still be started from outside its callbacks.
class Call final : public Reactor,
                   public BulkStream,
                   public std::enable_shared_from_this<Call> {
 public:
  Call(const std::string& address, uint64_t id,
       std::shared_ptr<Mailbox> mailbox, BulkStreamHandler* handler)
      : channel_(MakeChannel(address)),
        method_(kReplicateMethod, grpc::internal::RpcMethod::BIDI_STREAMING,
                channel_),
        id_(id),
        mailbox_(std::move(mailbox)),
        handler_(handler) {}

  void Start() {
    self_ = shared_from_this();
    mailbox_->Post([handler = handler_, id = id_, self = self_] {
      handler->OnOpen(id, self);
    });
    Factory::Create(channel_.get(), method_, &context_, this);
    AddHold();
    StartCall();
    Read();
  }

  void Read() override {
    MutexLock lock(&mutex_);
    if (open_ && !reading_) {
      reading_ = true;
      StartRead(&inbox_);
    }
  }
  void Write(const grpc::ByteBuffer& message) override {
    MutexLock lock(&mutex_);
    if (open_) {
      outbox_ = message;
      StartWrite(&outbox_);
    }
  }
  void Finish(const absl::Status&) override {
    MutexLock lock(&mutex_);
    if (open_) {
      StartWritesDone();
    }
  }
  void Cancel() override {
    MutexLock lock(&mutex_);
    if (!done_) {
      context_.TryCancel();
    }
    Close();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      MutexLock lock(&mutex_);
      Close();
      return;
    }
    // shared: a task must be copyable.
    auto message = std::make_shared<absl::StatusOr<BulkMessage>>(
        BulkMessage::Parse(inbox_));
    inbox_.Clear();
    {
      MutexLock lock(&mutex_);
      reading_ = false;
    }
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
  void OnDone(const grpc::Status&) override {
    {
      MutexLock lock(&mutex_);
      done_ = true;
      open_ = false;
    }
    mailbox_->Post([handler = handler_, id = id_] { handler->OnGone(id); });
    self_.reset();  // Last: it may be the last one.
  }

 private:
  void Close() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (open_) {
      open_ = false;
      RemoveHold();
    }
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const grpc::internal::RpcMethod method_;
  grpc::ClientContext context_;
  const uint64_t id_;
  const std::shared_ptr<Mailbox> mailbox_;
  BulkStreamHandler* const handler_;
  std::shared_ptr<Call> self_;  // Until OnDone.
  grpc::ByteBuffer inbox_;
  grpc::ByteBuffer outbox_;
  Mutex mutex_;
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

class GrpcDialer final : public ReplicaDialer {
 public:
  explicit GrpcDialer(std::shared_ptr<Mailbox> mailbox)
      : mailbox_(std::move(mailbox)) {}
  void Dial(const std::string& address, uint64_t id,
            BulkStreamHandler* handler) override {
    std::make_shared<Call>(address, id, mailbox_, handler)->Start();
  }

 private:
  const std::shared_ptr<Mailbox> mailbox_;
};

}  // namespace

std::unique_ptr<ReplicaDialer> MakeReplicaDialer(
    std::shared_ptr<Mailbox> mailbox) {
  return std::make_unique<GrpcDialer>(std::move(mailbox));
}

}  // namespace ballast
