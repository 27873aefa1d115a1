// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/fetch_server.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rule.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

// Small chunks share a message up to this; below it the cost of a message
// shows, above it nothing is gained.
constexpr uint64_t kReplyBytes = 4 << 20;
// Waiting on one stream; of their items at most kBulkItemsMax.
constexpr size_t kRequestsMax = 4096;
constexpr size_t kAheadItemsMax = 64;
// Far above the workers and tools of a run.
constexpr size_t kStreamsMax = 1024;
// A worker may hear of a timeline or a placement before this server does.
constexpr absl::Duration kEarlyMax = absl::Seconds(30);
constexpr absl::Duration kOldReplyMax = absl::Milliseconds(500);
// A worker that computes while its next unit waits in the socket is not slow.
constexpr absl::Duration kReplyMax = absl::Seconds(15);
// Copies up to this come from the heap.
constexpr uint64_t kSmallCopyBytes = 16 << 10;

// A reply that points into an image; tells the engine when it is sent.
struct SendPin {
  std::shared_ptr<ShardMemory> memory;  // Goes last.
  std::shared_ptr<Image> image;
  std::shared_ptr<Mailbox> mailbox;
  ~SendPin() {
    // The image goes back to its arena on the engine's thread, so the memory
    // must outlive the task too.
    mailbox->Post([owner = memory, held = std::move(image)]() mutable {
      --held->sends;
      held.reset();
    });
  }
};

// A copy for a tool; its memory is the window's again when it is sent.
struct SentCopy {
  std::shared_ptr<ShardMemory> memory;
  ArenaBuffer buffer;
  std::shared_ptr<Mailbox> mailbox;
  ~SentCopy() {
    buffer.reset();
    mailbox->Post([] {});
  }
};

Field FieldOf(const BulkItem& item, const ChunkState& chunk) {
  return item.field == kServedField ? chunk.layout.first_field()
                                    : static_cast<Field>(item.field);
}

}  // namespace

void FetchServer::OnOpen(uint64_t id, std::shared_ptr<BulkStream> stream) {
  if (streams_.size() >= kStreamsMax) {
    stream->Finish(absl::UnavailableError(absl::StrCat(
        "this server has ", kStreamsMax, " streams of fetches already")));
    return;
  }
  streams_[id].link = std::move(stream);
}

void FetchServer::OnMessage(uint64_t id, absl::StatusOr<BulkMessage> message) {
  const auto found = streams_.find(id);
  if (found == streams_.end() || found->second.finished) {
    return;
  }
  Stream& stream = found->second;
  const auto refuse = [&stream](uint64_t sequence, const absl::Status& why) {
    stream.errors.push_back(MakeBulkError(sequence, why));
  };
  if (!message.ok()) {
    refuse(0, message.status());
  } else if (message->header().kind != BulkKind::kFetchRequest ||
             message->header().payload_bytes() != 0) {
    refuse(message->header().sequence,
           absl::InvalidArgumentError(
               "a Fetch stream takes requests without payload only"));
  } else if (stream.requests.size() >= kRequestsMax ||
             stream.items + message->header().items.size() > kBulkItemsMax) {
    refuse(message->header().sequence,
           absl::ResourceExhaustedError(absl::StrCat(
               "stream has ", stream.requests.size(), " requests of ",
               stream.items, " items waiting; at most ", kRequestsMax, " of ",
               kBulkItemsMax, ", read the answers first")));
  } else {
    stream.items += message->header().items.size();
    stream.requests.push_back({message->header(), 0, now_});
  }
  if (stream.errors.size() < kRequestsMax) {
    stream.link->Read();
  } else {  // A peer that never reads its errors.
    stream.finished = true;
    stream.link->Finish(absl::ResourceExhaustedError("too many errors"));
  }
}

void FetchServer::OnHalfClose(uint64_t id) {
  if (const auto found = streams_.find(id); found != streams_.end()) {
    found->second.half_closed = true;
  }
}

