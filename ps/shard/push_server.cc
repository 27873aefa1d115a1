// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/push_server.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/crash_point.h"
#include "common/rule.h"
#include "kernels/update.h"

namespace ballast {
namespace {

// A worker may hear of a step before this server does; longer than this means
// that the server never will.
constexpr absl::Duration kEarlyMax = absl::Seconds(30);
constexpr size_t kRepliesMax = 4096;
// Far above the workers of a run: those of lives that nobody has closed yet.
constexpr size_t kStreamsMax = 1024;

// Slices end anywhere, within a float too, so a sum goes through a buffer that
// stays in the first-level cache.
constexpr size_t kStagingElems = 4096;

class MessageSource final : public GradientSource {
 public:
  MessageSource(const BulkMessage& message, size_t item)
      : message_(message), item_(item) {}

  void CopyTo(absl::Span<float> out) const override {
    message_.CopyPayload(item_, reinterpret_cast<std::byte*>(out.data()));
  }
  void AddTo(absl::Span<float> total) const override {
    float staging[kStagingElems];
    auto* bytes = reinterpret_cast<std::byte*>(staging);
    size_t filled = 0;  // Bytes of staging.
    size_t done = 0;    // Elements of total.
    const auto flush = [&] {
      const size_t elems = filled / sizeof(float);
      AccumulateCpu({staging, elems}, total.subspan(done, elems));
      done += elems;
      filled = 0;
    };
    message_.VisitPayload(item_, [&](uint64_t, const std::byte* data,
                                     uint64_t size) {
      while (size > 0) {
        const auto take = std::min<uint64_t>(size, sizeof(staging) - filled);
        std::memcpy(bytes + filled, data, take);
        filled += take;
        data += take;
        size -= take;
        if (filled == sizeof(staging)) {
          flush();
        }
      }
    });
    flush();
  }

