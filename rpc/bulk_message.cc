// SPDX-License-Identifier: Apache-2.0
#include "rpc/bulk_message.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/check.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

// gRPC hands this back when it has sent the slice.
void ReleaseOwner(void* owner) {
  delete static_cast<std::shared_ptr<const void>*>(owner);
}

grpc::Slice AliasingSlice(const BulkPayload& payload) {
  // grpc::Slice takes a mutable pointer but never writes through it.
  void* data = const_cast<std::byte*>(payload.data);  // NOLINT
  return {data, payload.bytes, &ReleaseOwner,
          new std::shared_ptr<const void>(payload.owner)};
}

}  // namespace

grpc::ByteBuffer MakeBulkMessage(const BulkHeader& header,
                                 std::vector<BulkPayload> payloads) {
  BALLAST_CHECK(payloads.size() == header.items.size());
  std::vector<grpc::Slice> slices;
  slices.reserve(payloads.size() + 1);
  slices.emplace_back(EncodeBulkHeader(header));
  for (size_t i = 0; i < payloads.size(); ++i) {
    BALLAST_CHECK(payloads[i].bytes == header.items[i].payload_bytes);
    if (payloads[i].bytes > 0) {
      slices.push_back(AliasingSlice(payloads[i]));
    }
  }
  return {slices.data(), slices.size()};
}

grpc::ByteBuffer MakeBulkMessage(const BulkHeader& header) {
  const grpc::Slice slice(EncodeBulkHeader(header));
  return {&slice, 1};
}

grpc::ByteBuffer MakeBulkText(const BulkHeader& header,
                              const std::string& text) {
  BALLAST_CHECK(header.items.empty() && text.size() <= kBulkTextMax);
  const grpc::Slice slices[] = {grpc::Slice(EncodeBulkHeader(header)),
                                grpc::Slice(text)};
  return {slices, 2};
}

grpc::ByteBuffer MakeBulkError(uint64_t sequence, const absl::Status& status) {
  BulkHeader header;
  header.kind = BulkKind::kError;
  header.sequence = sequence;
  header.error_code = static_cast<uint32_t>(status.code());
  return MakeBulkText(header, std::string(status.message()));
}

absl::StatusOr<BulkMessage> BulkMessage::Parse(const grpc::ByteBuffer& buffer) {
  BulkMessage message;
  if (!buffer.Dump(&message.slices_).ok()) {
    return absl::InvalidArgumentError("bulk message refused: unreadable");
  }
  for (const grpc::Slice& slice : message.slices_) {
    message.total_bytes_ += slice.size();
  }
  const auto copy_front = [&message](uint64_t bytes) {
    std::string front;
    front.reserve(bytes);
    message.VisitRange(
        0, std::min(bytes, message.total_bytes_),
        [&front](uint64_t, const std::byte* data, uint64_t piece) {
          front.append(reinterpret_cast<const char*>(data), piece);
        });
    return front;
  };
  BALLAST_ASSIGN_OR_RETURN(const uint64_t header_bytes,
                           BulkHeaderBytes(copy_front(kBulkFixedBytes)));
  BALLAST_ASSIGN_OR_RETURN(
      message.header_,
      DecodeBulkHeader(copy_front(header_bytes), message.total_bytes_));
  uint64_t begin = header_bytes;
  for (const BulkItem& item : message.header_.items) {
    message.payload_begin_.push_back(begin);
    begin += item.payload_bytes;
  }
  return message;
}

std::string BulkMessage::text() const {
  std::string text;
  const uint64_t begin = header_.encoded_bytes();
  VisitRange(begin, total_bytes_ - begin,
             [&text](uint64_t, const std::byte* data, uint64_t bytes) {
               text.append(reinterpret_cast<const char*>(data), bytes);
             });
  return text;
}

absl::Status BulkMessage::error() const {
  return {static_cast<absl::StatusCode>(header_.error_code), text()};
}

void BulkMessage::CopyPayload(size_t index, std::byte* out) const {
  VisitPayload(index,
               [out](uint64_t offset, const std::byte* data, uint64_t bytes) {
                 std::copy_n(data, bytes, out + offset);
               });
}

void BulkMessage::VisitPayload(
    size_t index,
    const std::function<void(uint64_t, const std::byte*, uint64_t)>& visit)
    const {
  VisitRange(payload_begin_[index], header_.items[index].payload_bytes, visit);
}

void BulkMessage::VisitRange(
    uint64_t begin, uint64_t bytes,
    const std::function<void(uint64_t, const std::byte*, uint64_t)>& visit)
    const {
  uint64_t slice_begin = 0;
  uint64_t done = 0;
  for (const grpc::Slice& slice : slices_) {
    if (done == bytes) {
      return;
    }
    const uint64_t slice_end = slice_begin + slice.size();
    const uint64_t at = begin + done;
    if (at < slice_end) {
      const uint64_t piece = std::min(slice_end - at, bytes - done);
      visit(done,
            reinterpret_cast<const std::byte*>(slice.begin()) +
                (at - slice_begin),
            piece);
      done += piece;
    }
    slice_begin = slice_end;
  }
}

}  // namespace ballast
