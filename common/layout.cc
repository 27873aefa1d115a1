// SPDX-License-Identifier: Apache-2.0
#include "common/layout.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

// Above these a decoder refuses instead of allocating what a message claims.
constexpr uint32_t kTensorsMax = 1u << 20;
constexpr uint64_t kElemsMax = uint64_t{1} << 48;
constexpr uint64_t kChunksMax = uint64_t{1} << 22;

absl::Status ValidateTensor(const TensorSpec& tensor) {
  if (tensor.name.empty() || tensor.shape.empty() || tensor.use_count == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", tensor.name, "' has no name, shape or use"));
  }
  if (tensor.shape.size() > 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", tensor.name, "' has ", tensor.shape.size(),
                     " dimensions; want 1 or 2"));
  }
  if (!(tensor.init_std >= 0.0 && std::isfinite(tensor.init_std))) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", tensor.name, "' has an init_std of ",
                     tensor.init_std, "; want 0 or more"));
  }
  uint64_t elems = 1;
  for (const uint64_t dim : tensor.shape) {
    if (dim == 0 || dim > kElemsMax / elems) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", tensor.name, "' has a dimension of ", dim,
                       "; want 1 to 2^48 elements in all"));
    }
    elems *= dim;
  }
  return absl::OkStatus();
}

// Elements of every chunk of `tensor` but the last.
uint64_t ChunkStep(const TensorSpec& tensor, uint64_t chunk_elems) {
  const uint64_t block = tensor.block_elems();
  return std::max(block, chunk_elems / block * block);
}

}  // namespace

uint64_t TensorSpec::elem_count() const {
  uint64_t elems = 1;
  for (const uint64_t dim : shape) {
    elems *= dim;
  }
  return elems;
}

uint64_t TensorSpec::block_elems() const {
  if (!by_rows) {
    return kBlockElems;
  }
  const uint64_t row = elem_count() / shape[0];
  return std::max<uint64_t>(1, kBlockElems / row) * row;
}

uint64_t TensorSpec::block_count() const {
  return (elem_count() + block_elems() - 1) / block_elems();
}

uint64_t ModelLayout::parameter_count() const {
  uint64_t elems = 0;
  for (const TensorSpec& tensor : tensors) {
    elems += tensor.elem_count();
  }
  return elems;
}

uint64_t ModelLayout::served_bytes() const {
  uint64_t bytes = 0;
  for (const TensorSpec& tensor : tensors) {
    bytes += tensor.elem_count() * DTypeBytes(tensor.served);
  }
  return bytes;
}

absl::Status ModelLayout::Validate() const {
  if (tensors.empty() || units.empty()) {
    return absl::InvalidArgumentError("a model needs a tensor and a unit");
  }
  std::set<std::string> names;
  uint64_t uses_wanted = 0;
  uint64_t elems = 0;
  for (const TensorSpec& tensor : tensors) {
    BALLAST_RETURN_IF_ERROR(ValidateTensor(tensor));
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", tensor.name, "' is declared twice"));
    }
    uses_wanted += tensor.use_count;
    elems += tensor.elem_count();
    if (elems > kElemsMax) {
      return absl::InvalidArgumentError(
          "the model has more than 2^48 parameters");
    }
  }
  std::set<std::pair<uint32_t, uint32_t>> uses;
  for (const UnitSpec& unit : units) {
    if (unit.tensors.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("unit '", unit.name, "' has no tensor"));
    }
    for (const TensorUse& use : unit.tensors) {
      if (use.tensor >= tensors.size() ||
          use.use >= tensors[use.tensor].use_count ||
          !uses.insert({use.tensor, use.use}).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("unit '", unit.name,
                         "' has a tensor or use that does "
                         "not exist or is listed twice"));
      }
    }
  }
  if (uses.size() != uses_wanted) {
    return absl::InvalidArgumentError("a tensor has a use that no unit lists");
  }
  return absl::OkStatus();
}

std::string ModelLayout::Encode() const {
  ByteWriter writer;
  writer.Put(static_cast<uint32_t>(tensors.size()));
  for (const TensorSpec& tensor : tensors) {
    writer.PutString(tensor.name);
    writer.Put(static_cast<uint32_t>(tensor.shape.size()));
    for (const uint64_t dim : tensor.shape) {
      writer.Put(dim);
    }
    writer.Put(static_cast<uint8_t>(tensor.init));
    writer.Put(tensor.init_std);
    writer.Put(static_cast<uint8_t>(tensor.decay ? 1 : 0));
    writer.Put(static_cast<uint8_t>(tensor.by_rows ? 1 : 0));
    writer.Put(tensor.use_count);
    writer.Put(static_cast<uint8_t>(tensor.served));
  }
  writer.Put(static_cast<uint32_t>(units.size()));
  for (const UnitSpec& unit : units) {
    writer.PutString(unit.name);
    writer.Put(static_cast<uint32_t>(unit.tensors.size()));
    for (const TensorUse& use : unit.tensors) {
      writer.Put(use.tensor);
      writer.Put(use.use);
    }
  }
  return writer.Take();
}

