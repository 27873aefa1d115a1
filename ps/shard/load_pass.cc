// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/load_pass.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/crash_point.h"
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

}  // namespace

absl::Status LoadPass::OpenManifest(OptimizerKind optimizer,
                                    const ModelLayout& layout) {
  BALLAST_ASSIGN_OR_RETURN(manifest_,
                           ReadManifest(options_.manifest, options_.disk));
  if (manifest_->step != options_.step) {
    return absl::InvalidArgumentError(
        absl::StrCat(options_.manifest, " is of step ", manifest_->step,
                     "; want ", options_.step));
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
          absl::StrCat(options_.manifest, " does not hold ", tensor.name,
                       " in this shape with this optimizer's state"));
    }
  }
  std::map<uint64_t, uint64_t> held;  // Extents of our store's checkpoints.
  for (const StoredCheckpoint& stored : options_.slab->checkpoints()) {
    for (const CheckpointEntry& entry : stored.entries) {
      held[entry.extent.offset] = entry.extent.bytes;
    }
  }
  for (const ManifestRecord& record : manifest_->records) {
    const auto found = held.find(record.extent.offset);
    if (manifest_->run == options_.run && found != held.end() &&
        found->second == record.extent.bytes &&
        manifest_->directories[record.directory] == options_.data_dir) {
      own_[{record.tensor, record.begin}] = &record;
    }
  }
  BALLAST_ASSIGN_OR_RETURN(reader_,
                           CheckpointReader::Open(*manifest_, options_.disk));
  return absl::OkStatus();
}

bool LoadPass::Adopt(ChunkState* chunk) {
  const uint32_t tensor = tensors_.at(chunk->tensor->name);
  const auto found = own_.find({tensor, chunk->chunk.begin});
  if (found == own_.end() || found->second->end != chunk->chunk.end ||
      found->second->extent.bytes != chunk->layout.total_bytes ||
      manifest_->layout.tensors[tensor].served != chunk->tensor->served ||
      (options_.exact && found->second->version != options_.step)) {
    return false;
  }
  chunk->data_version = found->second->version;
  chunk->data_timeline = found->second->timeline;
  options_.chunks->Adopt(chunk, found->second->extent);
  if (chunk->resident) {
    options_.chunks->FillResident(chunk);
  }
  return true;
}

absl::Status LoadPass::Fill(const ChunkState& chunk, const Image& image) {
  std::memset(image.buffer.data(), 0, image.bytes);
  if (!manifest_) {
    FillInitial(*chunk.tensor, options_.seed, chunk.chunk.begin,
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

absl::StatusOr<bool> LoadPass::Load(ChunkState* chunk) {
  chunk->version = options_.step;
  chunk->data_version = options_.step;
  chunk->data_timeline = options_.timeline;
  if (manifest_ && Adopt(chunk)) {
    return true;
  }
  if (chunk->tier == Tier::kWhole) {
    chunk->resident->ready = true;
    BALLAST_RETURN_IF_ERROR(Fill(*chunk, *chunk->resident));
    return true;
  }
  BALLAST_ASSIGN_OR_RETURN(SharedExtent extent,
                           options_.chunks->TakeExtent(*chunk));
  auto image = std::make_shared<Image>();
  image->bytes = chunk->layout.total_bytes;
  image->buffer = options_.chunks->TakeWindow(
      image->bytes, "chunks being loaded", ChunkStore::Need::kNow);
  if (!image->buffer) {
    return false;
  }
  BALLAST_RETURN_IF_ERROR(Fill(*chunk, *image));
  image->ready = true;
  chunk->window = image;
  options_.chunks->Write(chunk, image, std::move(extent));
  if (chunk->tier == Tier::kWeights) {
    std::memcpy(chunk->resident->buffer.data(), image->buffer.data(),
                chunk->layout.prefix_bytes);
    chunk->resident->ready = true;
  }
  return true;
}

absl::Status LoadPass::Start(OptimizerKind optimizer,
                             const ModelLayout& layout) {
  return options_.manifest.empty() ? absl::OkStatus()
                                   : OpenManifest(optimizer, layout);
}

absl::Status LoadPass::Work(bool* worked) {
  *worked = false;
  if (next_ < options_.places.size()) {
    BALLAST_CRASH_POINT("server.load.chunk");
    BALLAST_ASSIGN_OR_RETURN(
        *worked, Load(&options_.chunks->chunks()[options_.places[next_]]));
    next_ += *worked ? 1 : 0;
  }
  return absl::OkStatus();
}

bool LoadPass::IsDone() const {
  return next_ == options_.places.size() && options_.chunks->in_flight() == 0;
}

}  // namespace ballast
