// SPDX-License-Identifier: Apache-2.0
// The header in front of tensor bytes on the Fetch, Push and Replicate streams.
// One gRPC message is: this header, then the payloads of its items in order,
// nothing else. All integers little-endian. Format: docs/FORMATS.md.
//
// A received count or length is never trusted: Decode checks each against what
// arrived before using it.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/dtype.h"
#include "common/span.h"

namespace ballast {

enum class BulkKind : uint16_t {
  kFetchRequest = 1,  // Client: items name chunks (and a slice, and a field).
  kFetchReply = 2,    // Server: items with payloads; header.step is their
                      // version. A request is done when all items came.
  kPush = 3,          // Client: gradients, one item a (chunk, use, span).
  kPushAck = 4,       // Server: names taken; credit_bytes returned.
  kError = 5,         // Server: payload is text, error_code an absl code. The
                      // stream goes on; `sequence` says which request failed.
  kHello = 6,         // Server, first on a Push stream: credit_bytes granted.

  // Replicate streams, from the server that owns chunks to one that keeps a
  // second copy of them (docs/PROTOCOL.md, section 6).
  kReplicaHello = 7,  // Target, first: credit_bytes granted; an item for each
                      // chunk whose copy is synced, through record_version.
  kReplicaBase = 8,   // Source: a piece of a chunk's record, one item; `step`
                      // is the version that it stands for.
  kReplicaGradient = 9,  // Source: complete gradients of `step`.
  kReplicaMark = 10,  // Source: the payload is its serialized Vote for `step`.
  kReplicaAck = 11,   // Target: every message up to `sequence` is synced;
                      // credit_bytes returned.
};

// Version that means "the newest committed one" in a fetch request.
inline constexpr uint64_t kAnyVersion = ~uint64_t{0};
inline constexpr uint32_t kBulkMagic = 0x54534c42;  // "BLST".
inline constexpr uint16_t kBulkFormatVersion = 1;
inline constexpr uint64_t kBulkFixedBytes = 80;
inline constexpr uint64_t kBulkItemBytes = 64;
inline constexpr uint32_t kBulkItemsMax = 65536;
// `use` of a gradient in which all uses are added.
inline constexpr uint32_t kBulkAllUses = 0xffffffffu;
// Of the text of an error, and of a vote.
inline constexpr uint64_t kBulkTextMax = 1 << 20;

struct BulkItem {
  uint32_t chunk = 0;
  uint32_t use = 0;   // Push only.
  Span span;          // Push only.
  uint8_t field = 0;  // storage/record.h, Field; fetch only. With
                      // kServedField: whatever workers fetch.
  DType dtype = DType::kF32;
  uint8_t encoding = 0;   // 0: dense. Others are reserved and refused.
  bool has_loss = false;  // Push: `loss` belongs to this name.
  // From the start of the chunk. Base: bytes from the start of the record.
  uint64_t elem_begin = 0;
  // 0 in a fetch request: to its end. Base: bytes of the whole record.
  uint64_t elem_count = 0;
  uint64_t payload_bytes = 0;
  double loss = 0;
  // Base: what the record says of itself, older than `step` after skipped
  // steps. Replica hello: through which step the copy is synced.
  uint64_t record_version = 0;
  friend bool operator==(const BulkItem&, const BulkItem&) = default;
};
inline constexpr uint8_t kServedField = 0xff;

struct BulkHeader {
  BulkKind kind = BulkKind::kError;
  uint64_t timeline = 0;
  uint64_t step = 0;         // Push: the step. Fetch: the version.
  uint64_t incarnation = 0;  // Of the sender; 0 for a query by a tool.
  uint64_t placement_version = 0;
  uint64_t sequence = 0;  // Of a request, repeated in its answers; replicas:
                          // counts from 1.
  uint64_t credit_bytes = 0;
  uint32_t error_code = 0;
  uint64_t record_timeline = 0;  // Base: what the record says of itself.
  std::vector<BulkItem> items;
  friend bool operator==(const BulkHeader&, const BulkHeader&) = default;

  uint64_t encoded_bytes() const {
    return kBulkFixedBytes + items.size() * kBulkItemBytes;
  }
  uint64_t payload_bytes() const;
};

// encoded_bytes() bytes, with a checksum of the header.
std::string EncodeBulkHeader(const BulkHeader& header);

// How many bytes the header takes, from its first kBulkFixedBytes.
// Errors: INVALID_ARGUMENT  too short, wrong magic, version or item count.
absl::StatusOr<uint64_t> BulkHeaderBytes(absl::string_view fixed);

// Decodes a header; `message_bytes` is the length of the whole message, header
// included.
// Errors: INVALID_ARGUMENT  damaged, an unknown kind, dtype or encoding, items
//         that a message of its kind cannot have, or payload lengths that do
//         not add up to what arrived.
absl::StatusOr<BulkHeader> DecodeBulkHeader(absl::string_view header,
                                            uint64_t message_bytes);

}  // namespace ballast
