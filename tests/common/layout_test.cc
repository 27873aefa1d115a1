// SPDX-License-Identifier: Apache-2.0
#include "common/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TensorSpec Tensor(const std::string& name, std::vector<uint64_t> shape) {
  TensorSpec tensor;
  tensor.name = name;
  tensor.shape = std::move(shape);
  return tensor;
}

// A tied table, used by the first and the last unit, and two more tensors.
ModelLayout SmallLayout() {
  ModelLayout layout;
  TensorSpec table = Tensor("wte.weight", {256, 96});
  table.init = Init::kNormal;
  table.init_std = 0.02;
  table.decay = true;
  table.by_rows = true;
  table.use_count = 2;
  table.served = DType::kBF16;
  layout.tensors = {table, Tensor("h.0.bias", {70000}),
                    Tensor("h.0.weight", {300, 500})};
  layout.tensors[1].init = Init::kOnes;
  layout.units = {
      {"embedding", {{0, 0}}}, {"h.0", {{2, 0}, {1, 0}}}, {"head", {{0, 1}}}};
  return layout;
}

std::string ErrorOf(const ModelLayout& layout) {
  return std::string(layout.Validate().message());
}

TEST(TensorSpecTest, ABlockIs64KiElements) {
  EXPECT_EQ(Tensor("t", {65536}).block_count(), 1u);
  EXPECT_EQ(Tensor("t", {65537}).block_count(), 2u);
  EXPECT_EQ(Tensor("t", {65537}).block_elems(), 65536u);
  EXPECT_EQ(Tensor("t", {1}).block_count(), 1u);
}

TEST(TensorSpecTest, ABlockByRowsIsTheMostWholeRowsThatFit) {
  TensorSpec tensor = Tensor("t", {1000, 96});
  tensor.by_rows = true;
  EXPECT_EQ(tensor.block_elems(), 682u * 96u);
  EXPECT_EQ(tensor.block_count(), 2u);
  tensor.shape = {10, 65536};
  EXPECT_EQ(tensor.block_elems(), 65536u);
  tensor.shape = {10, 65537};  // Longer than a block: one row.
  EXPECT_EQ(tensor.block_elems(), 65537u);
  EXPECT_EQ(tensor.block_count(), 10u);
}

TEST(ModelLayoutTest, CountsEveryTensorOnce) {
  const ModelLayout layout = SmallLayout();
  EXPECT_TRUE(layout.Validate().ok()) << layout.Validate();
  EXPECT_EQ(layout.parameter_count(), 256u * 96 + 70000 + 150000);
  EXPECT_EQ(layout.served_bytes(), 2u * 256 * 96 + 4u * (70000 + 150000));
}

TEST(ModelLayoutTest, ValidateNamesWhatIsWrong) {
  EXPECT_THAT(ErrorOf(ModelLayout()), HasSubstr("a tensor and a unit"));
  ModelLayout layout = SmallLayout();
  layout.tensors[1].name = "wte.weight";
  EXPECT_THAT(ErrorOf(layout), HasSubstr("'wte.weight' is declared twice"));
  layout = SmallLayout();
  layout.tensors[1].shape = {};
  EXPECT_THAT(ErrorOf(layout), HasSubstr("'h.0.bias' has no name, shape"));
  layout = SmallLayout();
  layout.tensors[1].shape = {4, 0};
  EXPECT_THAT(ErrorOf(layout), HasSubstr("'h.0.bias' has a dimension of 0"));
  layout = SmallLayout();
  layout.tensors[1].shape = {2, 3, 4};
  EXPECT_THAT(ErrorOf(layout), HasSubstr("'h.0.bias' has 3 dimensions"));
  layout = SmallLayout();
  layout.tensors[1].init_std = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(ErrorOf(layout), HasSubstr("'h.0.bias' has an init_std"));
  layout = SmallLayout();
  layout.units[1].tensors[0].use = 1;
  EXPECT_THAT(ErrorOf(layout), HasSubstr("unit 'h.0' has a tensor or use"));
  layout = SmallLayout();
  layout.units[1].tensors[0].tensor = 3;
  EXPECT_THAT(ErrorOf(layout), HasSubstr("unit 'h.0' has a tensor or use"));
  layout = SmallLayout();
  layout.units[2].tensors[0].use = 0;
  EXPECT_THAT(ErrorOf(layout), HasSubstr("listed twice"));
  layout = SmallLayout();
  layout.units[1].tensors.pop_back();
  EXPECT_THAT(ErrorOf(layout), HasSubstr("no unit lists"));
  layout = SmallLayout();
  layout.units[1].tensors.clear();
  EXPECT_THAT(ErrorOf(layout), HasSubstr("unit 'h.0' has no tensor"));
}

