// SPDX-License-Identifier: Apache-2.0
#include "worker/client/push_link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "rpc/bulk_message.h"

namespace ballast {
namespace {

// Small gradients share a message up to this; below it the cost of a message
// shows, above it nothing is gained.
constexpr uint64_t kMessageBytes = 4 << 20;

}  // namespace

StagedGradient::~StagedGradient() {
  buffer_.reset();
  MutexLock lock(&state_->mutex);
  state_->changed.NotifyAll();
}

PushLink::PushLink(const ServerAddress& server,
                   const std::shared_ptr<grpc::Channel>& channel,
                   PassState* state)
    : server_(server),
      channel_(channel),
      state_(*state),
      writer_([this] { RunWriter(); }),
      reader_([this] { RunReader(); }) {}

PushLink::~PushLink() {
  Break();
  {
    MutexLock lock(&state_.mutex);
    stopping_ = true;
    writer_work_.NotifyAll();
    reader_work_.NotifyAll();
  }
  writer_.join();
  reader_.join();
}

void PushLink::Open(const PassIdentity& identity, absl::Duration timeout) {
  std::shared_ptr<RawStream> stream =
      RawStream::Open(channel_, kPushMethod, timeout);
  MutexLock lock(&state_.mutex);
  identity_ = identity;
  stream_ = std::move(stream);
  greeted_ = false;
  broken_ = false;
  credit_ = 0;
  reader_work_.NotifyAll();
}

void PushLink::Push(const BulkItem& item,
                    std::shared_ptr<const StagedGradient> gradient) {
  MutexLock lock(&state_.mutex);
  queue_.push_back({item, std::move(gradient)});
  writer_work_.NotifyAll();
  reader_work_.NotifyAll();
}

bool PushLink::Idle() const {
  return greeted_ && !writing_ && queue_.empty() && unacknowledged_.empty();
}

int64_t PushLink::OldestChunk() const {
  if (!unacknowledged_.empty()) {
    return unacknowledged_.begin()->second.front().item.chunk;
  }
  return queue_.empty() ? -1 : int64_t{queue_.front().item.chunk};
}

absl::Status PushLink::Close() {
  std::shared_ptr<RawStream> stream;
  {
    MutexLock lock(&state_.mutex);
    while (reading_ || writing_) {
      state_.changed.Wait(&state_.mutex);
    }
    stream = stream_;
  }
  if (stream == nullptr) {
    return absl::OkStatus();
  }
  // It stays in reach of Cancel meanwhile: the server may never answer.
  absl::Status status = stream->Finish();
  MutexLock lock(&state_.mutex);
  stream_ = nullptr;
  return status;
}

void PushLink::Break() {
  // These end after the lock is given back.
  std::shared_ptr<RawStream> stream;
  std::deque<Piece> queue;
  std::map<uint64_t, std::vector<Piece>> unacknowledged;
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
  queue.swap(queue_);
  unacknowledged.swap(unacknowledged_);
}

std::vector<PushLink::Piece> PushLink::NextPieces() {
  std::vector<Piece> pieces;
  uint64_t bytes = 0;
  while (!queue_.empty()) {
    const uint64_t more = queue_.front().item.payload_bytes;
    if (bytes + more > credit_ ||
        (!pieces.empty() &&
         (bytes + more > kMessageBytes || pieces.size() == kBulkItemsMax))) {
      break;
    }
    bytes += more;
    pieces.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  credit_ -= bytes;
  return pieces;
}

void PushLink::RunWriter() {
  while (true) {
    std::shared_ptr<RawStream> stream;
    BulkHeader header;
    std::vector<BulkPayload> payloads;
    {
      MutexLock lock(&state_.mutex);
      writing_ = false;
      state_.changed.NotifyAll();
      std::vector<Piece> pieces;
      while (!stopping_) {
        if (stream_ != nullptr && greeted_ && !broken_) {
          pieces = NextPieces();
          if (!pieces.empty()) {
            break;
          }
        }
        writer_work_.Wait(&state_.mutex);
      }
      if (stopping_) {
        return;
      }
      writing_ = true;
      stream = stream_;
      header.kind = BulkKind::kPush;
      header.timeline = identity_.timeline;
      header.step = identity_.step;
      header.incarnation = identity_.incarnation;
      header.placement_version = identity_.placement_version;
      header.sequence = next_sequence_++;
      for (const Piece& piece : pieces) {
        header.items.push_back(piece.item);
        payloads.push_back(
            {piece.gradient->data(), piece.item.payload_bytes, piece.gradient});
      }
      pushed_bytes_ += header.payload_bytes();
      unacknowledged_.emplace(header.sequence, std::move(pieces));
    }
    // When this fails the reader learns why, and everyone through the state.
    stream->Write(MakeBulkMessage(header, std::move(payloads))).IgnoreError();
  }
}

void PushLink::RunReader() {
  while (true) {
    std::shared_ptr<RawStream> stream;
    {
      MutexLock lock(&state_.mutex);
      reading_ = false;
      state_.changed.NotifyAll();
      // The hello must be read even when nothing is pushed: a stream does not
      // end before its messages are read.
      while (!stopping_ &&
             (stream_ == nullptr || broken_ ||
              (greeted_ && unacknowledged_.empty() && queue_.empty()))) {
        reader_work_.Wait(&state_.mutex);
      }
      if (stopping_) {
        return;
      }
      reading_ = true;
      stream = stream_;
    }
    auto buffer = stream->Read();
    const absl::Status status = buffer.ok() ? Take(*buffer) : buffer.status();
    if (!status.ok()) {
      MutexLock lock(&state_.mutex);
      broken_ = true;
      state_.Fail(server_.name, status);
    }
  }
}

absl::Status PushLink::Take(const grpc::ByteBuffer& buffer) {
  BALLAST_ASSIGN_OR_RETURN(const BulkMessage message,
                           BulkMessage::Parse(buffer));
  const BulkHeader& header = message.header();
  switch (header.kind) {
    case BulkKind::kError:
      return message.error();
    case BulkKind::kHello: {
      MutexLock lock(&state_.mutex);
      greeted_ = true;
      credit_ += header.credit_bytes;
      writer_work_.NotifyAll();
      return absl::OkStatus();
    }
    case BulkKind::kPushAck:
      return Acknowledge(header);
    default:
      return absl::InternalError(absl::StrCat("a message of kind ",
                                              static_cast<int>(header.kind),
                                              " on a Push stream"));
  }
}

absl::Status PushLink::Acknowledge(const BulkHeader& header) {
  std::vector<Piece> done;  // Given back after the lock.
  MutexLock lock(&state_.mutex);
  credit_ += header.credit_bytes;
  ++progress_;
  writer_work_.NotifyAll();
  state_.changed.NotifyAll();
  const auto found = unacknowledged_.find(header.sequence);
  if (found == unacknowledged_.end()) {
    return absl::InternalError(absl::StrCat("an acknowledgement of message ",
                                            header.sequence,
                                            " that was not sent"));
  }
  if (!server_.IsLife(header.incarnation)) {
    return absl::AbortedError(
        absl::StrCat("an acknowledgement of incarnation ", header.incarnation,
                     "; the gradients went to ", server_.incarnation));
  }
  if (header.items.size() != found->second.size()) {
    return absl::AbortedError(
        absl::StrCat("took ", header.items.size(), " of ", found->second.size(),
                     " gradients of message ", header.sequence));
  }
  done = std::move(found->second);
  unacknowledged_.erase(found);
  return absl::OkStatus();
}

}  // namespace ballast
