// SPDX-License-Identifier: Apache-2.0
#include "worker/client/fetch_link.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace ballast {

FetchLink::FetchLink(const ServerAddress& server,
                     const std::shared_ptr<grpc::Channel>& channel,
                     Device* device, PassState* state)
    : server_(server),
      channel_(channel),
      device_(*device),
      state_(*state),
      thread_([this] { Run(); }) {}

FetchLink::~FetchLink() {
  Break();
  {
    MutexLock lock(&state_.mutex);
    stopping_ = true;
    work_.NotifyAll();
  }
  thread_.join();
}

void FetchLink::Open(const PassIdentity& identity, absl::Duration timeout) {
  identity_ = identity;
  std::shared_ptr<RawStream> stream =
      RawStream::Open(channel_, kFetchMethod, timeout);
  MutexLock lock(&state_.mutex);
  stream_ = std::move(stream);
}

absl::Status FetchLink::Request(uint32_t unit, uint64_t version,
                                StreamMark after,
                                const std::vector<Wanted>& wanted) {
  BulkHeader header;
  header.kind = BulkKind::kFetchRequest;
  header.timeline = identity_.timeline;
  header.step = version;
  header.incarnation = identity_.incarnation;
  header.placement_version = identity_.placement_version;
  header.sequence = next_sequence_++;
  Outstanding outstanding = {.unit = unit,
                             .version = version,
                             .sequence = header.sequence,
                             .after = after,
                             .wanted = {}};
  for (const Wanted& chunk : wanted) {
    BulkItem& item = header.items.emplace_back();
    item.chunk = chunk.chunk;
    item.field = kServedField;
    outstanding.wanted.emplace(chunk.chunk, chunk);
  }
  std::shared_ptr<RawStream> stream;
  {
    MutexLock lock(&state_.mutex);
    BALLAST_RETURN_IF_ERROR(state_.failure);
    stream = stream_;
    outstanding_.push_back(std::move(outstanding));
    work_.NotifyAll();
  }
  // When this fails the reader learns why, and everyone through the state.
  stream->Write(MakeBulkMessage(header)).IgnoreError();
  return absl::OkStatus();
}

bool FetchLink::Pending(uint32_t unit) const {
  for (const Outstanding& request : outstanding_) {
    if (request.unit == unit) {
      return true;
    }
  }
  return false;
}

absl::Status FetchLink::Close() {
  std::shared_ptr<RawStream> stream;
  {
    MutexLock lock(&state_.mutex);
    while (reading_) {
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

void FetchLink::Break() {
  std::shared_ptr<RawStream> stream;  // Ends after the lock is given back.
  {
    MutexLock lock(&state_.mutex);
    stream = stream_;
  }
  if (stream != nullptr) {
    stream->Cancel();
  }
  MutexLock lock(&state_.mutex);
  while (reading_) {
    state_.changed.Wait(&state_.mutex);
  }
  outstanding_.clear();
  stream_ = nullptr;
}

void FetchLink::Run() {
  while (true) {
    std::shared_ptr<RawStream> stream;
    {
      MutexLock lock(&state_.mutex);
      reading_ = false;
      if (outstanding_.empty() || stream_ == nullptr) {
        state_.changed.NotifyAll();
      }
      while (!stopping_ && (outstanding_.empty() || stream_ == nullptr)) {
        work_.Wait(&state_.mutex);
      }
      if (stopping_) {
        return;
      }
      stream = stream_;
      reading_ = true;
    }
    auto buffer = stream->Read();
    const absl::Status status = buffer.ok() ? Take(*buffer) : buffer.status();
    if (!status.ok()) {
      // Both under one lock: a request that is gone without a failure would
      // look answered, and weights that never came be computed with.
      MutexLock lock(&state_.mutex);
      state_.Fail(server_.name, status);
      outstanding_.clear();
    }
  }
}

absl::Status FetchLink::Take(const grpc::ByteBuffer& buffer) {
  BALLAST_ASSIGN_OR_RETURN(const BulkMessage message,
                           BulkMessage::Parse(buffer));
  const BulkHeader& header = message.header();
  if (header.kind == BulkKind::kError) {
    return message.error();
  }
  Outstanding* request = nullptr;
  {
    // Only this thread takes from the front, so the request stays where it is.
    MutexLock lock(&state_.mutex);
    request = outstanding_.empty() ? nullptr : &outstanding_.front();
  }
  if (header.kind != BulkKind::kFetchReply || request == nullptr ||
      header.sequence != request->sequence || header.step != request->version) {
    return absl::InternalError(absl::StrCat(
        "an answer of kind ", static_cast<int>(header.kind), " to request ",
        header.sequence, " at version ", header.step, " that nobody asked"));
  }
  if (!server_.IsLife(header.incarnation)) {
    return absl::AbortedError(
        absl::StrCat("weights of incarnation ", header.incarnation,
                     "; the placement names ", server_.incarnation));
  }
  for (size_t i = 0; i < header.items.size(); ++i) {
    const auto wanted = request->wanted.find(header.items[i].chunk);
    if (wanted == request->wanted.end() ||
        header.items[i].payload_bytes != wanted->second.bytes) {
      return absl::InternalError(
          absl::StrCat(header.items[i].payload_bytes, " bytes of chunk ",
                       header.items[i].chunk, " that were not asked for"));
    }
    Copy(message, i, wanted->second, request->after);
    request->wanted.erase(wanted);
  }
  MutexLock lock(&state_.mutex);
  fetched_bytes_ += header.payload_bytes();
  if (request->wanted.empty()) {
    outstanding_.pop_front();
    state_.changed.NotifyAll();
  }
  return absl::OkStatus();
}

void FetchLink::Copy(const BulkMessage& message, size_t index,
                     const Wanted& wanted, StreamMark after) {
  message.VisitPayload(
      index, [&](uint64_t offset, const std::byte* data, uint64_t bytes) {
        device_.CopyIn(after, data, bytes, wanted.destination + offset);
      });
}

}  // namespace ballast
