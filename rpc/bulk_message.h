// SPDX-License-Identifier: Apache-2.0
// Messages of the streams of Shard as grpc::ByteBuffer: the header of
// proto/bulk.h, then payload slices that alias memory of ours, so that a tensor
// is not copied on its way out and is read in place on its way in.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/bulk.h"

namespace ballast {

// Bytes of one item's payload, kept alive by `owner` until gRPC has sent them.
struct BulkPayload {
  const std::byte* data = nullptr;
  uint64_t bytes = 0;
  // shared: gRPC's slices and the caller both hold it, and gRPC lets go last.
  std::shared_ptr<const void> owner;
};

// payloads[i] belongs to header.items[i], whose payload_bytes must equal its
// bytes.
grpc::ByteBuffer MakeBulkMessage(const BulkHeader& header,
                                 std::vector<BulkPayload> payloads);
// A header without payload.
grpc::ByteBuffer MakeBulkMessage(const BulkHeader& header);
// A header without items and the text behind it, of the kinds that have one.
grpc::ByteBuffer MakeBulkText(const BulkHeader& header,
                              const std::string& text);
// An answer of kind kError.
grpc::ByteBuffer MakeBulkError(uint64_t sequence, const absl::Status& status);

// A received message: the decoded header and the slices behind it. Movable;
// thread-compatible.
class BulkMessage {
 public:
  // Errors: INVALID_ARGUMENT  as DecodeBulkHeader.
  static absl::StatusOr<BulkMessage> Parse(const grpc::ByteBuffer& buffer);

  const BulkHeader& header() const { return header_; }
  // The text of a kError or kReplicaMark message.
  std::string text() const;
  // The status that a kError message carries.
  absl::Status error() const;

  // Copies the payload of item `index`: items[index].payload_bytes bytes.
  void CopyPayload(size_t index, std::byte* out) const;
  // Visits it piece by piece: offset within the payload, bytes.
  void VisitPayload(
      size_t index,
      const std::function<void(uint64_t offset, const std::byte* data,
                               uint64_t bytes)>& visit) const;

 private:
  void VisitRange(uint64_t begin, uint64_t bytes,
                  const std::function<void(uint64_t, const std::byte*,
                                           uint64_t)>& visit) const;

  BulkHeader header_;
  std::vector<uint64_t> payload_begin_;  // From the start of the message.
  std::vector<grpc::Slice> slices_;
  uint64_t total_bytes_ = 0;
};

}  // namespace ballast