 private:
  const BulkMessage& message_;
  const size_t item_;
};

}  // namespace

void PushServer::OnOpen(uint64_t id, std::shared_ptr<BulkStream> stream) {
  if (streams_.size() >= kStreamsMax) {
    stream->Finish(absl::UnavailableError(absl::StrCat(
        "this server has ", kStreamsMax, " streams of gradients already")));
    return;
  }
  streams_[id].link = std::move(stream);
}

// More workers than were planned for get less each; what is beyond that waits
// for its credit until another stream ends.
void PushServer::Grant(Stream* stream) {
  const uint64_t all = view_->plan.credit_bytes * view_->workers_planned;
  const uint64_t sharers =
      std::max<uint64_t>(view_->workers_planned, view_->workers.size());
  const uint64_t credit = std::max(all / sharers, largest_);
  if (granted_ + credit > all) {
    return;
  }
  granted_ += credit;
  stream->credit = credit;
  BulkHeader hello;
  hello.kind = BulkKind::kHello;
  hello.timeline = view_->timeline;
  hello.incarnation = view_->incarnation;
  hello.placement_version = view_->placement_version;
  hello.credit_bytes = credit;
  stream->replies.push_back(MakeBulkMessage(hello));
}

void PushServer::OnMessage(uint64_t id, absl::StatusOr<BulkMessage> message) {
  const auto found = streams_.find(id);
  if (found == streams_.end() || found->second.finished) {
    return;
  }
  Stream& stream = found->second;
  if (!message.ok()) {
    stream.replies.push_back(MakeBulkError(0, message.status()));
  } else {
    const BulkHeader& header = message->header();
    const uint64_t payload = header.payload_bytes();
    if (header.kind != BulkKind::kPush || payload == 0) {
      stream.replies.push_back(MakeBulkError(
          header.sequence,
          absl::InvalidArgumentError("a Push stream takes gradients only")));
    } else if (stream.held + payload > stream.credit ||
               stream.held_items + header.items.size() > kBulkItemsMax) {
      stream.replies.push_back(MakeBulkError(
          header.sequence,
          absl::ResourceExhaustedError(absl::StrCat(
              "push of ", payload, " bytes in ", header.items.size(),
              " items with ", stream.held, " bytes in ", stream.held_items,
              " items waiting; the credit is ", stream.credit, " bytes and ",
              kBulkItemsMax,
              " items"
              ", wait for the hello and for acknowledgements"))));
    } else {
      stream.held += payload;
      stream.held_items += header.items.size();
      stream.messages.push_back(*std::move(message));
    }
  }
  if (stream.replies.size() < kRepliesMax) {
    stream.link->Read();
  } else {  // A peer that never reads its acknowledgements.
    stream.finished = true;
    stream.link->Finish(absl::ResourceExhaustedError("too many replies"));
  }
}

void PushServer::OnHalfClose(uint64_t id) {
  if (const auto found = streams_.find(id); found != streams_.end()) {
    found->second.half_closed = true;
  }
}

void PushServer::OnWritten(uint64_t id) {
  if (const auto found = streams_.find(id); found != streams_.end()) {
    found->second.writing = false;
  }
}

void PushServer::OnGone(uint64_t id) {
  if (const auto found = streams_.find(id); found != streams_.end()) {
    granted_ -= found->second.credit;
    streams_.erase(found);
  }
}

void PushServer::set_positions(std::vector<int64_t> positions) {
  positions_ = std::move(positions);
  largest_ = 0;
  for (const Chunk& chunk : view_->table->chunks()) {
    if (positions_[chunk.id] >= 0) {
      largest_ = std::max(largest_, chunk.elem_count() * sizeof(float));
    }
  }
}

void PushServer::Reset(const absl::Status& why) {
  for (auto& [id, stream] : streams_) {
    stream.messages.clear();
    stream.replies.clear();
    stream.next_item = 0;
    if (!stream.finished) {
      stream.finished = true;
      stream.writing ? stream.link->Cancel() : stream.link->Finish(why);
    }
  }
}

void PushServer::Pump(StepGradients* gradients, absl::Time now) {
  if (!view_->loaded) {
    return;
  }
  for (auto& [id, stream] : streams_) {
    PumpStream(&stream, gradients, now);
  }
}

void PushServer::PumpStream(Stream* stream, StepGradients* gradients,
                            absl::Time now) {
  if (stream->finished) {
    return;
  }
  if (stream->credit == 0) {
    Grant(stream);
  }
  while (!stream->messages.empty() && Process(stream, gradients, now)) {
    const BulkHeader& done = stream->messages.front().header();
    stream->held -= done.payload_bytes();
    stream->held_items -= done.items.size();
    stream->messages.pop_front();
    stream->next_item = 0;
    stream->checked = false;
    stream->early_since.reset();
  }
  if (!stream->writing && !stream->replies.empty()) {
    stream->writing = true;
    stream->link->Write(stream->replies.front());
    stream->replies.pop_front();
  } else if (!stream->writing && stream->half_closed &&
             stream->messages.empty()) {
    stream->finished = true;
    stream->link->Finish(absl::OkStatus());
  }
}

PushServer::Verdict PushServer::Judge(const BulkHeader& header,
                                      absl::Status* why) const {
  if (header.timeline > view_->timeline ||
      header.placement_version > view_->placement_version) {
    return Verdict::kEarly;
  }
  if (BALLAST_RULE(kOldTimelineRefused) && header.timeline < view_->timeline) {
    *why = absl::AbortedError(absl::StrCat("gradient of timeline ",
                                           header.timeline, "; this is ",
                                           view_->timeline));
    return Verdict::kRefuse;
  }
  if (header.placement_version < view_->placement_version) {
    *why = absl::AbortedError(absl::StrCat(
        "push by placement ", header.placement_version, "; this is ",
        view_->placement_version, ", ask the coordinator for it"));
    return Verdict::kRefuse;
  }
  if (header.step <= view_->decided_step) {
    return Verdict::kKnown;  // Repeated after its step was decided.
  }
  if (BALLAST_RULE(kOldIncarnationRefused) &&
      !view_->workers.contains(header.incarnation)) {
    if (view_->workers.empty() ||
        header.incarnation > *view_->workers.rbegin()) {
      return Verdict::kEarly;
    }
    *why = absl::AbortedError(absl::StrCat("incarnation ", header.incarnation,
                                           " is not admitted; join again"));
    return Verdict::kRefuse;
  }
  if (header.step < view_->collecting_step) {
    return Verdict::kKnown;
  }
  return header.step > view_->collecting_step ? Verdict::kEarly
                                              : Verdict::kTake;
}

absl::Status PushServer::CheckItem(const BulkItem& item) const {
  if (item.chunk >= positions_.size() || positions_[item.chunk] < 0) {
    return absl::NotFoundError(
        absl::StrCat("chunk ", item.chunk, " is not on this server"));
  }
  const TensorSpec& tensor = view_->table->tensor_of(item.chunk);
  const uint64_t elems = view_->table->chunk(item.chunk).elem_count();
  if (item.dtype != DType::kF32 || item.elem_begin != 0 ||
      item.elem_count != elems || item.payload_bytes != elems * 4) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gradient of ", tensor.name, ", chunk ", item.chunk, ": ",
        item.elem_count, " elements from ", item.elem_begin, " in ",
        item.payload_bytes, " bytes of ", DTypeName(item.dtype), "; want ",
        elems, " elements in ", elems * 4, " bytes of fp32"));
  }
  if (item.use >= tensor.use_count ||
      !IsNode(item.span, view_->micro_batches)) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient of ", tensor.name, ": use ", item.use, " of ",
                     tensor.use_count, ", micro-batches [", item.span.first,
                     ", +", item.span.count, ") of ", view_->micro_batches,
                     " is not a node of the span tree"));
  }
  return absl::OkStatus();
}

