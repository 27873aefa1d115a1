// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/placement.h"

#include <algorithm>

#include "common/check.h"

namespace ballast {
namespace {

// Ids of the chunks that each unit is the first to read, largest first: the
// small ones then fill what the large ones left uneven.
std::vector<std::vector<uint32_t>> ChunksByUnit(
    const ChunkTable& table, const std::vector<uint64_t>& bytes) {
  std::vector<bool> seen(table.layout().tensors.size(), false);
  std::vector<std::vector<uint32_t>> units;
  for (const UnitSpec& unit : table.layout().units) {
    std::vector<uint32_t>& ids = units.emplace_back();
    for (const TensorUse& use : unit.tensors) {
      if (!seen[use.tensor]) {
        seen[use.tensor] = true;
        const std::vector<uint32_t>& chunks =
            table.chunks_of_tensor(use.tensor);
        ids.insert(ids.end(), chunks.begin(), chunks.end());
      }
    }
    std::stable_sort(ids.begin(), ids.end(), [&bytes](uint32_t a, uint32_t b) {
      return bytes[a] > bytes[b];
    });
  }
  return units;
}

}  // namespace

uint32_t HashedFields(OptimizerKind optimizer) {
  return optimizer == OptimizerKind::kAdamW ? 3 : 2;
}

uint64_t StateBytesPerElem(const TensorSpec& tensor, OptimizerKind optimizer) {
  const uint64_t copy =
      tensor.served == DType::kF32 ? 0 : DTypeBytes(tensor.served);
  return uint64_t{HashedFields(optimizer)} * DTypeBytes(DType::kF32) + copy;
}

uint64_t StateBytes(const ModelLayout& layout, OptimizerKind optimizer) {
  uint64_t bytes = 0;
  for (const TensorSpec& tensor : layout.tensors) {
    bytes += tensor.elem_count() * StateBytesPerElem(tensor, optimizer);
  }
  return bytes;
}

std::vector<uint32_t> PlaceChunks(const ChunkTable& table,
                                  OptimizerKind optimizer, uint32_t servers) {
  BALLAST_CHECK(servers >= 1);
  std::vector<uint64_t> bytes;
  uint64_t largest = 0;
  for (const Chunk& chunk : table.chunks()) {
    bytes.push_back(chunk.elem_count() *
                    StateBytesPerElem(table.tensor_of(chunk.id), optimizer));
    largest = std::max(largest, bytes.back());
  }
  const uint64_t mean = StateBytes(table.layout(), optimizer) / servers;
  // A server may run ahead of the emptiest one by this much and no more; the
  // emptiest can always take any chunk, so there is always a choice.
  const uint64_t slack = std::max(largest, mean / 20);

  std::vector<uint32_t> owner(bytes.size(), 0);
  std::vector<uint64_t> total(servers, 0);
  for (const std::vector<uint32_t>& unit : ChunksByUnit(table, bytes)) {
    std::vector<uint64_t> of_unit(servers, 0);
    for (const uint32_t id : unit) {
      const uint64_t emptiest = *std::min_element(total.begin(), total.end());
      uint32_t best = servers;
      for (uint32_t s = 0; s < servers; ++s) {
        if (total[s] + bytes[id] > emptiest + slack) {
          continue;
        }
        // Least of this unit, then least of all, then the lower index.
        if (best == servers || of_unit[s] < of_unit[best] ||
            (of_unit[s] == of_unit[best] && total[s] < total[best])) {
          best = s;
        }
      }
      owner[id] = best;
      total[best] += bytes[id];
      of_unit[best] += bytes[id];
    }
  }
  return owner;
}

}  // namespace ballast
