// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/replica_target.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/crash_point.h"
#include "storage/file.h"

namespace ballast {
namespace {

// The coordinator tells a source and its target at about the same time; longer
// than this means that it has changed its mind.
constexpr absl::Duration kEarlyMax = absl::Seconds(1);
constexpr size_t kRepliesMax = 4096;

}  // namespace

void ReplicaTarget::Start(Parts parts) {
  parts_ = std::move(parts);
  version_ = 0;
  history_ = std::numeric_limits<uint64_t>::max();  // Until Pump says.
}

void ReplicaTarget::Reset(const absl::Status& why) {
  ++round_;
  for (auto& [id, stream] : streams_) {
    stream.messages.clear();
    stream.replies.clear();
    stream.acks.clear();
    stream.assemblies.clear();
    if (!stream.finished) {
      stream.finished = true;
      stream.writing ? stream.link->Cancel() : stream.link->Finish(why);
    }
  }
  ordered_.clear();
  copies_.clear();
  to_commit_.clear();
  to_drop_.clear();
  unsynced_.clear();
  committing_.clear();
  syncing_ = false;
  parts_.reset();
}

std::function<void(absl::Status)> ReplicaTarget::Later(
    std::function<void(const absl::Status&)> then) {
  ++*in_flight_;
  return
      [this, in_flight = in_flight_, round = round_, mailbox = parts_->mailbox,
       then = std::move(then)](const absl::Status& status) {
        mailbox->Post([this, in_flight, round, then, status] {
          --*in_flight;
          if (round == round_) {
            then(status);
          }
        });
      };
}

void ReplicaTarget::Order(const std::map<uint32_t, Source>& sources) {
  ordered_ = sources;
  for (auto& [chunk, copy] : copies_) {
    if (const auto found = sources.find(chunk); found != sources.end()) {
      copy.source = found->second;
    }
  }
}

void ReplicaTarget::OnOpen(uint64_t id, std::shared_ptr<BulkStream> stream) {
  streams_[id].id = id;
  streams_[id].link = std::move(stream);
}

void ReplicaTarget::OnHalfClose(uint64_t id) {
  if (const auto found = streams_.find(id); found != streams_.end()) {
    found->second.half_closed = true;
  }
}

void ReplicaTarget::OnWritten(uint64_t id) {
  if (const auto found = streams_.find(id); found != streams_.end()) {
    found->second.writing = false;
  }
}

void ReplicaTarget::OnGone(uint64_t id) { streams_.erase(id); }

void ReplicaTarget::OnMessage(uint64_t id,
                              absl::StatusOr<BulkMessage> message) {
  const auto found = streams_.find(id);
  if (found == streams_.end() || found->second.finished) {
    return;
  }
  Stream& stream = found->second;
  absl::Status status = message.status();
  if (status.ok()) {
    const BulkHeader& header = message->header();
    const bool is_ours = header.kind == BulkKind::kReplicaBase ||
                         header.kind == BulkKind::kReplicaGradient ||
                         header.kind == BulkKind::kReplicaMark;
    const uint64_t payload = header.kind == BulkKind::kReplicaMark
                                 ? message->text().size()
                                 : header.payload_bytes();
    if (!is_ours || header.sequence <= stream.last) {
      status = absl::InvalidArgumentError(absl::StrCat(
          "a Replicate stream takes copies in the order of their sequence; ",
          header.sequence, " came behind ", stream.last));
    } else if (!stream.greeted || stream.acks.size() >= kRepliesMax ||
               stream.held + payload > view_->plan.copy_bytes) {
      status = absl::ResourceExhaustedError(absl::StrCat(
          "a message of ", payload, " bytes with ", stream.held, " bytes in ",
          stream.acks.size(), " messages unacknowledged; the credit is ",
          view_->plan.copy_bytes, " bytes and ", kRepliesMax,
          " messages, wait for the hello and for acknowledgements"));
    } else {
      stream.held += payload;
      stream.last = header.sequence;
      stream.acks.push_back({header.sequence, payload, false});
      stream.messages.push_back(*std::move(message));
    }
  }
  if (!status.ok() || stream.replies.size() > kRepliesMax) {
    stream.finished = true;
    stream.link->Finish(status.ok()
                            ? absl::ResourceExhaustedError("too many replies")
                            : status);
    return;
  }
  stream.link->Read();
}

// Streams beyond the sources that were planned for wait for their credit until
// another stream ends.
void ReplicaTarget::Greet(Stream* stream) {
  const auto greeted =
      std::count_if(streams_.begin(), streams_.end(),
                    [](const auto& entry) { return entry.second.greeted; });
  if (static_cast<uint64_t>(greeted) >= view_->plan.copy_sources) {
    return;
  }
  stream->greeted = true;
  BulkHeader hello;
  hello.kind = BulkKind::kReplicaHello;
  hello.timeline = view_->timeline;
  hello.incarnation = view_->incarnation;
  hello.placement_version = view_->placement_version;
  hello.credit_bytes = view_->plan.copy_bytes;
  for (auto& [chunk, copy] : copies_) {
    if (!copy.has_base || hello.items.size() == kBulkItemsMax) {
      continue;
    }
    BulkItem item;
    item.chunk = chunk;
    item.record_version = copy.through;
    hello.items.push_back(item);
  }
  stream->replies.push_back(MakeBulkMessage(hello));
}

void ReplicaTarget::Pump(uint64_t version, uint64_t history, absl::Time now) {
  if (!view_->loaded || !parts_) {
    return;
  }
  version_ = version;
  history_ = history;
  for (auto& [id, stream] : streams_) {
    PumpStream(&stream, now);
  }
  // A decision that makes a copy ours is of a step that it is synced through.
  std::vector<uint32_t> useless;
  for (const auto& [chunk, copy] : copies_) {
    if (!ordered_.contains(chunk) && copy.through <= version_) {
      useless.push_back(chunk);
    }
  }
  for (const uint32_t chunk : useless) {
    LetGo(chunk);
  }
  DropBases();
  CommitBases();
  Sync();
}

void ReplicaTarget::PumpStream(Stream* stream, absl::Time now) {
  if (stream->finished) {
    return;
  }
  if (!stream->greeted) {
    Greet(stream);
  }
  while (!stream->messages.empty() && Process(stream, now)) {
    stream->messages.pop_front();
    stream->early_since.reset();
  }
  CheckAssemblies(stream);
  BulkHeader ack;
  ack.kind = BulkKind::kReplicaAck;
  ack.timeline = view_->timeline;
  ack.incarnation = view_->incarnation;
  ack.placement_version = view_->placement_version;
  while (!stream->acks.empty() && stream->acks.front().done) {
    ack.sequence = stream->acks.front().sequence;
    ack.credit_bytes += stream->acks.front().bytes;
    stream->acks.pop_front();
  }
  if (ack.sequence > 0) {
    BALLAST_CRASH_POINT("server.replica.before_ack");
    stream->held -= ack.credit_bytes;
    stream->replies.push_back(MakeBulkMessage(ack));
  }
  if (!stream->writing && !stream->replies.empty()) {
    stream->writing = true;
    stream->link->Write(stream->replies.front());
    stream->replies.pop_front();
  } else if (!stream->writing && stream->half_closed && stream->acks.empty()) {
    stream->finished = true;
    stream->link->Finish(absl::OkStatus());
  }
}

void ReplicaTarget::Settle(uint64_t stream, uint64_t sequence) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    return;
  }
  for (Ack& ack : found->second.acks) {
    ack.done |= ack.sequence == sequence;
  }
}

