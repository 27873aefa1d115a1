// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::ballast::testing::SmallLayout;

ChunkTable TableOf(const ModelLayout& layout, uint64_t chunk_elems) {
  return *ChunkTable::Build(layout, chunk_elems);
}

std::vector<uint64_t> BytesPerServer(const ChunkTable& table,
                                     const std::vector<uint32_t>& owner,
                                     uint32_t servers) {
  std::vector<uint64_t> bytes(servers, 0);
  for (const Chunk& chunk : table.chunks()) {
    bytes[owner[chunk.id]] +=
        chunk.elem_count() *
        StateBytesPerElem(table.tensor_of(chunk.id), OptimizerKind::kAdamW);
  }
  return bytes;
}

TEST(PlacementTest, CountsEveryFieldOfAnElement) {
  TensorSpec tensor;
  EXPECT_EQ(StateBytesPerElem(tensor, OptimizerKind::kAdamW), 12u);
  EXPECT_EQ(StateBytesPerElem(tensor, OptimizerKind::kSgd), 8u);
  tensor.served = DType::kBF16;
  EXPECT_EQ(StateBytesPerElem(tensor, OptimizerKind::kAdamW), 14u);
}

TEST(PlacementTest, StateBytesAreThoseOfAllTensors) {
  const ModelLayout layout = SmallLayout(2);
  EXPECT_EQ(StateBytes(layout, OptimizerKind::kAdamW),
            layout.parameter_count() * 12);
}

TEST(PlacementTest, BalancesToFivePercentOrOneChunk) {
  for (const uint32_t blocks : {1u, 7u, 32u}) {
    for (const uint64_t chunk_elems : {kBlockElems, 4 * kBlockElems}) {
      const ChunkTable table = TableOf(SmallLayout(blocks), chunk_elems);
      for (const uint32_t servers : {1u, 2u, 3u, 5u}) {
        const std::vector<uint32_t> owner =
            PlaceChunks(table, OptimizerKind::kAdamW, servers);
        ASSERT_EQ(owner.size(), table.chunks().size());
        const std::vector<uint64_t> bytes =
            BytesPerServer(table, owner, servers);
        const auto [low, high] =
            std::minmax_element(bytes.begin(), bytes.end());
        const uint64_t mean =
            StateBytes(table.layout(), OptimizerKind::kAdamW) / servers;
        EXPECT_LE(*high - *low, std::max(mean / 20, 4 * kBlockElems * 12))
            << blocks << " blocks, " << servers << " servers";
      }
    }
  }
}

TEST(PlacementTest, SpreadsTheChunksOfAUnitOverServers) {
  const ChunkTable table = TableOf(SmallLayout(8), kBlockElems);
  const std::vector<uint32_t> owner =
      PlaceChunks(table, OptimizerKind::kAdamW, 2);
  for (uint32_t tensor = 1; tensor < table.layout().tensors.size();
       tensor += 2) {
    std::map<uint32_t, int> count;
    for (const uint32_t id : table.chunks_of_tensor(tensor)) {
      ++count[owner[id]];
    }
    EXPECT_EQ(count[0], 2) << table.layout().tensors[tensor].name;
    EXPECT_EQ(count[1], 2) << table.layout().tensors[tensor].name;
  }
}

TEST(PlacementTest, MoreServersThanChunksLeaveSomeEmpty) {
  const ChunkTable table = TableOf(SmallLayout(0), 1 << 20);
  ASSERT_EQ(table.chunks().size(), 1u);
  const std::vector<uint32_t> owner =
      PlaceChunks(table, OptimizerKind::kAdamW, 4);
  EXPECT_EQ(owner, std::vector<uint32_t>({0}));
}

TEST(PlacementTest, IsTheSameEachTime) {
  const ChunkTable table = TableOf(SmallLayout(5), kBlockElems);
  EXPECT_EQ(PlaceChunks(table, OptimizerKind::kAdamW, 3),
            PlaceChunks(table, OptimizerKind::kAdamW, 3));
}

}  // namespace
}  // namespace ballast
