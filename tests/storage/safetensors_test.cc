// SPDX-License-Identifier: Apache-2.0
#include "storage/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using testing::Says;
using testing::Slurp;

float Value(size_t index, uint64_t elem) {
  return static_cast<float>(elem) / 3.0f + 1000.0f * static_cast<float>(index);
}

absl::Status Fill(size_t index, uint64_t begin, absl::Span<float> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = Value(index, begin + i);
  }
  return absl::OkStatus();
}

std::vector<SafetensorsEntry> Entries() {
  return {{"a.weight", DType::kF32, {7, 11}, 10},
          {"b", DType::kBF16, {5}, 5},
          {"scalar", DType::kF32, {}, 1},
          {"empty", DType::kF32, {0, 3}, 1}};
}

bool LeftOver(const testing::TempDir& dir) {
  for (const auto& entry : std::filesystem::directory_iterator(dir.path())) {
    if (entry.path().extension() == ".tmp") {
      return true;
    }
  }
  return false;
}

TEST(SafetensorsTest, TheFileReadsBackByTheFormatsRules) {
  const testing::TempDir dir;
  const std::string path = dir.path("m.safetensors");
  ASSERT_EQ(WriteSafetensors(path, Entries(), {{"step", "800"}}, false, Fill),
            absl::OkStatus());
  const std::string file = Slurp(path);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), 8);
  EXPECT_EQ(header_bytes % 8, 0u);
  const auto header = nlohmann::json::parse(file.substr(8, header_bytes));
  EXPECT_EQ(header["__metadata__"]["step"], "800");
  EXPECT_EQ(header["a.weight"]["dtype"], "F32");
  EXPECT_THAT(header["a.weight"]["shape"], ElementsAre(7, 11));
  EXPECT_THAT(header["a.weight"]["data_offsets"], ElementsAre(0, 308));
  EXPECT_EQ(header["b"]["dtype"], "BF16");
  EXPECT_THAT(header["b"]["data_offsets"], ElementsAre(308, 318));
  EXPECT_THAT(header["scalar"]["data_offsets"], ElementsAre(318, 322));
  EXPECT_EQ(header["scalar"]["shape"].size(), 0u);
  EXPECT_THAT(header["empty"]["data_offsets"], ElementsAre(322, 322));
  const char* data = file.data() + 8 + header_bytes;
  EXPECT_EQ(file.size(), 8 + header_bytes + 322);
  for (uint64_t i = 0; i < 77; ++i) {
    float value = 0;
    std::memcpy(&value, data + 4 * i, 4);
    EXPECT_EQ(value, Value(0, i));
  }
  for (uint64_t i = 0; i < 5; ++i) {
    uint16_t value = 0;
    std::memcpy(&value, data + 308 + 2 * i, 2);
    EXPECT_EQ(value, ToBF16(Value(1, i)));
  }
}

TEST(SafetensorsTest, AsksTheSourceForWholePieces) {
  const testing::TempDir dir;
  std::vector<std::pair<uint64_t, size_t>> asked;
  const auto source = [&](size_t, uint64_t begin, absl::Span<float> out) {
    asked.emplace_back(begin, out.size());
    return absl::OkStatus();
  };
  ASSERT_EQ(WriteSafetensors(dir.path("m"), {{"t", DType::kF32, {25}, 10}}, {},
                             false, source),
            absl::OkStatus());
  EXPECT_THAT(asked, ElementsAre(std::pair(0, 10), std::pair(10, 10),
                                 std::pair(20, 5)));
}

TEST(SafetensorsTest, AFileIsReplacedOnlyWhenAsked) {
  const testing::TempDir dir;
  const std::string path = dir.path("m.safetensors");
  testing::Spill(path, "mine");
  EXPECT_TRUE(Says(WriteSafetensors(path, Entries(), {}, false, Fill),
                   absl::StatusCode::kAlreadyExists, path));
  EXPECT_EQ(Slurp(path), "mine");
  EXPECT_EQ(WriteSafetensors(path, Entries(), {}, true, Fill),
            absl::OkStatus());
  EXPECT_GT(Slurp(path).size(), 322u);
  EXPECT_FALSE(LeftOver(dir));
}

TEST(SafetensorsTest, AFileThatAppearsMeanwhileIsNotReplaced) {
  const testing::TempDir dir;
  const std::string path = dir.path("m.safetensors");
  const auto source = [&](size_t, uint64_t, absl::Span<float>) {
    testing::Spill(path, "theirs");
    return absl::OkStatus();
  };
  EXPECT_EQ(WriteSafetensors(path, Entries(), {}, false, source).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Slurp(path), "theirs");
  EXPECT_FALSE(LeftOver(dir));
}

TEST(SafetensorsTest, AFailedSourceLeavesNothing) {
  const testing::TempDir dir;
  const auto source = [](size_t, uint64_t begin, absl::Span<float>) {
    return begin == 0 ? absl::OkStatus() : absl::DataLossError("block 1");
  };
  EXPECT_TRUE(
      Says(WriteSafetensors(dir.path("m"), Entries(), {}, false, source),
           absl::StatusCode::kDataLoss, "block 1"));
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(SafetensorsTest, EntriesThatCannotBeWrittenAreRefused) {
  const testing::TempDir dir;
  for (const std::vector<SafetensorsEntry>& entries :
       std::vector<std::vector<SafetensorsEntry>>{
           {{"t", DType::kF32, {1}, 1}, {"t", DType::kF32, {1}, 1}},
           {{"__metadata__", DType::kF32, {1}, 1}},
           {{"t", DType::kF32, {1}, 0}}}) {
    EXPECT_EQ(WriteSafetensors(dir.path("m"), entries, {}, false, Fill).code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(SafetensorsTest, AFullDiskLeavesNothing) {
  const testing::SmallDisk disk(1 << 20);
  if (!disk.ok()) {
    GTEST_SKIP() << "a small tmpfs cannot be mounted here (not root?): the "
                    "full disk is NOT tested";
  }
  EXPECT_EQ(
      WriteSafetensors(disk.path("m"), {{"t", DType::kF32, {1 << 20}, 1 << 16}},
                       {}, false, Fill)
          .code(),
      absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(std::filesystem::is_empty(disk.path("")));
}

}  // namespace
}  // namespace ballast
