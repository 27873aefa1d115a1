// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "storage/checkpoint.h"
#include "storage/disk.h"

namespace ballast {
namespace {

// A record of the manifest and, once its header was read, what that says.
struct OpenRecord {
  ManifestRecord place;
  RecordLayout layout;
  RecordId id;
  std::optional<BlockDigests> digests;
};

class CheckpointReaderImpl final : public CheckpointReader {
 public:
  explicit CheckpointReaderImpl(const CheckpointManifest& manifest)
      : layout_(manifest.layout),
        optimizer_(manifest.optimizer),
        slabs_(manifest.directories.size()),
        records_(manifest.layout.tensors.size()) {}

  absl::Status Open(Disk* disk, const CheckpointManifest& manifest);
  absl::Status Read(uint32_t tensor, Field field, uint64_t begin,
                    absl::Span<float> out) override;
  absl::StatusOr<Hash128> Verify() override;

 private:
  std::string Where(const OpenRecord& record) const {
    return absl::StrCat(slabs_[record.place.directory]->path(), " at ",
                        record.place.extent.offset, " (tensor '",
                        layout_.tensors[record.place.tensor].name, "')");
  }
  absl::Status ReadHeader(OpenRecord* record);
  // Elements [begin, end) of the record's tensor, all within the record.
  absl::Status ReadBlocks(OpenRecord* record, Field field, uint64_t begin,
                          absl::Span<float> out);

  const ModelLayout layout_;
  const OptimizerKind optimizer_;
  std::vector<std::unique_ptr<DiskFile>> slabs_;  // By directory.
  // By tensor, then by first element.
  std::vector<std::map<uint64_t, OpenRecord>> records_;
};

absl::Status CheckpointReaderImpl::Open(Disk* disk,
                                        const CheckpointManifest& manifest) {
  for (const ManifestRecord& place : manifest.records) {
    const TensorSpec& tensor = layout_.tensors[place.tensor];
    std::unique_ptr<DiskFile>& slab = slabs_[place.directory];
    if (slab == nullptr) {
      auto opened =
          disk->OpenForRead(manifest.directories[place.directory] + "/slab");
      if (!opened.ok()) {
        return absl::Status(
            opened.status().code(),
            absl::StrCat(opened.status().message(), "; it holds tensor '",
                         tensor.name, "' of the checkpoint"));
      }
      slab = *std::move(opened);
    }
    BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, slab->Bytes());
    if (place.extent.bytes > bytes ||
        place.extent.offset > bytes - place.extent.bytes) {
      return absl::DataLossError(absl::StrCat(
          slab->path(), " is ", bytes, " bytes long and cannot hold tensor '",
          tensor.name, "' [", place.begin, ", ", place.end, ") at ",
          place.extent.offset, " (", place.extent.bytes, " bytes)"));
    }
    OpenRecord record;
    record.place = place;
    record.layout = RecordLayout::For(
        tensor, {0, place.tensor, place.begin, place.end}, optimizer_);
    record.id = {manifest.run,           place.timeline, place.version,
                 HashBytes(tensor.name), place.begin,    place.end};
    records_[place.tensor].emplace(place.begin, std::move(record));
  }
  return absl::OkStatus();
}

absl::Status CheckpointReaderImpl::ReadHeader(OpenRecord* record) {
  if (record->digests) {
    return absl::OkStatus();
  }
  std::vector<std::byte> header(record->layout.header_bytes);
  BALLAST_RETURN_IF_ERROR(slabs_[record->place.directory]->Read(
      record->place.extent.offset, absl::MakeSpan(header)));
  BALLAST_RETURN_IF_ERROR(
      CheckHeader(record->layout, record->id, header, Where(*record)));
  record->digests = ReadDigests(record->layout, header);
  return absl::OkStatus();
}

absl::Status CheckpointReaderImpl::ReadBlocks(OpenRecord* record, Field field,
                                              uint64_t begin,
                                              absl::Span<float> out) {
  BALLAST_RETURN_IF_ERROR(ReadHeader(record));
  const RecordLayout& layout = record->layout;
  const uint64_t skip = begin - record->place.begin;
  BALLAST_RETURN_IF_ERROR(slabs_[record->place.directory]->Read(
      record->place.extent.offset + layout.at(field).offset +
          skip * sizeof(float),
      {reinterpret_cast<std::byte*>(out.data()), out.size() * sizeof(float)}));
  for (uint64_t at = 0; at < out.size(); at += layout.block_elems) {
    const uint64_t block = (skip + at) / layout.block_elems;
    const uint64_t elems =
        std::min<uint64_t>(layout.block_elems, out.size() - at);
    if (HashBytes(out.data() + at, elems * sizeof(float)) !=
        (*record->digests)[DigestIndex(layout, field, block)]) {
      return absl::DataLossError(absl::StrCat(
          Where(*record), ": block ", block, " of field ",
          FieldName(field, optimizer_), " does not match its checksum"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckpointReaderImpl::Read(uint32_t tensor, Field field,
                                        uint64_t begin, absl::Span<float> out) {
  if (tensor >= records_.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the checkpoint has ", records_.size(), " tensors, no ", tensor));
  }
  const TensorSpec& spec = layout_.tensors[tensor];
  const uint64_t elems = spec.elem_count();
  const uint64_t block = spec.block_elems();
  const uint64_t end = begin + out.size();
  if (out.size() > elems || begin > elems - out.size() || begin % block != 0 ||
      (end % block != 0 && end != elems)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "[", begin, ", ", end, ") of tensor '", spec.name, "' (", elems,
        " elements) is no range of whole blocks of ", block));
  }
  if (field == Field::kServed ||
      records_[tensor].begin()->second.layout.at(field).bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", spec.name, "' has no fp32 field ",
                     FieldName(field, optimizer_), " in the checkpoint"));
  }
  uint64_t at = begin;
  while (at < end) {
    OpenRecord& record = std::prev(records_[tensor].upper_bound(at))->second;
    const uint64_t part = std::min(end, record.place.end) - at;
    BALLAST_RETURN_IF_ERROR(
        ReadBlocks(&record, field, at, out.subspan(at - begin, part)));
    at += part;
  }
  return absl::OkStatus();
}

absl::StatusOr<Hash128> CheckpointReaderImpl::Verify() {
  std::vector<BlockDigests> digests(layout_.tensors.size());
  std::vector<std::byte> image;
  for (size_t t = 0; t < records_.size(); ++t) {
    for (const auto& [begin, record] : records_[t]) {
      image.resize(record.layout.total_bytes);
      BALLAST_RETURN_IF_ERROR(slabs_[record.place.directory]->Read(
          record.place.extent.offset, absl::MakeSpan(image)));
      BALLAST_RETURN_IF_ERROR(
          CheckRecord(record.layout, record.id, image, Where(record)));
      PlaceDigests(layout_.tensors[t], begin, record.layout,
                   ReadDigests(record.layout, image), &digests[t]);
    }
  }
  return StateHash(layout_, digests);
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(
    const CheckpointManifest& manifest, Disk* disk) {
  auto reader = std::make_unique<CheckpointReaderImpl>(manifest);
  BALLAST_RETURN_IF_ERROR(reader->Open(disk, manifest));
  return std::unique_ptr<CheckpointReader>(std::move(reader));
}

}  // namespace ballast
