// SPDX-License-Identifier: Apache-2.0
#include "rpc/raw_stream.h"

#include <grpcpp/client_context.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/support/sync_stream.h>

#include "absl/time/clock.h"
#include "rpc/status.h"

namespace ballast {
namespace {

using ByteStream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;
// gRPC generates synchronous streams for protobuf types only. The factory that
// its generated code calls takes any type with SerializationTraits, and
// ByteBuffer has them; GenericStub would need a completion queue a direction.
using ByteStreamFactory =
    grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer,
                                              grpc::ByteBuffer>;

class SyncRawStream : public RawStream {
 public:
  SyncRawStream(const std::shared_ptr<grpc::Channel>& channel,
                const char* method, absl::Duration timeout)
      : channel_(channel),
        method_(method, grpc::internal::RpcMethod::BIDI_STREAMING, channel) {
    context_.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    stream_.reset(
        ByteStreamFactory::Create(channel_.get(), method_, &context_));
  }

  ~SyncRawStream() override {
    if (!finished_) {
      context_.TryCancel();
      Finish().IgnoreError();
    }
  }

  absl::Status Write(const grpc::ByteBuffer& message) override {
    // A failed write only says that the stream is over; the reader learns why.
    return stream_->Write(message)
               ? absl::OkStatus()
               : absl::UnavailableError("the stream is closed");
  }

  absl::StatusOr<grpc::ByteBuffer> Read() override {
    grpc::ByteBuffer message;
    if (stream_->Read(&message)) {
      return message;
    }
    // No half-close here: another thread may be inside Write.
    absl::Status status = End();
    return status.ok() ? absl::OutOfRangeError("the stream has ended") : status;
  }

  absl::Status Finish() override {
    if (!finished_) {
      stream_->WritesDone();
    }
    return End();
  }

  void Cancel() override { context_.TryCancel(); }

 private:
  absl::Status End() {
    if (!finished_) {
      finished_ = true;
      final_ = FromGrpcStatus(stream_->Finish());
    }
    return final_;
  }

  const std::shared_ptr<grpc::Channel> channel_;  // Outlives the call.
  const grpc::internal::RpcMethod method_;
  grpc::ClientContext context_;
  std::unique_ptr<ByteStream> stream_;
  bool finished_ = false;
  absl::Status final_;
};

}  // namespace

std::unique_ptr<RawStream> RawStream::Open(
    const std::shared_ptr<grpc::Channel>& channel, const char* method,
    absl::Duration timeout) {
  return std::make_unique<SyncRawStream>(channel, method, timeout);
}

}  // namespace ballast
