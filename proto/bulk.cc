// SPDX-License-Identifier: Apache-2.0
#include "proto/bulk.h"

#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/hash.h"

namespace ballast {
namespace {

constexpr uint64_t kPayloadMax = uint64_t{1} << 40;

absl::Status Damaged(absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("bulk message refused: ", what));
}

// Offset of the checksum in the fixed part; it covers all header bytes with
// these eight taken as zero.
constexpr uint64_t kChecksumOffset = kBulkFixedBytes - 8;

uint64_t HeaderChecksum(std::string header) {
  header.replace(kChecksumOffset, 8, 8, '\0');
  return HashBytes(header).low;
}

BulkItem DecodeItem(ByteReader* reader, absl::Status* status) {
  BulkItem item;
  item.chunk = reader->Get<uint32_t>();
  item.use = reader->Get<uint32_t>();
  item.span.first = reader->Get<uint32_t>();
  item.span.count = reader->Get<uint32_t>();
  item.field = reader->Get<uint8_t>();
  const auto dtype = reader->Get<uint8_t>();
  item.encoding = reader->Get<uint8_t>();
  const auto has_loss = reader->Get<uint8_t>();
  const auto reserved = reader->Get<uint32_t>();
  item.elem_begin = reader->Get<uint64_t>();
  item.elem_count = reader->Get<uint64_t>();
  item.payload_bytes = reader->Get<uint64_t>();
  item.loss = reader->Get<double>();
  item.record_version = reader->Get<uint64_t>();
  if (dtype > 1 || item.encoding != 0 || has_loss > 1 || reserved != 0) {
    *status = Damaged("an item has an unknown dtype, encoding or flag");
  }
  if (item.payload_bytes > kPayloadMax) {
    *status =
        Damaged(absl::StrCat("an item claims ", item.payload_bytes, " bytes"));
  }
  item.dtype = static_cast<DType>(dtype & 1);
  item.has_loss = has_loss != 0;
  return item;
}

// What the decoded items of a message of this kind may not be; OK otherwise.
absl::Status CheckKind(const BulkHeader& header, uint64_t text_bytes) {
  const bool has_text =
      header.kind == BulkKind::kError || header.kind == BulkKind::kReplicaMark;
  if (has_text && (!header.items.empty() || text_bytes > kBulkTextMax)) {
    return Damaged(absl::StrCat("a text of ", text_bytes, " bytes with ",
                                header.items.size(), " items; at most ",
                                kBulkTextMax, " and none"));
  }
  if (header.kind != BulkKind::kReplicaBase && header.record_timeline != 0) {
    return Damaged("a reserved field is not 0");
  }
  switch (header.kind) {
    case BulkKind::kReplicaBase: {
      if (header.items.size() != 1) {
        return Damaged("a piece of a record has one item");
      }
      const BulkItem& item = header.items[0];
      if (item.payload_bytes == 0 || item.elem_begin > item.elem_count ||
          item.payload_bytes > item.elem_count - item.elem_begin ||
          item.record_version > header.step) {
        return Damaged(absl::StrCat(
            item.payload_bytes, " bytes at ", item.elem_begin,
            " of a record of ", item.elem_count, " bytes and version ",
            item.record_version, ", for version ", header.step));
      }
      break;
    }
    case BulkKind::kReplicaGradient:
      for (const BulkItem& item : header.items) {
        if (item.use != kBulkAllUses || item.dtype != DType::kF32 ||
            item.elem_begin != 0 ||
            item.payload_bytes % DTypeBytes(DType::kF32) != 0 ||
            item.elem_count != item.payload_bytes / DTypeBytes(DType::kF32)) {
          return Damaged("not the complete fp32 gradient of a chunk");
        }
      }
      break;
    case BulkKind::kReplicaHello:
    case BulkKind::kReplicaAck:
      if (header.payload_bytes() != 0) {
        return Damaged("an acknowledgement has no payload");
      }
      break;
    default:
      for (const BulkItem& item : header.items) {
        if (item.record_version != 0) {
          return Damaged("a reserved field of an item is not 0");
        }
      }
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t BulkHeader::payload_bytes() const {
  uint64_t bytes = 0;
  for (const BulkItem& item : items) {
    bytes += item.payload_bytes;
  }
  return bytes;
}

std::string EncodeBulkHeader(const BulkHeader& header) {
  ByteWriter writer;
  writer.Put(kBulkMagic);
  writer.Put(kBulkFormatVersion);
  writer.Put(static_cast<uint16_t>(header.kind));
  writer.Put(header.timeline);
  writer.Put(header.step);
  writer.Put(header.incarnation);
  writer.Put(header.placement_version);
  writer.Put(header.sequence);
  writer.Put(header.credit_bytes);
  writer.Put(header.error_code);
  writer.Put(static_cast<uint32_t>(header.items.size()));
  writer.Put(header.record_timeline);
  writer.Put(uint64_t{0});  // Checksum, below.
  for (const BulkItem& item : header.items) {
    writer.Put(item.chunk);
    writer.Put(item.use);
    writer.Put(item.span.first);
    writer.Put(item.span.count);
    writer.Put(item.field);
    writer.Put(static_cast<uint8_t>(item.dtype));
    writer.Put(item.encoding);
    writer.Put(static_cast<uint8_t>(item.has_loss ? 1 : 0));
    writer.Put(uint32_t{0});
    writer.Put(item.elem_begin);
    writer.Put(item.elem_count);
    writer.Put(item.payload_bytes);
    writer.Put(item.loss);
    writer.Put(item.record_version);
  }
  std::string bytes = writer.Take();
  const uint64_t checksum = HeaderChecksum(bytes);
  std::memcpy(bytes.data() + kChecksumOffset, &checksum, sizeof(checksum));
  return bytes;
}

absl::StatusOr<uint64_t> BulkHeaderBytes(absl::string_view fixed) {
  if (fixed.size() < kBulkFixedBytes) {
    return Damaged(absl::StrCat("it has ", fixed.size(),
                                " bytes; a header has at least ",
                                kBulkFixedBytes));
  }
  ByteReader reader(fixed);
  const auto magic = reader.Get<uint32_t>();
  const auto version = reader.Get<uint16_t>();
  if (magic != kBulkMagic || version != kBulkFormatVersion) {
    return Damaged(absl::StrCat("magic ", magic, " or format version ", version,
                                " is not ours (", kBulkFormatVersion, ")"));
  }
  ByteReader count_reader(fixed.substr(60));
  const auto items = count_reader.Get<uint32_t>();
  if (items > kBulkItemsMax) {
    return Damaged(
        absl::StrCat("it claims ", items, " items; at most ", kBulkItemsMax));
  }
  return kBulkFixedBytes + items * kBulkItemBytes;
}

absl::StatusOr<BulkHeader> DecodeBulkHeader(absl::string_view bytes,
                                            uint64_t message_bytes) {
  absl::StatusOr<uint64_t> wanted = BulkHeaderBytes(bytes);
  if (!wanted.ok()) {
    return wanted.status();
  }
  if (bytes.size() != *wanted || message_bytes < *wanted) {
    return Damaged(absl::StrCat("it has ", message_bytes,
                                " bytes; its header alone claims ", *wanted));
  }
  ByteReader reader(bytes);
  reader.Get<uint32_t>();
  reader.Get<uint16_t>();
  BulkHeader header;
  const auto kind = reader.Get<uint16_t>();
  if (kind < 1 || kind > static_cast<uint16_t>(BulkKind::kReplicaAck)) {
    return Damaged(absl::StrCat("kind ", kind, " is unknown"));
  }
  header.kind = static_cast<BulkKind>(kind);
  header.timeline = reader.Get<uint64_t>();
  header.step = reader.Get<uint64_t>();
  header.incarnation = reader.Get<uint64_t>();
  header.placement_version = reader.Get<uint64_t>();
  header.sequence = reader.Get<uint64_t>();
  header.credit_bytes = reader.Get<uint64_t>();
  header.error_code = reader.Get<uint32_t>();
  const auto item_count = reader.Get<uint32_t>();
  header.record_timeline = reader.Get<uint64_t>();
  const auto checksum = reader.Get<uint64_t>();
  if (checksum != HeaderChecksum(std::string(bytes))) {
    return Damaged("the header's checksum does not match");
  }
  absl::Status status;
  uint64_t payload = 0;
  for (uint32_t i = 0; i < item_count && status.ok(); ++i) {
    header.items.push_back(DecodeItem(&reader, &status));
    payload += header.items.back().payload_bytes;
  }
  if (!status.ok()) {
    return status;
  }
  // A text follows the header without an item.
  const uint64_t arrived = message_bytes - bytes.size();
  if (header.kind != BulkKind::kError &&
      header.kind != BulkKind::kReplicaMark && payload != arrived) {
    return Damaged(absl::StrCat("its items claim ", payload, " bytes and ",
                                arrived, " arrived"));
  }
  status = CheckKind(header, arrived);
  if (!status.ok()) {
    return status;
  }
  return header;
}

}  // namespace ballast