absl::StatusOr<ModelLayout> ModelLayout::Decode(absl::string_view bytes) {
  const absl::Status damaged =
      absl::InvalidArgumentError("the model layout is cut short or damaged");
  ByteReader reader(bytes);
  ModelLayout layout;
  const auto tensor_count = reader.Get<uint32_t>();
  if (tensor_count > kTensorsMax) {
    return damaged;
  }
  for (uint32_t i = 0; i < tensor_count && reader.ok(); ++i) {
    TensorSpec tensor;
    tensor.name = reader.GetString();
    const auto dims = reader.Get<uint32_t>();
    if (dims > 2) {
      return damaged;
    }
    for (uint32_t d = 0; d < dims; ++d) {
      tensor.shape.push_back(reader.Get<uint64_t>());
    }
    const auto init = reader.Get<uint8_t>();
    tensor.init_std = reader.Get<double>();
    const auto decay = reader.Get<uint8_t>();
    const auto by_rows = reader.Get<uint8_t>();
    tensor.use_count = reader.Get<uint32_t>();
    const auto served = reader.Get<uint8_t>();
    if (init > 2 || decay > 1 || by_rows > 1 || served > 1) {
      return damaged;
    }
    tensor.decay = decay == 1;
    tensor.by_rows = by_rows == 1;
    tensor.init = static_cast<Init>(init);
    tensor.served = static_cast<DType>(served);
    layout.tensors.push_back(std::move(tensor));
  }
  const auto unit_count = reader.Get<uint32_t>();
  if (unit_count > kTensorsMax) {
    return damaged;
  }
  for (uint32_t i = 0; i < unit_count && reader.ok(); ++i) {
    UnitSpec unit;
    unit.name = reader.GetString();
    const auto use_count = reader.Get<uint32_t>();
    for (uint32_t u = 0; u < use_count && reader.ok(); ++u) {
      TensorUse use;
      use.tensor = reader.Get<uint32_t>();
      use.use = reader.Get<uint32_t>();
      unit.tensors.push_back(use);
    }
    layout.units.push_back(std::move(unit));
  }
  if (!reader.ok() || reader.remaining() != 0) {
    return damaged;
  }
  BALLAST_RETURN_IF_ERROR(layout.Validate());
  return layout;
}

absl::StatusOr<ChunkTable> ChunkTable::Build(const ModelLayout& layout,
                                             uint64_t chunk_elems) {
  if (chunk_elems == 0) {
    return absl::InvalidArgumentError(
        "server.chunk_elems is 0; want at least 1");
  }
  BALLAST_RETURN_IF_ERROR(layout.Validate());
  uint64_t chunk_count = 0;
  for (const TensorSpec& tensor : layout.tensors) {
    chunk_count += tensor.elem_count() / ChunkStep(tensor, chunk_elems) + 1;
  }
  if (chunk_count > kChunksMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("server.chunk_elems is ", chunk_elems, ", which makes ",
                     chunk_count, " chunks; raise it: want at most 2^22"));
  }
  ChunkTable table;
  table.layout_ = layout;
  table.by_tensor_.resize(layout.tensors.size());
  for (const UnitSpec& unit : layout.units) {
    for (const TensorUse& use : unit.tensors) {
      std::vector<uint32_t>& ids = table.by_tensor_[use.tensor];
      if (!ids.empty()) {
        continue;  // An earlier unit already reads this tensor.
      }
      const TensorSpec& tensor = layout.tensors[use.tensor];
      const uint64_t step = ChunkStep(tensor, chunk_elems);
      for (uint64_t begin = 0; begin < tensor.elem_count(); begin += step) {
        const auto id = static_cast<uint32_t>(table.chunks_.size());
        ids.push_back(id);
        table.chunks_.push_back({id, use.tensor, begin,
                                 std::min(begin + step, tensor.elem_count())});
      }
    }
  }
  const TensorUse& loss = layout.units.back().tensors.front();
  table.loss_chunk_ = table.by_tensor_[loss.tensor].front();
  table.loss_use_ = loss.use;
  return table;
}

uint64_t ChunkTable::served_bytes(uint32_t id) const {
  return chunks_[id].elem_count() * DTypeBytes(tensor_of(id).served);
}

}  // namespace ballast