TEST(ModelLayoutTest, RefusesSizesThatWouldOverflow) {
  ModelLayout layout = SmallLayout();
  layout.tensors[2].shape = {uint64_t{1} << 40, uint64_t{1} << 40};
  EXPECT_FALSE(layout.Validate().ok());
  layout.tensors[2].shape = {uint64_t{1} << 24, uint64_t{1} << 24};
  EXPECT_THAT(ErrorOf(layout), HasSubstr("2^48 parameters"));
  layout.tensors[2].shape = {uint64_t{1} << 24, uint64_t{1} << 23};
  EXPECT_TRUE(layout.Validate().ok());
}

TEST(ModelLayoutTest, DecodesWhatItEncoded) {
  const ModelLayout layout = SmallLayout();
  const absl::StatusOr<ModelLayout> decoded =
      ModelLayout::Decode(layout.Encode());
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(*decoded, layout);
}

TEST(ModelLayoutTest, EveryTruncationIsRefused) {
  const std::string bytes = SmallLayout().Encode();
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(ModelLayout::Decode(bytes.substr(0, length)).ok()) << length;
  }
  EXPECT_FALSE(ModelLayout::Decode(bytes + '\0').ok());
}

// Damaged bytes are refused or are a valid layout that encodes to them.
TEST(ModelLayoutTest, DamagedBytesNeverDecodeToSomethingInvalid) {
  constexpr uint64_t kSeed = 20261202;
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  const std::string good = SmallLayout().Encode();
  for (int round = 0; round < 50000; ++round) {
    std::string bytes = good;
    const int flips = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < flips; ++i) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (random() % 4 == 0) {
      bytes.resize(random() % bytes.size());
    }
    const absl::StatusOr<ModelLayout> decoded = ModelLayout::Decode(bytes);
    if (decoded.ok()) {
      EXPECT_TRUE(decoded->Validate().ok());
      EXPECT_EQ(decoded->Encode(), bytes);
      // Larger tables are legal and slow.
      const auto table = ChunkTable::Build(
          *decoded, std::max<uint64_t>(1, decoded->parameter_count() / 100));
      EXPECT_TRUE(table.ok() ||
                  table.status().code() == absl::StatusCode::kInvalidArgument);
    }
  }
}

TEST(ChunkTableTest, ChunksAreWholeBlocksThatCoverEveryTensorOnce) {
  const ModelLayout layout = SmallLayout();
  for (const uint64_t chunk_elems :
       {uint64_t{1}, uint64_t{65536}, uint64_t{140000}, uint64_t{1} << 20,
        std::numeric_limits<uint64_t>::max()}) {
    const auto table = ChunkTable::Build(layout, chunk_elems);
    ASSERT_TRUE(table.ok()) << table.status();
    for (uint32_t t = 0; t < layout.tensors.size(); ++t) {
      const TensorSpec& tensor = layout.tensors[t];
      uint64_t next = 0;
      for (const uint32_t id : table->chunks_of_tensor(t)) {
        const Chunk& chunk = table->chunk(id);
        EXPECT_EQ(chunk.id, id);
        EXPECT_EQ(chunk.tensor, t);
        EXPECT_EQ(chunk.begin, next);
        EXPECT_EQ(chunk.begin % tensor.block_elems(), 0u);
        EXPECT_GT(chunk.end, chunk.begin);
        EXPECT_LE(chunk.elem_count(),
                  std::max(chunk_elems, tensor.block_elems()));
        EXPECT_EQ(table->served_bytes(id),
                  chunk.elem_count() * DTypeBytes(tensor.served));
        next = chunk.end;
      }
      EXPECT_EQ(next, tensor.elem_count());
    }
  }
}

TEST(ChunkTableTest, IdsFollowTheFirstUnitThatReadsTheTensor) {
  const auto table = ChunkTable::Build(SmallLayout(), 65536);
  ASSERT_TRUE(table.ok());
  EXPECT_THAT(table->chunks_of_tensor(0), ElementsAre(0));
  EXPECT_THAT(table->chunks_of_tensor(2), ElementsAre(1, 2, 3));
  EXPECT_THAT(table->chunks_of_tensor(1), ElementsAre(4, 5));
  EXPECT_EQ(table->tensor_of(5).name, "h.0.bias");
}

TEST(ChunkTableTest, TheLossRidesOnTheLastUnitsFirstUse) {
  const auto table = ChunkTable::Build(SmallLayout(), 65536);
  ASSERT_TRUE(table.ok());
  EXPECT_EQ(table->loss_chunk(), 0u);
  EXPECT_EQ(table->loss_use(), 1u);
}

TEST(ChunkTableTest, RefusesNoneAndTooManyChunks) {
  EXPECT_FALSE(ChunkTable::Build(SmallLayout(), 0).ok());
  ModelLayout layout = SmallLayout();
  layout.tensors[2].shape = {uint64_t{1} << 24, uint64_t{1} << 23};
  const auto table = ChunkTable::Build(layout, 65536);
  EXPECT_THAT(std::string(table.status().message()),
              HasSubstr("server.chunk_elems"));
}

}  // namespace
}  // namespace ballast
