// SPDX-License-Identifier: Apache-2.0
// What a model is to everyone but its family: named tensors, the units they
// are fetched in, and the chunks they are cut into. Workers declare it when
// they join; servers and the coordinator know a model by it alone.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/dtype.h"

namespace ballast {

// Elements in a block of a tensor that is not used by rows. Sums, checksums
// and state_hash leaves are per block, counted from the start of the tensor,
// so that chunk size and placement change no bit of them.
#ifdef BALLAST_SMALL_BLOCKS  // The simulator's build: many in a small tensor.
inline constexpr uint64_t kBlockElems = 64;
#else
inline constexpr uint64_t kBlockElems = uint64_t{64} << 10;
#endif

enum class Init : uint8_t { kZeros = 0, kOnes = 1, kNormal = 2 };

struct TensorSpec {
  std::string name;             // As the family's files name it.
  std::vector<uint64_t> shape;  // Row-major; 1 or 2 dimensions.
  Init init = Init::kZeros;
  double init_std = 0.0;       // Of kNormal, mean 0.
  bool decay = false;          // Weight decay applies (matrices).
  bool by_rows = false;        // Blocks and chunks are whole rows (tables).
  uint32_t use_count = 1;      // Places where it enters the model.
  DType served = DType::kF32;  // What workers fetch; masters are fp32.

  uint64_t elem_count() const;
  // Elements of one block: kBlockElems, or the most whole rows that fit in it
  // (at least one) when by_rows.
  uint64_t block_elems() const;
  uint64_t block_count() const;  // The last block may be shorter.
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

// One place where a unit reads a tensor.
struct TensorUse {
  uint32_t tensor = 0;  // Index into ModelLayout::tensors.
  uint32_t use = 0;     // Below that tensor's use_count.
  friend bool operator==(const TensorUse&, const TensorUse&) = default;
};

// Tensors that are fetched together. The order of units is forward order.
struct UnitSpec {
  std::string name;
  std::vector<TensorUse> tensors;
  friend bool operator==(const UnitSpec&, const UnitSpec&) = default;
};

struct ModelLayout {
  std::vector<TensorSpec> tensors;
  std::vector<UnitSpec> units;

  uint64_t parameter_count() const;
  uint64_t served_bytes() const;  // Of all tensors, each once.
  // Every (tensor, use) occurs in exactly one unit; shapes are not empty.
  // Errors: INVALID_ARGUMENT  names the first tensor or unit that is not so.
  absl::Status Validate() const;
  // Canonical bytes, for equality, hashing and the join message.
  std::string Encode() const;
  // Errors: INVALID_ARGUMENT  the bytes are no layout, or it is not valid.
  static absl::StatusOr<ModelLayout> Decode(absl::string_view bytes);
  friend bool operator==(const ModelLayout&, const ModelLayout&) = default;
};

// Elements [begin, end) of one tensor: the unit of placement, transfer,
// versions, checksums and tiers.
struct Chunk {
  uint32_t id = 0;
  uint32_t tensor = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t elem_count() const { return end - begin; }
};

// All chunks of a model. Ids count from 0 in forward order: by the first unit
// that reads the tensor, then by position in it. Immutable; thread-safe.
class ChunkTable {
 public:
  // Cuts every tensor into chunks of whole blocks, at most `chunk_elems` long
  // (at least one block).
  // Errors: INVALID_ARGUMENT  chunk_elems is 0, or the layout is not valid.
  static absl::StatusOr<ChunkTable> Build(const ModelLayout& layout,
                                          uint64_t chunk_elems);

  const ModelLayout& layout() const { return layout_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }
  const Chunk& chunk(uint32_t id) const { return chunks_[id]; }
  const TensorSpec& tensor_of(uint32_t id) const {
    return layout_.tensors[chunks_[id].tensor];
  }
  // Ids of the chunks of a tensor: consecutive, ascending.
  const std::vector<uint32_t>& chunks_of_tensor(uint32_t tensor) const {
    return by_tensor_[tensor];
  }
  // Bytes that a fetch of the chunk carries.
  uint64_t served_bytes(uint32_t id) const;
  // The chunk and use whose push carries the step's loss: the first chunk of
  // the first use in the last unit.
  uint32_t loss_chunk() const { return loss_chunk_; }
  uint32_t loss_use() const { return loss_use_; }

 private:
  ModelLayout layout_;
  std::vector<Chunk> chunks_;
  std::vector<std::vector<uint32_t>> by_tensor_;
  uint32_t loss_chunk_ = 0;
  uint32_t loss_use_ = 0;
};

}  // namespace ballast
