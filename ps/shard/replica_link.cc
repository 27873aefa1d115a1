// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/replica_link.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"

namespace ballast {
namespace {

constexpr uint64_t kPieceMax = 1 << 20;
constexpr absl::Duration kBackoffMin = absl::Milliseconds(20);
constexpr absl::Duration kBackoffMax = absl::Seconds(2);
// A target that owes acknowledgements and says nothing for so long is dialled
// again; whether it is dead is for the coordinator to say.
constexpr absl::Duration kSilenceMax = absl::Seconds(10);

uint64_t PieceBytes(const ShardView& view) {
  return std::max<uint64_t>(
      kPageBytes,
      std::min(kPieceMax, view.plan.copy_bytes) / kPageBytes * kPageBytes);
}

}  // namespace

ReplicaLink::ReplicaLink(const Options& options)
    : options_(options),
      source_(PieceBytes(*options.view)),
      backoff_(kBackoffMin) {}

void ReplicaLink::OnVote(uint64_t step, const std::string& vote) {
  if (step == vote_step_) {
    return;
  }
  vote_step_ = step;
  vote_ = vote;
  source_.OnVote(step, vote.size());
}

void ReplicaLink::OnOpen(uint64_t id, std::shared_ptr<BulkStream> stream) {
  if (id != stream_id_ || closed_) {
    stream->Cancel();
    return;
  }
  stream_ = std::move(stream);
}

void ReplicaLink::OnHalfClose(uint64_t) {}

void ReplicaLink::OnWritten(uint64_t id) {
  if (id == stream_id_) {
    writing_ = false;
  }
}

void ReplicaLink::OnGone(uint64_t id) {
  if (id != stream_id_) {
    return;
  }
  ++round_;
  stream_.reset();
  dialled_ = open_ = writing_ = broken_ = false;
  opening_.reset();
  base_.reset();
  source_.OnReset();
  dial_at_ = now_ + backoff_;
  backoff_ = std::min(2 * backoff_, kBackoffMax);
}

void ReplicaLink::Break(const absl::Status& why) {
  if (stream_ && !broken_) {
    broken_ = true;
    LogEvent(
        Severity::kWarn, "copies_interrupted",
        {{"server", options_.server}, {"why", std::string(why.message())}});
    stream_->Cancel();
  }
}

void ReplicaLink::Close() {
  closed_ = true;
  if (stream_) {
    stream_->Cancel();
  }
}

void ReplicaLink::OnMessage(uint64_t id, absl::StatusOr<BulkMessage> message) {
  if (id != stream_id_ || broken_ || closed_) {
    return;
  }
  if (!message.ok()) {
    Break(message.status());
    return;
  }
  heard_at_ = now_;
  const BulkHeader& header = message->header();
  if (header.kind == BulkKind::kReplicaHello) {
    if (header.incarnation != options_.incarnation) {
      Break(absl::AbortedError(absl::StrCat("incarnation ", header.incarnation,
                                            " answers at ", options_.address,
                                            "; want ", options_.incarnation)));
      return;
    }
    std::map<uint32_t, uint64_t> synced;
    for (const BulkItem& item : header.items) {
      synced[item.chunk] = item.record_version;
      if (source_.IsOrdered(item.chunk)) {
        const uint64_t bytes =
            options_.view->table->chunk(item.chunk).elem_count() *
            sizeof(float);
        for (const uint64_t step :
             options_.behind(item.chunk, item.record_version)) {
          source_.OnGradient(item.chunk, step, bytes);
        }
      }
    }
    open_ = true;
    backoff_ = kBackoffMin;
    source_.OnHello(header.credit_bytes, synced);
  } else if (header.kind == BulkKind::kReplicaAck) {
    source_.OnAck(header.sequence, header.credit_bytes);
  } else if (header.kind == BulkKind::kError) {
    const absl::Status error = message->error();
    LogEvent(Severity::kWarn, "copy_refused",
             {{"server", options_.server}, {"why", error.ToString()}});
    source_.OnRefused(header.sequence);
  } else {
    Break(absl::InvalidArgumentError("an answer of another kind"));
    return;
  }
  stream_->Read();
}

bool ReplicaLink::Pump(uint64_t id, absl::Time now) {
  now_ = now;
  if (closed_) {
    return false;
  }
  if (!dialled_) {
    if (now < dial_at_) {
      return false;
    }
    stream_id_ = id;
    dialled_ = true;
    heard_at_ = now;
    options_.dialer->Dial(options_.address, id, this);
    return true;
  }
  const bool owes = !open_ || source_.unacknowledged_bytes() > 0;
  if (!owes) {
    heard_at_ = now;
  } else if (now - heard_at_ > kSilenceMax) {
    Break(absl::DeadlineExceededError(
        absl::StrCat("it is silent for ", absl::FormatDuration(kSilenceMax))));
  }
  late_ &= source_.unacknowledged_bytes() > 0;
  while (open_ && !broken_ && !writing_ && reading_ == 0) {
    if (opening_) {
      Open(*opening_);
      if (opening_) {
        return false;
      }
    }
    const ReplicaSource::Send send = source_.Next();
    if (send.kind == ReplicaSource::Kind::kNothing) {
      return false;
    }
    Send(send);
  }
  return false;
}

void ReplicaLink::Open(uint32_t chunk) {
  std::optional<Base> base = options_.base(chunk);
  if (!base) {
    return;
  }
  opening_.reset();
  base_ = std::move(base);
  source_.OnBase(chunk, base_->version, base_->extent->bytes);
}

void ReplicaLink::Send(const ReplicaSource::Send& send) {
  switch (send.kind) {
    case ReplicaSource::Kind::kNothing:
      return;
    case ReplicaSource::Kind::kOpenBase:
      opening_ = send.chunk;
      return;
    case ReplicaSource::Kind::kPiece:
      SendPiece(send);
      return;
    case ReplicaSource::Kind::kGradient:
      SendGradient(send);
      return;
    case ReplicaSource::Kind::kMark:
      writing_ = true;
      stream_->Write(MakeBulkText(Header(BulkKind::kReplicaMark, send), vote_));
      return;
  }
}

BulkHeader ReplicaLink::Header(BulkKind kind,
                               const ReplicaSource::Send& send) const {
  BulkHeader header;
  header.kind = kind;
  header.timeline = options_.view->timeline;
  header.step = send.step;
  header.incarnation = options_.view->incarnation;
  header.placement_version = options_.view->placement_version;
  header.sequence = send.sequence;
  return header;
}

void ReplicaLink::Write(const BulkHeader& header,
                        std::shared_ptr<AlignedBuffer> payload) {
  writing_ = true;
  const std::byte* data = payload->data();
  stream_->Write(MakeBulkMessage(
      header, {{data, header.items[0].payload_bytes, std::move(payload)}}));
}

void ReplicaLink::SendPiece(const ReplicaSource::Send& send) {
  BulkHeader header = Header(BulkKind::kReplicaBase, send);
  header.record_timeline = base_->record_timeline;
  BulkItem& item = header.items.emplace_back();
  item.chunk = send.chunk;
  item.elem_begin = send.offset;
  item.elem_count = base_->extent->bytes;
  item.payload_bytes = send.bytes;
  item.record_version = base_->record_version;
  auto buffer = std::make_shared<AlignedBuffer>(send.bytes);
  ++reading_;
  options_.slab->ReadPiece(
      *base_->extent, send.offset, send.bytes, buffer->data(),
      [this, mailbox = options_.mailbox, extent = base_->extent, header, buffer,
       round = round_](const absl::Status& status) {
        mailbox->Post([this, extent, header, buffer, round, status] {
          --reading_;
          if (!status.ok()) {
            options_.fail(status);
          } else if (round == round_ && !broken_ && !closed_) {
            Write(header, buffer);
          }
        });
      });
}

void ReplicaLink::SendGradient(const ReplicaSource::Send& send) {
  BulkHeader header = Header(BulkKind::kReplicaGradient, send);
  BulkItem& item = header.items.emplace_back();
  item.chunk = send.chunk;
  item.use = kBulkAllUses;
  item.span = {0, options_.view->micro_batches};
  item.elem_count = send.bytes / sizeof(float);
  item.payload_bytes = send.bytes;
  auto buffer = std::make_shared<AlignedBuffer>((send.bytes + kPageBytes - 1) /
                                                kPageBytes * kPageBytes);
  ++reading_;
  const bool is_there = options_.gradient(
      send.chunk, send.step, buffer->data(),
      [this, header, buffer, round = round_](const absl::Status& status) {
        --reading_;
        if (!status.ok()) {
          options_.fail(status);
        } else if (round == round_ && !broken_ && !closed_) {
          Write(header, buffer);
        }
      });
  if (!is_there) {
    --reading_;
    source_.Withdraw(send.sequence);
  }
}

std::string ReplicaLink::WaitsFor() const {
  return source_.unacknowledged_bytes() == 0 && open_
             ? ""
             : absl::StrCat(options_.server, " to sync copies, ",
                            source_.unacknowledged_bytes(),
                            " bytes on their way");
}

}  // namespace ballast