void FetchServer::OnWritten(uint64_t id) {
  if (const auto found = streams_.find(id); found != streams_.end()) {
    found->second.writing_since.reset();
  }
}

void FetchServer::OnGone(uint64_t id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) {
    return;
  }
  for (const auto& [chunk, image] : found->second.ahead) {
    if (const auto held = image.lock()) {
      --held->awaited;
    }
  }
  streams_.erase(found);
}

void FetchServer::Reset(const absl::Status& why) {
  chunks_ = nullptr;
  for (auto& [id, stream] : streams_) {
    stream.requests.clear();
    stream.items = 0;
    stream.errors.clear();
    stream.ahead.clear();
    if (stream.writing_since) {
      stream.link->Cancel();  // A finish would wait for the reader.
    } else if (!stream.finished) {
      stream.link->Finish(why);
    }
    stream.finished = true;
  }
}

void FetchServer::CancelSlow(uint64_t version, absl::Time now) {
  for (auto& [id, stream] : streams_) {
    const absl::Duration patience =
        stream.writing_version < version ? kOldReplyMax : kReplyMax;
    if (stream.writing_since && now - *stream.writing_since > patience) {
      stream.link->Cancel();
    }
  }
}

void FetchServer::Pump(absl::Time now) {
  now_ = now;
  for (auto& [id, stream] : streams_) {
    PumpStream(&stream, now);
  }
  for (auto& [id, stream] : streams_) {
    if (!stream.finished) {
      ReadAhead(&stream);
    }
  }
}

void FetchServer::PumpStream(Stream* stream, absl::Time now) {
  while (!stream->writing_since && !stream->finished) {
    if (stream->errors.empty() && !WriteReply(stream, now)) {
      break;
    }
    if (!stream->writing_since && !stream->errors.empty()) {
      stream->writing_since = now;
      stream->writing_version = 0;
      stream->link->Write(stream->errors.front());
      stream->errors.pop_front();
    }
  }
  if (!stream->writing_since && stream->half_closed && !stream->finished &&
      stream->requests.empty() && stream->errors.empty()) {
    stream->finished = true;
    stream->link->Finish(absl::OkStatus());
  }
}

bool FetchServer::IsEarly(const BulkHeader& header) const {
  return header.incarnation != 0 &&
         (header.timeline > view_->timeline ||
          header.placement_version > view_->placement_version);
}

absl::Status FetchServer::CheckRequest(const BulkHeader& header) const {
  if (header.incarnation == 0) {
    return absl::OkStatus();
  }
  if (header.timeline != view_->timeline) {
    return absl::AbortedError(absl::StrCat(
        "fetch of timeline ", header.timeline, "; this is ", view_->timeline));
  }
  if (header.placement_version < view_->placement_version) {
    return absl::AbortedError(absl::StrCat(
        "fetch by placement ", header.placement_version, "; this is ",
        view_->placement_version, ", ask the coordinator for it"));
  }
  return absl::OkStatus();
}

absl::Status FetchServer::CheckItem(const BulkItem& item,
                                    const ChunkState& chunk) const {
  const uint64_t elems = chunk.layout.elem_count;
  if (item.elem_begin > elems || item.elem_count > elems - item.elem_begin) {
    return absl::InvalidArgumentError(
        absl::StrCat("fetch of elements [", item.elem_begin, ", +",
                     item.elem_count, ") of chunk ", item.chunk, " of ",
                     chunk.tensor->name, ", which has ", elems));
  }
  if (item.field != kServedField &&
      (item.field >= kFieldCount ||
       chunk.layout.fields[item.field].bytes == 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("fetch of field ", uint32_t{item.field}, " of ",
                     chunk.tensor->name, ", which has no such field"));
  }
  return absl::OkStatus();
}

