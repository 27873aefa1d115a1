// SPDX-License-Identifier: Apache-2.0
#include "storage/log_format.h"

#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/check.h"
#include "storage/file.h"
#include "storage/record.h"

namespace ballast {
namespace {

constexpr uint32_t kMagic = 0x474c4c42;  // "BLLG".
constexpr uint32_t kFormatVersion = 2;
constexpr uint64_t kCoveredBytes = 136;  // By the header's checksum.

}  // namespace

uint64_t LogRecordBytes(uint64_t payload_bytes) {
  return kPageBytes + RoundUp(payload_bytes, kPageBytes);
}

std::string EncodeLogHeader(const LogHeader& header) {
  ByteWriter writer;
  writer.Put(kMagic);
  writer.Put(kFormatVersion);
  writer.Put(header.run.high);
  writer.Put(header.run.low);
  writer.Put(static_cast<uint32_t>(header.kind));
  writer.Put(uint32_t{0});
  writer.Put(header.name.timeline);
  writer.Put(header.name.step);
  writer.Put(header.name.chunk);
  writer.Put(header.name.use);
  writer.Put(header.name.span.first);
  writer.Put(header.name.span.count);
  writer.Put(header.segment);
  writer.Put(header.offset);
  writer.Put(header.synced_segment);
  writer.Put(header.synced_offset);
  writer.Put(header.previous_segment);
  writer.Put(header.previous_end);
  writer.Put(header.payload_bytes);
  writer.Put(header.payload_hash.high);
  writer.Put(header.payload_hash.low);
  BALLAST_CHECK(writer.bytes().size() == kCoveredBytes);
  const Hash128 checksum = HashBytes(writer.bytes());
  writer.Put(checksum.high);
  writer.Put(checksum.low);
  std::string page = writer.Take();
  page.resize(kPageBytes, '\0');
  return page;
}

absl::StatusOr<LogHeader> DecodeLogHeader(absl::string_view page,
                                          absl::string_view where) {
  ByteReader reader(page);
  const auto magic = reader.Get<uint32_t>();
  const auto version = reader.Get<uint32_t>();
  LogHeader header;
  header.run.high = reader.Get<uint64_t>();
  header.run.low = reader.Get<uint64_t>();
  header.kind = static_cast<LogKind>(reader.Get<uint32_t>());
  reader.Get<uint32_t>();
  header.name.timeline = reader.Get<uint64_t>();
  header.name.step = reader.Get<uint64_t>();
  header.name.chunk = reader.Get<uint32_t>();
  header.name.use = reader.Get<uint32_t>();
  header.name.span.first = reader.Get<uint32_t>();
  header.name.span.count = reader.Get<uint32_t>();
  header.segment = reader.Get<uint64_t>();
  header.offset = reader.Get<uint64_t>();
  header.synced_segment = reader.Get<uint64_t>();
  header.synced_offset = reader.Get<uint64_t>();
  header.previous_segment = reader.Get<uint64_t>();
  header.previous_end = reader.Get<uint64_t>();
  header.payload_bytes = reader.Get<uint64_t>();
  header.payload_hash.high = reader.Get<uint64_t>();
  header.payload_hash.low = reader.Get<uint64_t>();
  Hash128 checksum;
  checksum.high = reader.Get<uint64_t>();
  checksum.low = reader.Get<uint64_t>();
  if (!reader.ok() || magic != kMagic) {
    return absl::DataLossError(absl::StrCat(where, " holds no log record"));
  }
  if (checksum != HashBytes(page.substr(0, kCoveredBytes))) {
    return absl::DataLossError(
        absl::StrCat(where, " holds a damaged log record header"));
  }
  if (version != kFormatVersion) {
    return absl::DataLossError(absl::StrCat(where, " has log format ", version,
                                            ", want ", kFormatVersion));
  }
  return header;
}

std::string EncodeVoteMark(const VoteMark& mark) {
  ByteWriter writer;
  writer.PutString(mark.owner);
  writer.PutString(mark.vote);
  writer.Put(static_cast<uint32_t>(mark.gradients.size()));
  for (const auto& [chunk, position] : mark.gradients) {
    writer.Put(chunk);
    writer.Put(position.segment);
    writer.Put(position.offset);
    writer.Put(position.bytes);
  }
  return writer.Take();
}

absl::StatusOr<VoteMark> DecodeVoteMark(absl::string_view payload,
                                        uint64_t timeline, uint64_t step,
                                        absl::string_view where) {
  ByteReader reader(payload);
  VoteMark mark;
  mark.timeline = timeline;
  mark.step = step;
  mark.owner = reader.GetString();
  mark.vote = reader.GetString();
  const auto count = reader.Get<uint32_t>();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    auto& [chunk, position] = mark.gradients.emplace_back();
    chunk = reader.Get<uint32_t>();
    position.segment = reader.Get<uint64_t>();
    position.offset = reader.Get<uint64_t>();
    position.bytes = reader.Get<uint64_t>();
  }
  if (!reader.ok() || reader.remaining() != 0) {
    return absl::DataLossError(
        absl::StrCat(where, " holds a mark of another length than it says"));
  }
  return mark;
}

std::string DescribeGradient(const GradientName& name) {
  return absl::StrCat("timeline ", name.timeline, " step ", name.step,
                      " chunk ", name.chunk, " use ",
                      name.use == kAllUses ? "all" : absl::StrCat(name.use),
                      " span [", name.span.first, ", ", name.span.end(), ")");
}

}  // namespace ballast
