// SPDX-License-Identifier: Apache-2.0
#include "worker/client/fetch_link.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace ballast {

FetchLink::FetchLink(const ServerAddress& server, Device* device,
                     PassState* state)
    : server_(server),
      device_(*device),
      state_(*state),
      link_(server.name, server.address, kFetchMethod, state, this) {}

void FetchLink::Open(const PassIdentity& identity) {
  identity_ = identity;
  link_.Open();
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
  MutexLock lock(&state_.mutex);
  BALLAST_RETURN_IF_ERROR(state_.failure);
  requests_.push_back(MakeBulkMessage(header));
  outstanding_.push_back(std::move(outstanding));
  link_.AssertHeld();
  link_.Wake();
  return absl::OkStatus();
}

std::optional<uint32_t> FetchLink::Missing(uint32_t unit) const {
  for (const Outstanding& request : outstanding_) {
    if (request.unit == unit) {
      return request.wanted.begin()->first;
    }
  }
  return std::nullopt;
}

void FetchLink::Break() {
  link_.Break();
  MutexLock lock(&state_.mutex);
  requests_.clear();
  outstanding_.clear();
}

std::optional<grpc::ByteBuffer> FetchLink::NextMessage() {
  AssertHeld();
  if (requests_.empty()) {
    return std::nullopt;
  }
  grpc::ByteBuffer message = std::move(requests_.front());
  requests_.pop_front();
  return message;
}

bool FetchLink::AwaitsMessage() const {
  AssertHeld();
  return !outstanding_.empty();
}

absl::Status FetchLink::Take(const BulkMessage& message) {
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
  if (header.incarnation != server_.incarnation) {
    return absl::AbortedError(
        absl::StrCat("weights of incarnation ", header.incarnation,
                     "; the placement names ", server_.incarnation));
  }
  for (size_t i = 0; i < header.items.size(); ++i) {
    const BulkItem& item = header.items[i];
    const auto wanted = request->wanted.find(item.chunk);
    if (wanted == request->wanted.end() ||
        item.payload_bytes != wanted->second.bytes) {
      return absl::InternalError(absl::StrCat(item.payload_bytes,
                                              " bytes of chunk ", item.chunk,
                                              " that were not asked for"));
    }
    Copy(message, i, wanted->second, request->after);
    MutexLock lock(&state_.mutex);
    fetched_bytes_ += item.payload_bytes;
    request->wanted.erase(wanted);
    if (!request->wanted.empty()) {
      continue;
    }
    outstanding_.pop_front();
    state_.changed.NotifyAll();
    if (i + 1 < header.items.size()) {
      return absl::InternalError(absl::StrCat("more chunks than request ",
                                              header.sequence, " had named"));
    }
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
