// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/chunk_loader.h"

#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/initial_value.h"
#include "common/status_macros.h"
#include "kernels/update.h"

namespace ballast {
namespace {

absl::Span<float> Floats(const ChunkState& chunk, const Image& image,
                         Field field) {
  const RecordLayout::Place& place = chunk.layout.at(field);
  return {reinterpret_cast<float*>(image.buffer.data() + place.offset),
          place.bytes / sizeof(float)};
}

void CastServed(const ChunkState& chunk, const Image& image) {
  const RecordLayout::Place& place = chunk.layout.at(Field::kServed);
  if (place.bytes > 0) {
    CastToBF16Cpu(
        Floats(chunk, image, Field::kParam),
        {reinterpret_cast<uint16_t*>(image.buffer.data() + place.offset),
         place.bytes / sizeof(uint16_t)});
  }
}

class Loader {
 public:
  Loader(const LoadRequest& request, ChunkStore* chunks)
      : request_(request), chunks_(chunks) {}

  absl::Status Run(OptimizerKind optimizer, const ModelLayout& layout);

 private:
  absl::Status OpenManifest(OptimizerKind optimizer, const ModelLayout& layout);
  absl::Status Load(ChunkState* chunk);
  // True when the checkpoint's record of the chunk is in our slab.
  bool Adopt(ChunkState* chunk);
  absl::Status Fill(const ChunkState& chunk, const Image& image);
  // Runs what the disk has done until `done`.
  absl::Status WaitUntil(const std::function<bool()>& done);

  const LoadRequest& request_;
  ChunkStore* const chunks_;
  std::optional<CheckpointManifest> manifest_;
  std::unique_ptr<CheckpointReader> reader_;
  std::map<std::string, uint32_t> tensors_;  // Of the manifest, by name.
  // Records of our own slab that a checkpoint of the store names:
  // (tensor of the manifest, begin) to the record.
  std::map<std::pair<uint32_t, uint64_t>, const ManifestRecord*> own_;
};

absl::Status Loader::WaitUntil(const std::function<bool()>& done) {
  while (!done()) {
    request_.mailbox->Run(absl::Milliseconds(100));
    BALLAST_RETURN_IF_ERROR(request_.failure());
  }
  return absl::OkStatus();
}

absl::Status Loader::OpenManifest(OptimizerKind optimizer,
                                  const ModelLayout& layout) {
  BALLAST_ASSIGN_OR_RETURN(manifest_, ReadManifest(request_.manifest));
  if (manifest_->step != request_.step) {
    return absl::InvalidArgumentError(
        absl::StrCat(request_.manifest, " is of step ", manifest_->step,
                     "; want ", request_.step));
  }
  for (uint32_t i = 0; i < manifest_->layout.tensors.size(); ++i) {
    tensors_[manifest_->layout.tensors[i].name] = i;
  }
  for (const TensorSpec& tensor : layout.tensors) {
    const auto found = tensors_.find(tensor.name);
    if (found == tensors_.end() ||
        manifest_->layout.tensors[found->second].shape != tensor.shape ||
        manifest_->optimizer != optimizer) {
      return absl::InvalidArgumentError(
          absl::StrCat(request_.manifest, " does not hold ", tensor.name,
                       " in this shape with this optimizer's state"));
    }
  }
  std::map<uint64_t, uint64_t> held;  // Extents of our store's checkpoints.
  for (const StoredCheckpoint& stored : request_.slab->checkpoints()) {
    for (const CheckpointEntry& entry : stored.entries) {
      held[entry.extent.offset] = entry.extent.bytes;
    }
  }
  for (const ManifestRecord& record : manifest_->records) {
    const auto found = held.find(record.extent.offset);
    if (manifest_->run == request_.run && found != held.end() &&
        found->second == record.extent.bytes &&
        manifest_->directories[record.directory] == request_.data_dir) {
      own_[{record.tensor, record.begin}] = &record;
    }
  }
  BALLAST_ASSIGN_OR_RETURN(reader_, CheckpointReader::Open(*manifest_));
  return absl::OkStatus();
}

bool Loader::Adopt(ChunkState* chunk) {
  const uint32_t tensor = tensors_.at(chunk->tensor->name);
  const auto found = own_.find({tensor, chunk->chunk.begin});
  if (found == own_.end() || found->second->end != chunk->chunk.end ||
      found->second->extent.bytes != chunk->layout.total_bytes ||
      manifest_->layout.tensors[tensor].served != chunk->tensor->served) {
    return false;
  }
  chunk->data_version = found->second->version;
  chunk->data_timeline = found->second->timeline;
  chunks_->Adopt(chunk, found->second->extent);
  if (chunk->resident) {
    chunks_->FillResident(chunk);
  }
  return true;
}

absl::Status Loader::Fill(const ChunkState& chunk, const Image& image) {
  std::memset(image.buffer.data(), 0, image.bytes);
  if (!manifest_) {
    FillInitial(*chunk.tensor, request_.seed, chunk.chunk.begin,
                Floats(chunk, image, Field::kParam));
  } else {
    for (const Field field : {Field::kParam, Field::kSlot0, Field::kSlot1}) {
      const absl::Span<float> out = Floats(chunk, image, field);
      if (!out.empty()) {
        BALLAST_RETURN_IF_ERROR(reader_->Read(tensors_.at(chunk.tensor->name),
                                              field, chunk.chunk.begin, out));
      }
    }
  }
  CastServed(chunk, image);
  return absl::OkStatus();
}

absl::Status Loader::Load(ChunkState* chunk) {
  chunk->version = request_.step;
  chunk->data_version = request_.step;
  chunk->data_timeline = request_.timeline;
  if (manifest_ && Adopt(chunk)) {
    return absl::OkStatus();
  }
  if (chunk->tier == Tier::kWhole) {
    chunk->resident->ready = true;
    return Fill(*chunk, *chunk->resident);
  }
  auto image = std::make_shared<Image>();
  image->bytes = chunk->layout.total_bytes;
  BALLAST_RETURN_IF_ERROR(WaitUntil([&] {
    image->buffer = chunks_->TakeWindow(image->bytes, "chunks being loaded",
                                        ChunkStore::Need::kNow);
    return static_cast<bool>(image->buffer);
  }));
  BALLAST_RETURN_IF_ERROR(Fill(*chunk, *image));
  image->ready = true;
  chunk->window = image;
  BALLAST_RETURN_IF_ERROR(chunks_->Write(chunk, image, [] {}));
  if (chunk->tier == Tier::kWeights) {
    std::memcpy(chunk->resident->buffer.data(), image->buffer.data(),
                chunk->layout.prefix_bytes);
    chunk->resident->ready = true;
  }
  return absl::OkStatus();
}

absl::Status Loader::Run(OptimizerKind optimizer, const ModelLayout& layout) {
  if (!request_.manifest.empty()) {
    BALLAST_RETURN_IF_ERROR(OpenManifest(optimizer, layout));
  }
  for (ChunkState& chunk : chunks_->chunks()) {
    BALLAST_RETURN_IF_ERROR(Load(&chunk));
    request_.mailbox->Run(absl::ZeroDuration());
    BALLAST_RETURN_IF_ERROR(request_.failure());
  }
  return WaitUntil([this] { return chunks_->in_flight() == 0; });
}

}  // namespace

absl::Status LoadChunks(const LoadRequest& request, OptimizerKind optimizer,
                        const ModelLayout& layout, ChunkStore* chunks) {
  return Loader(request, chunks).Run(optimizer, layout);
}

}  // namespace ballast
