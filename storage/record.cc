// SPDX-License-Identifier: Apache-2.0
#include "storage/record.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "storage/file.h"

namespace ballast {
namespace {

constexpr uint32_t kMagic = 0x43524c42;  // "BLRC".
constexpr uint32_t kFormatVersion = 1;
constexpr uint64_t kDigestBytes = 16;
// Bytes in front of the digests: see docs/FORMATS.md.
constexpr uint64_t kFixedBytes = 184;
constexpr uint64_t kFieldAlign = 64;

uint64_t FieldCount(const RecordLayout& layout) {
  return static_cast<uint64_t>(
      std::count_if(layout.fields.begin(), layout.fields.end(),
                    [](const auto& place) { return place.bytes != 0; }));
}

void PutHash(const Hash128& hash, ByteWriter* writer) {
  writer->Put(hash.high);
  writer->Put(hash.low);
}

Hash128 LoadHash(const std::byte* from) {
  Hash128 hash;
  std::memcpy(&hash.high, from, 8);
  std::memcpy(&hash.low, from + 8, 8);
  return hash;
}

// Everything in front of the digests.
std::string FixedHeader(const RecordLayout& layout, const RecordId& id) {
  ByteWriter writer;
  writer.Put(kMagic);
  writer.Put(kFormatVersion);
  writer.Put(static_cast<uint32_t>(layout.header_bytes));
  writer.Put(static_cast<uint32_t>(kFieldCount));
  PutHash(id.run, &writer);
  writer.Put(id.timeline);
  writer.Put(id.version);
  PutHash(id.tensor, &writer);
  writer.Put(id.begin);
  writer.Put(id.end);
  writer.Put(layout.block_elems);
  writer.Put(layout.elem_count);
  writer.Put(layout.prefix_bytes);
  writer.Put(layout.total_bytes);
  for (const RecordLayout::Place& place : layout.fields) {
    writer.Put(place.offset);
    writer.Put(place.bytes);
  }
  writer.Put(static_cast<uint32_t>(FieldCount(layout) * layout.block_count()));
  writer.Put(uint32_t{0});
  BALLAST_CHECK(writer.bytes().size() == kFixedBytes);
  return writer.Take();
}

RecordId ParseId(absl::string_view header) {
  ByteReader reader(header.substr(16));
  RecordId id;
  id.run.high = reader.Get<uint64_t>();
  id.run.low = reader.Get<uint64_t>();
  id.timeline = reader.Get<uint64_t>();
  id.version = reader.Get<uint64_t>();
  id.tensor.high = reader.Get<uint64_t>();
  id.tensor.low = reader.Get<uint64_t>();
  id.begin = reader.Get<uint64_t>();
  id.end = reader.Get<uint64_t>();
  return id;
}

// "version is 7, want 8; ..." for whatever differs.
std::string Differences(const RecordId& found, const RecordId& wanted) {
  std::string text;
  const auto add = [&text](absl::string_view name, const auto& is,
                           const auto& want) {
    if (is != want) {
      absl::StrAppend(&text, text.empty() ? "" : "; ", name, " is ", is,
                      ", want ", want);
    }
  };
  add("run", HashHex(found.run), HashHex(wanted.run));
  add("timeline", found.timeline, wanted.timeline);
  add("version", found.version, wanted.version);
  add("tensor hash", HashHex(found.tensor), HashHex(wanted.tensor));
  add("begin", found.begin, wanted.begin);
  add("end", found.end, wanted.end);
  return text;
}

// Bytes of block `block` of a field, relative to the field's start.
std::pair<uint64_t, uint64_t> BlockRange(const RecordLayout& layout,
                                         const RecordLayout::Place& place,
                                         uint64_t block) {
  const uint64_t elem_bytes = place.bytes / layout.elem_count;
  const uint64_t begin = block * layout.block_elems;
  const uint64_t end = std::min(begin + layout.block_elems, layout.elem_count);
  return {begin * elem_bytes, (end - begin) * elem_bytes};
}

Hash128 DigestBlock(const RecordLayout& layout,
                    const RecordLayout::Place& place, uint64_t block,
                    absl::Span<const std::byte> image) {
  const auto [offset, bytes] = BlockRange(layout, place, block);
  return HashBytes(image.data() + place.offset + offset, bytes);
}

absl::string_view PlainFieldName(int field) {
  constexpr absl::string_view kNames[] = {"served", "param", "slot 0",
                                          "slot 1"};
  return kNames[field];
}

}  // namespace

absl::string_view FieldName(Field field, OptimizerKind optimizer) {
  switch (field) {
    case Field::kServed:
      return "served";
    case Field::kParam:
      return "param";
    case Field::kSlot0:
      return optimizer == OptimizerKind::kAdamW ? "exp_avg" : "momentum_buffer";
    case Field::kSlot1:
      return "exp_avg_sq";
  }
  BALLAST_CHECK(false);
}

RecordLayout RecordLayout::For(const TensorSpec& tensor, const Chunk& chunk,
                               OptimizerKind optimizer) {
  RecordLayout layout;
  layout.block_elems = tensor.block_elems();
  layout.elem_count = chunk.elem_count();
  const uint64_t master = layout.elem_count * DTypeBytes(DType::kF32);
  const auto set = [&layout](Field field, uint64_t bytes) {
    layout.fields[static_cast<size_t>(field)].bytes = bytes;
  };
  if (tensor.served != DType::kF32) {
    set(Field::kServed, layout.elem_count * DTypeBytes(tensor.served));
  }
  set(Field::kParam, master);
  set(Field::kSlot0, master);
  if (optimizer == OptimizerKind::kAdamW) {
    set(Field::kSlot1, master);
  }
  layout.header_bytes =
      RoundUp(kFixedBytes + (FieldCount(layout) * layout.block_count() + 1) *
                                kDigestBytes,
              kFieldAlign);
  uint64_t end = layout.header_bytes;
  for (Place& place : layout.fields) {
    if (place.bytes == 0) {
      continue;
    }
    place.offset = RoundUp(end, kFieldAlign);
    end = place.offset + place.bytes;
    if (layout.prefix_bytes == 0) {  // The first field ends the prefix.
      end = layout.prefix_bytes = RoundUp(end, kPageBytes);
    }
  }
  layout.total_bytes = RoundUp(end, kPageBytes);
  return layout;
}

BlockDigests DigestFields(const RecordLayout& layout,
                          absl::Span<const std::byte> image) {
  BALLAST_CHECK(image.size() == layout.total_bytes);
  BlockDigests digests;
  digests.reserve(FieldCount(layout) * layout.block_count());
  for (const RecordLayout::Place& place : layout.fields) {
    for (uint64_t b = 0; place.bytes != 0 && b < layout.block_count(); ++b) {
      digests.push_back(DigestBlock(layout, place, b, image));
    }
  }
  return digests;
}

BlockDigests SealRecord(const RecordLayout& layout, const RecordId& id,
                        absl::Span<std::byte> image) {
  BlockDigests digests = DigestFields(layout, image);
  ByteWriter writer;
  for (const Hash128& digest : digests) {
    PutHash(digest, &writer);
  }
  std::string header = FixedHeader(layout, id) + writer.bytes();
  header.resize(layout.header_bytes - kDigestBytes, '\0');
  ByteWriter checksum;
  PutHash(HashBytes(header), &checksum);
  header += checksum.bytes();
  std::memcpy(image.data(), header.data(), header.size());
  // What lies between the fields would otherwise be whatever the buffer held.
  uint64_t end = layout.header_bytes;
  for (const RecordLayout::Place& place : layout.fields) {
    if (place.bytes != 0) {
      std::memset(image.data() + end, 0, place.offset - end);
      end = place.offset + place.bytes;
    }
  }
  std::memset(image.data() + end, 0, layout.total_bytes - end);
  return digests;
}

absl::Status CheckHeader(const RecordLayout& layout, const RecordId& expected,
                         absl::Span<const std::byte> image,
                         absl::string_view where) {
  BALLAST_CHECK(image.size() >= layout.header_bytes);
  const absl::string_view header(reinterpret_cast<const char*>(image.data()),
                                 layout.header_bytes);
  ByteReader reader(header);
  const auto magic = reader.Get<uint32_t>();
  const auto version = reader.Get<uint32_t>();
  const auto header_bytes = reader.Get<uint32_t>();
  if (magic != kMagic) {
    return absl::DataLossError(
        absl::StrCat(where, " holds no record: it starts with 0x",
                     absl::Hex(magic), ", want 0x", absl::Hex(kMagic)));
  }
  if (version != kFormatVersion) {
    return absl::DataLossError(absl::StrCat(
        where, " has record format ", version, ", want ", kFormatVersion));
  }
  // A record of another length is intact for all we know, but not this one.
  const uint64_t covered = layout.header_bytes - kDigestBytes;
  if (header_bytes != layout.header_bytes ||
      LoadHash(image.data() + covered) !=
          HashBytes(header.substr(0, covered))) {
    return absl::DataLossError(absl::StrCat(
        where, " has a damaged record header, or one of another chunk"));
  }
  const RecordId found = ParseId(header);
  if (found != expected) {
    return absl::DataLossError(absl::StrCat(
        where, " holds another record: ", Differences(found, expected)));
  }
  if (header.substr(0, kFixedBytes) != FixedHeader(layout, expected)) {
    return absl::DataLossError(
        absl::StrCat(where, " holds a record of another layout"));
  }
  return absl::OkStatus();
}

absl::Status CheckRecord(const RecordLayout& layout, const RecordId& expected,
                         absl::Span<const std::byte> image,
                         absl::string_view where) {
  const bool whole = image.size() == layout.total_bytes;
  BALLAST_CHECK(whole || image.size() == layout.prefix_bytes);
  BALLAST_RETURN_IF_ERROR(CheckHeader(layout, expected, image, where));
  const BlockDigests digests = ReadDigests(layout, image);
  size_t index = 0;
  for (int f = 0; f < kFieldCount; ++f) {
    const RecordLayout::Place& place = layout.fields[static_cast<size_t>(f)];
    if (place.bytes == 0) {
      continue;
    }
    if (!whole && f != static_cast<int>(layout.first_field())) {
      break;
    }
    for (uint64_t b = 0; b < layout.block_count(); ++b, ++index) {
      if (DigestBlock(layout, place, b, image) != digests[index]) {
        return absl::DataLossError(
            absl::StrCat(where, ": block ", b, " of field ", PlainFieldName(f),
                         " does not match its checksum"));
      }
    }
  }
  return absl::OkStatus();
}

BlockDigests ReadDigests(const RecordLayout& layout,
                         absl::Span<const std::byte> image) {
  BALLAST_CHECK(image.size() >= layout.header_bytes);
  BlockDigests digests(FieldCount(layout) * layout.block_count());
  for (size_t i = 0; i < digests.size(); ++i) {
    digests[i] = LoadHash(image.data() + kFixedBytes + i * kDigestBytes);
  }
  return digests;
}

uint64_t DigestIndex(const RecordLayout& layout, Field field, uint64_t block) {
  uint64_t fields_before = 0;
  for (size_t f = 0; f < static_cast<size_t>(field); ++f) {
    fields_before += layout.fields[f].bytes != 0 ? 1 : 0;
  }
  return fields_before * layout.block_count() + block;
}

}  // namespace ballast