// The error goes out before any acknowledgement that covers it.
void ReplicaTarget::Refuse(Stream* stream, uint64_t sequence,
                           const absl::Status& why) {
  stream->replies.push_back(MakeBulkError(sequence, why));
  Settle(stream->id, sequence);
}

ReplicaTarget::Verdict ReplicaTarget::Judge(const BulkHeader& header,
                                            absl::Status* why) const {
  if (header.timeline != view_->timeline) {
    *why = absl::AbortedError(absl::StrCat(
        "a copy of timeline ", header.timeline, "; this is ", view_->timeline));
    return header.timeline > view_->timeline ? Verdict::kEarly
                                             : Verdict::kRefuse;
  }
  const auto is_from = [&header](const auto& entry) {
    return entry.second.incarnation == header.incarnation;
  };
  const bool is_ordered =
      header.kind == BulkKind::kReplicaMark
          ? std::any_of(ordered_.begin(), ordered_.end(), is_from)
          : ordered_.contains(header.items[0].chunk) &&
                is_from(*ordered_.find(header.items[0].chunk));
  *why = absl::OutOfRangeError(absl::StrCat(
      "the coordinator has not ordered this copy from incarnation ",
      header.incarnation));
  return is_ordered ? Verdict::kTake : Verdict::kEarly;
}