FetchServer::Answer FetchServer::Resolve(const BulkHeader& header,
                                         const BulkItem& item, bool first) {
  Answer answer;
  if (view_->incoming.contains(item.chunk)) {
    return answer;  // It is waited for.
  }
  ChunkState* chunk = chunks_->Find(item.chunk);
  if (chunk == nullptr) {
    answer.status = absl::NotFoundError(
        absl::StrCat("chunk ", item.chunk, " is not on this server"));
    return answer;
  }
  if (answer.status = CheckItem(item, *chunk); !answer.status.ok()) {
    return answer;
  }
  answer.version = chunk->version;
  if (BALLAST_RULE(kFetchNamesVersion) && header.step != kAnyVersion &&
      header.step != chunk->version) {
    if (header.step != chunk->version + 1) {
      answer.status = absl::AbortedError(
          absl::StrCat("fetch of version ", header.step, " of ",
                       chunk->tensor->name, ", which is at ", chunk->version));
    }
    return answer;  // The next version is waited for.
  }
  const Field field = FieldOf(item, *chunk);
  const bool prefix = field == chunk->layout.first_field();
  const auto image = prefix ? chunks_->Served(*chunk) : chunks_->Whole(*chunk);
  if (!image) {
    if (first) {
      chunks_->Bring(chunk, !prefix, ChunkStore::Need::kNow);
    }
    return answer;
  }
  const RecordLayout::Place& place = chunk->layout.at(field);
  const DType dtype =
      field == Field::kServed ? chunk->tensor->served : DType::kF32;
  answer.item.chunk = item.chunk;
  answer.item.field = item.field;
  answer.item.dtype = dtype;
  answer.item.elem_begin = item.elem_begin;
  answer.item.elem_count = item.elem_count == 0
                               ? chunk->layout.elem_count - item.elem_begin
                               : item.elem_count;
  answer.item.payload_bytes = answer.item.elem_count * DTypeBytes(dtype);
  const uint64_t offset = place.offset + item.elem_begin * DTypeBytes(dtype);
  if (header.incarnation == 0 && image == chunk->resident) {
    auto copy = Copy(*image, offset, answer.item.payload_bytes);
    answer.ready = copy.has_value();
    answer.payload = std::move(copy).value_or(BulkPayload());
  } else {
    answer.ready = true;
    answer.from_window = image != chunk->resident;
    answer.payload = Alias(*chunk, image, offset, answer.item.payload_bytes);
  }
  return answer;
}

BulkPayload FetchServer::Alias(const ChunkState& chunk,
                               const std::shared_ptr<Image>& image,
                               uint64_t offset, uint64_t bytes) {
  auto pin = std::make_shared<SendPin>();
  pin->memory = view_->memory;
  pin->image = image;
  pin->mailbox = mailbox_;
  ++image->sends;
  if (image == chunk.window) {
    ++image->served;
  }
  return {image->buffer.data() + offset, bytes, std::move(pin)};
}

std::optional<BulkPayload> FetchServer::Copy(const Image& image,
                                             uint64_t offset, uint64_t bytes) {
  const std::byte* from = image.buffer.data() + offset;
  if (bytes <= kSmallCopyBytes) {
    auto copy = std::make_shared<std::string>(
        reinterpret_cast<const char*>(from), bytes);
    return BulkPayload{reinterpret_cast<const std::byte*>(copy->data()), bytes,
                       copy};
  }
  auto copy = std::make_shared<SentCopy>();
  copy->memory = view_->memory;
  copy->mailbox = mailbox_;
  copy->buffer =
      chunks_->TakeWindow(bytes, "copies for queries", ChunkStore::Need::kSoon);
  if (!copy->buffer) {
    return std::nullopt;
  }
  std::memcpy(copy->buffer.data(), from, bytes);
  return BulkPayload{copy->buffer.data(), bytes, copy};
}

void FetchServer::PopRequest(Stream* stream) {
  stream->items -= stream->requests.front().header.items.size();
  stream->requests.pop_front();
}

void FetchServer::Fail(Stream* stream, const absl::Status& status) {
  Request& request = stream->requests.front();
  for (size_t i = request.next; i < request.header.items.size(); ++i) {
    Unawait(stream, request.header.items[i].chunk);
  }
  stream->errors.push_back(MakeBulkError(request.header.sequence, status));
  PopRequest(stream);
}

