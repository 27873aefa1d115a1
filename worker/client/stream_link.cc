// SPDX-License-Identifier: Apache-2.0
#include "worker/client/stream_link.h"

#include <utility>

#include "absl/time/time.h"
#include "rpc/endpoint.h"

namespace ballast {
namespace {

// Each wait in a pass is bounded; this only keeps a stream that was forgotten
// from living for ever.
constexpr absl::Duration kStreamMax = absl::Hours(6);

}  // namespace

StreamLink::StreamLink(const std::string& server, const std::string& address,
                       const char* method, PassState* state, StreamUser* user)
    : server_(server),
      address_(address),
      // A connection of its own: a gradient must not wait behind weights.
      channel_(MakeChannel(address)),
      method_(method),
      state_(*state),
      user_(*user),
      writer_([this] { RunWriter(); }),
      reader_([this] { RunReader(); }) {}

StreamLink::~StreamLink() {
  Break();
  {
    MutexLock lock(&state_.mutex);
    stopping_ = true;
    work_.NotifyAll();
  }
  writer_.join();
  reader_.join();
}

void StreamLink::Open() {
  // A channel that could not connect fails what follows without trying.
  if (channel_->GetState(/*try_to_connect=*/false) ==
      GRPC_CHANNEL_TRANSIENT_FAILURE) {
    channel_ = MakeChannel(address_);
  }
  std::shared_ptr<RawStream> stream =
      RawStream::Open(channel_, method_, kStreamMax);
  MutexLock lock(&state_.mutex);
  stream_ = std::move(stream);
  broken_ = false;
  work_.NotifyAll();
}

void StreamLink::Break() {
  std::shared_ptr<RawStream> stream;  // Ends after the lock is given back.
  {
    MutexLock lock(&state_.mutex);
    broken_ = true;
    stream = stream_;
  }
  if (stream != nullptr) {
    stream->Cancel();
  }
  MutexLock lock(&state_.mutex);
  while (reading_ || writing_) {
    state_.changed.Wait(&state_.mutex);
  }
  stream_ = nullptr;
}

void StreamLink::RunWriter() {
  while (true) {
    std::shared_ptr<RawStream> stream;
    std::optional<grpc::ByteBuffer> message;
    {
      MutexLock lock(&state_.mutex);
      writing_ = false;
      state_.changed.NotifyAll();
      while (!stopping_) {
        if (stream_ != nullptr && !broken_) {
          message = user_.NextMessage();
          if (message.has_value()) {
            break;
          }
        }
        work_.Wait(&state_.mutex);
      }
      if (stopping_) {
        return;
      }
      writing_ = true;
      stream = stream_;
    }
    // When this fails the reader learns why, and everyone through the state.
    stream->Write(*message).IgnoreError();
  }
}

void StreamLink::RunReader() {
  while (true) {
    std::shared_ptr<RawStream> stream;
    {
      MutexLock lock(&state_.mutex);
      reading_ = false;
      state_.changed.NotifyAll();
      while (!stopping_ &&
             (stream_ == nullptr || broken_ || !user_.AwaitsMessage())) {
        work_.Wait(&state_.mutex);
      }
      if (stopping_) {
        return;
      }
      reading_ = true;
      stream = stream_;
    }
    auto buffer = stream->Read();
    absl::Status status = buffer.status();
    if (buffer.ok()) {
      const auto message = BulkMessage::Parse(*buffer);
      status = message.ok() ? user_.Take(*message) : message.status();
    } else if (absl::IsOutOfRange(status)) {
      status = absl::UnavailableError("the server ended the stream");
    }
    if (!status.ok()) {
      MutexLock lock(&state_.mutex);
      broken_ = true;
      state_.Fail(server_, status);
    }
  }
}

}  // namespace ballast