bool ReplicaTarget::Process(Stream* stream, absl::Time now) {
  const BulkHeader& header = stream->messages.front().header();
  absl::Status why;
  if (header.kind != BulkKind::kReplicaMark && header.items.size() != 1) {
    Refuse(stream, header.sequence,
           absl::InvalidArgumentError("a copy's message has one item"));
    return true;
  }
  Verdict verdict = Judge(header, &why);
  if (verdict == Verdict::kEarly) {
    if (!stream->early_since) {
      stream->early_since = now;
    }
    if (now - *stream->early_since < kEarlyMax) {
      return false;
    }
    verdict = Verdict::kRefuse;
  }
  if (verdict == Verdict::kTake && header.kind == BulkKind::kReplicaMark) {
    return TakeMark(stream);
  }
  if (verdict == Verdict::kTake) {
    const bool is_base = header.kind == BulkKind::kReplicaBase;
    if (is_base && IsSynced(header.items[0].chunk, header.step)) {
      // What is here reaches farther, since a moment ago perhaps.
      std::erase_if(stream->assemblies, [&header](const auto& assembly) {
        return assembly->chunk == header.items[0].chunk &&
               assembly->next < assembly->extent->bytes;
      });
      Settle(stream->id, header.sequence);
      return true;
    }
    why = is_base ? CheckPiece(*stream, header)
                  : CheckGradient(header.items[0], header.step);
    if (why.ok()) {
      return is_base ? TakePiece(stream) : TakeGradient(stream);
    }
  }
  Refuse(stream, header.sequence, why);
  return true;
}

bool ReplicaTarget::IsSynced(uint32_t chunk, uint64_t step) const {
  const auto found = copies_.find(chunk);
  return found != copies_.end() && found->second.has_base &&
         found->second.through >= step;
}

SharedExtent ReplicaTarget::Release(uint32_t chunk) {
  const auto found = copies_.find(chunk);
  SharedExtent extent = std::move(found->second.extent);
  copies_.erase(found);
  ordered_.erase(chunk);
  return extent;
}

void ReplicaTarget::LetGo(uint32_t chunk) {
  const auto found = copies_.find(chunk);
  if (found == copies_.end()) {
    return;
  }
  if (found->second.has_base) {
    parts_->book->DropBase(chunk);
    to_drop_.push_back(chunk);
  }
  copies_.erase(found);
}

void ReplicaTarget::DropBases() {
  if (to_drop_.empty() || !committing_.empty()) {
    return;
  }
  std::vector<uint32_t> chunks;
  chunks.swap(to_drop_);
  if (!parts_->durable) {
    return;
  }
  parts_->tasks->Run(
      [slab = parts_->slab, chunks] { return slab->DropBase(chunks); },
      [this, round = round_, chunks](const absl::Status& status) {
        if (round == round_ && !status.ok()) {
          // A full disk. What stays in the index does no harm.
          parts_->fail(status);
        }
      });
}

void ReplicaTarget::GiveUpStale(uint64_t version) {
  std::vector<uint32_t> stale;
  for (const auto& [chunk, copy] : copies_) {
    if (copy.has_base && copy.base < version && copy.through <= version) {
      stale.push_back(chunk);
    }
  }
  for (const uint32_t chunk : stale) {
    LetGo(chunk);
  }
  for (auto& [id, stream] : streams_) {
    for (const std::shared_ptr<Assembly>& assembly : stream.assemblies) {
      assembly->failed |= assembly->base < version;
    }
  }
}

uint64_t ReplicaTarget::LowestBase() const {
  uint64_t lowest = std::numeric_limits<uint64_t>::max();
  const auto count = [&lowest](const CheckpointEntry& entry) {
    lowest = std::min(lowest, entry.version);
  };
  for (const auto& [chunk, copy] : copies_) {
    if (copy.has_base) {
      count(copy.entry);
    }
  }
  for (const auto& [id, stream] : streams_) {
    for (const std::shared_ptr<Assembly>& assembly : stream.assemblies) {
      if (!assembly->failed) {
        count(assembly->entry);
      }
    }
  }
  for (const auto* list : {&to_commit_, &committing_}) {
    for (const auto& [stream, assembly] : *list) {
      count(assembly->entry);
    }
  }
  return lowest;
}

std::string ReplicaTarget::VoteOf(const std::string& source,
                                  uint64_t step) const {
  const VoteMark* mark =
      parts_ ? parts_->book->Vote(view_->timeline, step, source) : nullptr;
  return mark == nullptr ? "" : mark->vote;
}

}  // namespace ballast