bool PushServer::Process(Stream* stream, StepGradients* gradients,
                         absl::Time now) {
  const BulkMessage& message = stream->messages.front();
  absl::Status why;
  Verdict verdict = Judge(message.header(), &why);
  if (verdict == Verdict::kTake && gradients == nullptr) {
    verdict = Verdict::kEarly;
  }
  if (verdict == Verdict::kEarly) {
    if (!stream->early_since) {
      stream->early_since = now;
    }
    if (now - *stream->early_since < kEarlyMax) {
      return false;
    }
    why = absl::AbortedError(absl::StrCat(
        "the coordinator has not announced incarnation ",
        message.header().incarnation, ", timeline ", message.header().timeline,
        " or step ", message.header().step, "; this server collects step ",
        view_->collecting_step));
    verdict = Verdict::kRefuse;
  }
  if (verdict == Verdict::kRefuse) {
    Refuse(stream, why);
    return true;
  }
  if (verdict == Verdict::kKnown) {
    Acknowledge(stream, /*with_names=*/true);
    return true;
  }
  if (!stream->checked) {
    // All before any: a message is refused whole.
    for (const BulkItem& item : message.header().items) {
      if (const absl::Status status = CheckItem(item); !status.ok()) {
        Refuse(stream, status);
        return true;
      }
    }
    stream->checked = true;
  }
  if (stream->next_item == 0) {
    BALLAST_CRASH_POINT("server.push.before_take");
  }
  if (!TakeItems(stream, gradients)) {
    return false;
  }
  BALLAST_CRASH_POINT("server.push.before_ack");
  Acknowledge(stream, /*with_names=*/true);
  return true;
}

bool PushServer::TakeItems(Stream* stream, StepGradients* gradients) {
  const BulkMessage& message = stream->messages.front();
  const std::vector<BulkItem>& items = message.header().items;
  for (; stream->next_item < items.size(); ++stream->next_item) {
    const BulkItem& item = items[stream->next_item];
    const auto taken = gradients->Offer(
        static_cast<size_t>(positions_[item.chunk]), {item.use, item.span},
        item.has_loss ? std::optional(item.loss) : std::nullopt,
        MessageSource(message, stream->next_item));
    if (taken == StepGradients::Taken::kNoRoom) {
      return false;
    }
    taken_bytes_ += item.payload_bytes;
  }
  return true;
}

void PushServer::Refuse(Stream* stream, const absl::Status& why) {
  stream->replies.push_back(
      MakeBulkError(stream->messages.front().header().sequence, why));
  Acknowledge(stream, /*with_names=*/false);  // The credit comes back.
}

void PushServer::Acknowledge(Stream* stream, bool with_names) {
  const BulkHeader& pushed = stream->messages.front().header();
  BulkHeader ack;
  ack.kind = BulkKind::kPushAck;
  ack.timeline = pushed.timeline;
  ack.step = pushed.step;
  ack.incarnation = view_->incarnation;
  ack.placement_version = view_->placement_version;
  ack.sequence = pushed.sequence;
  ack.credit_bytes = pushed.payload_bytes();
  if (with_names) {
    ack.items = pushed.items;
    for (BulkItem& item : ack.items) {
      item.payload_bytes = 0;
    }
  }
  stream->replies.push_back(MakeBulkMessage(ack));
}

}  // namespace ballast