bool FetchServer::WriteReply(Stream* stream, absl::Time now) {
  if (chunks_ == nullptr || !view_->loaded || stream->requests.empty()) {
    return false;
  }
  Request& request = stream->requests.front();
  if (IsEarly(request.header) && now - request.since < kEarlyMax) {
    return false;
  }
  if (const absl::Status status = CheckRequest(request.header); !status.ok()) {
    Fail(stream, status);
    return true;
  }
  if (request.header.incarnation != 0 &&
      request.header.placement_version > view_->placement_version) {
    return false;  // Chunks move with a decision that is on its way to us.
  }
  BulkHeader header;
  header.kind = BulkKind::kFetchReply;
  header.timeline = view_->timeline;
  header.incarnation = view_->incarnation;
  header.placement_version = view_->placement_version;
  header.sequence = request.header.sequence;
  std::vector<BulkPayload> payloads;
  uint64_t bytes = 0;
  uint64_t window_bytes = 0;
  const uint64_t window_quota = view_->plan.window_bytes / 2 /
                                std::max<uint64_t>(1, view_->workers_planned);
  while (request.next < request.header.items.size()) {
    Answer answer = Resolve(request.header, request.header.items[request.next],
                            header.items.empty());
    if (!answer.status.ok() && header.items.empty()) {
      Fail(stream, answer.status);
      return true;
    }
    const uint64_t more = answer.item.payload_bytes;
    window_bytes += answer.from_window ? more : 0;
    if (!answer.ready ||
        (!header.items.empty() &&
         (answer.version != header.step || bytes + more > kReplyBytes ||
          window_bytes > window_quota))) {
      break;  // The pin of an answer that is not sent goes by itself.
    }
    header.step = answer.version;
    header.items.push_back(answer.item);
    payloads.push_back(std::move(answer.payload));
    bytes += more;
    Unawait(stream, answer.item.chunk);
    ++request.next;
  }
  if (header.items.empty() && !request.header.items.empty()) {
    return false;
  }
  if (request.next == request.header.items.size()) {
    PopRequest(stream);
  }
  if (header.items.empty()) {
    return true;  // A request of nothing is done at once.
  }
  sent_bytes_ += bytes;
  stream->writing_since = now;
  stream->writing_version = header.step;
  stream->link->Write(MakeBulkMessage(header, std::move(payloads)));
  return true;
}

void FetchServer::ReadAhead(Stream* stream) {
  if (chunks_ == nullptr || !view_->loaded) {
    return;
  }
  size_t items = 0;
  uint64_t bytes = 0;
  const uint64_t quota =
      view_->plan.window_bytes / 2 / std::max<size_t>(1, streams_.size());
  for (const Request& request : stream->requests) {
    for (size_t i = request.next; i < request.header.items.size(); ++i) {
      const BulkItem& item = request.header.items[i];
      ChunkState* chunk = chunks_->Find(item.chunk);
      if (++items > kAheadItemsMax) {
        return;
      }
      if (chunk == nullptr || chunk->resident || item.field != kServedField ||
          request.header.step != chunk->version) {
        continue;
      }
      bytes += chunk->layout.prefix_bytes;
      if (bytes > quota ||
          !chunks_->Bring(chunk, /*whole=*/false, ChunkStore::Need::kSoon)) {
        return;
      }
      Await(stream, chunk);
    }
  }
}

void FetchServer::Await(Stream* stream, ChunkState* chunk) {
  std::weak_ptr<Image>& place = stream->ahead[chunk->chunk.id];
  const std::shared_ptr<Image> before = place.lock();
  if (before != chunk->window) {
    if (before) {
      --before->awaited;
    }
    ++chunk->window->awaited;
    place = chunk->window;
  }
}

void FetchServer::Unawait(Stream* stream, uint32_t chunk) {
  const auto found = stream->ahead.find(chunk);
  if (found == stream->ahead.end()) {
    return;
  }
  if (const auto image = found->second.lock()) {
    --image->awaited;
  }
  stream->ahead.erase(found);
}

}  // namespace ballast
