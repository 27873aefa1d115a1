// SPDX-License-Identifier: Apache-2.0
#include "worker/client/push_link.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rule.h"
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

PushLink::PushLink(const ServerAddress& server, PassState* state)
    : server_(server),
      state_(*state),
      link_(server.name, server.address, kPushMethod, state, this) {}

void PushLink::Open(const PassIdentity& identity, size_t targets) {
  {
    MutexLock lock(&state_.mutex);
    identity_ = identity;
    greeted_ = false;
    credit_ = 0;
    open_.assign(targets, 0);
  }
  link_.Open();
}

void PushLink::Push(size_t target, const BulkItem& item,
                    std::shared_ptr<const StagedGradient> gradient) {
  MutexLock lock(&state_.mutex);
  queue_.push_back({target, item, std::move(gradient)});
  ++open_[target];
  link_.AssertHeld();
  link_.Wake();
}

const BulkItem* PushLink::Oldest() const {
  if (!unacknowledged_.empty()) {
    return &unacknowledged_.begin()->second.front().item;
  }
  return queue_.empty() ? nullptr : &queue_.front().item;
}

void PushLink::Break() {
  link_.Break();
  // These end after the lock is given back.
  std::deque<Piece> queue;
  std::map<uint64_t, std::vector<Piece>> unacknowledged;
  MutexLock lock(&state_.mutex);
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

std::optional<grpc::ByteBuffer> PushLink::NextMessage() {
  AssertHeld();
  std::vector<Piece> pieces = greeted_ ? NextPieces() : std::vector<Piece>();
  if (pieces.empty()) {
    return std::nullopt;
  }
  BulkHeader header;
  header.kind = BulkKind::kPush;
  header.timeline = identity_.timeline;
  header.step = identity_.step;
  header.incarnation = identity_.incarnation;
  header.placement_version = identity_.placement_version;
  header.sequence = next_sequence_++;
  std::vector<BulkPayload> payloads;
  for (const Piece& piece : pieces) {
    header.items.push_back(piece.item);
    payloads.push_back(
        {piece.gradient->data(), piece.item.payload_bytes, piece.gradient});
  }
  pushed_bytes_ += header.payload_bytes();
  unacknowledged_.emplace(header.sequence, std::move(pieces));
  return MakeBulkMessage(header, std::move(payloads));
}

bool PushLink::AwaitsMessage() const {
  AssertHeld();
  // The hello comes first, whether or not there is anything to push.
  return !greeted_ || !Idle();
}

absl::Status PushLink::Take(const BulkMessage& message) {
  const BulkHeader& header = message.header();
  switch (header.kind) {
    case BulkKind::kError:
      return message.error();
    case BulkKind::kHello: {
      MutexLock lock(&state_.mutex);
      greeted_ = true;
      credit_ += header.credit_bytes;
      link_.AssertHeld();
      link_.Wake();
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
  link_.AssertHeld();
  link_.Wake();
  state_.changed.NotifyAll();
  const auto found = unacknowledged_.find(header.sequence);
  if (found == unacknowledged_.end()) {
    return absl::InternalError(absl::StrCat("an acknowledgement of message ",
                                            header.sequence,
                                            " that was not sent"));
  }
  // An earlier life's answer says nothing about what this one has.
  if (BALLAST_RULE(kAckNamesServerLife) &&
      header.incarnation != server_.incarnation) {
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
  for (const Piece& piece : done) {
    --open_[piece.target];
  }
  return absl::OkStatus();
}

}  // namespace ballast
