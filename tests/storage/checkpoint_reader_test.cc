// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <unistd.h>

#include "storage/checkpoint.h"
#include "tests/storage/sample_checkpoint.h"
#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using testing::SampleCheckpoint;
using testing::SampleValue;
using testing::Says;

constexpr auto kLoss = absl::StatusCode::kDataLoss;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

std::unique_ptr<CheckpointReader> Open(const CheckpointManifest& manifest) {
  auto reader = CheckpointReader::Open(manifest);
  EXPECT_EQ(reader.status(), absl::OkStatus());
  return *std::move(reader);
}

TEST(CheckpointReaderTest, ReadsEveryFieldOfEveryTensorAcrossRecords) {
  for (const uint64_t servers : {1, 3}) {
    const SampleCheckpoint sample(servers);
    const auto reader = Open(sample.manifest);
    for (uint32_t t = 0; t < 3; ++t) {
      for (const Field field : {Field::kParam, Field::kSlot0, Field::kSlot1}) {
        std::vector<float> out(sample.manifest.layout.tensors[t].elem_count());
        ASSERT_EQ(reader->Read(t, field, 0, absl::MakeSpan(out)),
                  absl::OkStatus());
        for (uint64_t i = 0; i < out.size(); ++i) {
          ASSERT_EQ(out[i], SampleValue(t, field, i)) << t << " " << i;
        }
      }
    }
  }
}

TEST(CheckpointReaderTest, ReadsAnyRangeOfWholeBlocks) {
  const SampleCheckpoint sample(2);
  const auto reader = Open(sample.manifest);
  for (uint32_t t = 0; t < 3; ++t) {
    const TensorSpec& tensor = sample.manifest.layout.tensors[t];
    const uint64_t block = tensor.block_elems();
    for (uint64_t a = 0; a < tensor.block_count(); ++a) {
      for (uint64_t b = a; b <= tensor.block_count(); ++b) {
        const uint64_t begin = a * block;
        const uint64_t end = std::min(b * block, tensor.elem_count());
        std::vector<float> out(end - begin);
        ASSERT_EQ(reader->Read(t, Field::kSlot0, begin, absl::MakeSpan(out)),
                  absl::OkStatus());
        if (!out.empty()) {
          EXPECT_EQ(out.front(), SampleValue(t, Field::kSlot0, begin));
          EXPECT_EQ(out.back(), SampleValue(t, Field::kSlot0, end - 1));
        }
      }
    }
  }
}

TEST(CheckpointReaderTest, RefusesWhatIsNoRangeOrNoFp32Field) {
  const SampleCheckpoint sample(1, 70'000, OptimizerKind::kSgd);
  const auto reader = Open(sample.manifest);
  std::vector<float> out(kBlockElems);
  const auto read = [&](uint32_t tensor, Field field, uint64_t begin,
                        uint64_t count) {
    return reader->Read(tensor, field, begin,
                        absl::MakeSpan(out).subspan(0, count));
  };
  EXPECT_EQ(read(1, Field::kParam, 0, kBlockElems), absl::OkStatus());
  EXPECT_TRUE(Says(read(1, Field::kParam, 1, kBlockElems), kInvalid, "h.0.w"));
  EXPECT_EQ(read(1, Field::kParam, 0, kBlockElems - 1).code(), kInvalid);
  EXPECT_EQ(read(1, Field::kParam, 4 * kBlockElems, 1).code(), kInvalid);
  EXPECT_EQ(read(1, Field::kParam, ~uint64_t{0}, 2).code(), kInvalid);
  EXPECT_EQ(read(3, Field::kParam, 0, 1).code(), kInvalid);
  EXPECT_TRUE(
      Says(read(1, Field::kServed, 0, kBlockElems), kInvalid, "served"));
  EXPECT_EQ(read(1, Field::kSlot0, 0, kBlockElems), absl::OkStatus());
  EXPECT_EQ(read(1, Field::kSlot1, 0, kBlockElems).code(), kInvalid);
}

TEST(CheckpointReaderTest, AFlippedByteIsFoundByReadAndVerify) {
  const SampleCheckpoint sample(1);
  const ManifestRecord& record = sample.manifest.records[0];
  const TensorSpec& tensor = sample.manifest.layout.tensors[record.tensor];
  const RecordLayout layout = RecordLayout::For(
      tensor, {0, 0, record.begin, record.end}, OptimizerKind::kAdamW);
  const std::string slab = sample.dir.path("ps-0/slab");
  std::vector<float> out(record.end - record.begin);

  const uint64_t in_slot =
      record.extent.offset + layout.at(Field::kSlot1).offset + 1000;
  testing::FlipByte(slab, in_slot);
  const auto reader = Open(sample.manifest);
  EXPECT_EQ(reader->Read(0, Field::kParam, 0, absl::MakeSpan(out)),
            absl::OkStatus());
  const absl::Status status =
      reader->Read(0, Field::kSlot1, 0, absl::MakeSpan(out));
  EXPECT_TRUE(Says(status, kLoss, slab));
  EXPECT_TRUE(Says(status, kLoss, "tensor 'wte'"));
  EXPECT_TRUE(Says(status, kLoss, "block 0 of field exp_avg_sq"));
  EXPECT_TRUE(Says(reader->Verify().status(), kLoss, "slot 1"));
  testing::FlipByte(slab, in_slot);
  EXPECT_EQ(reader->Verify().status(), absl::OkStatus());

  testing::FlipByte(slab, record.extent.offset + 100);  // In the header.
  EXPECT_TRUE(Says(
      Open(sample.manifest)->Read(0, Field::kParam, 0, absl::MakeSpan(out)),
      kLoss, "header"));
}

TEST(CheckpointReaderTest, AReusedExtentIsFound) {
  SampleCheckpoint sample(1);
  sample.manifest.records[0].version += 1;
  const auto reader = Open(sample.manifest);
  EXPECT_TRUE(
      Says(reader->Verify().status(), kLoss, "version is 800, want 801"));
}

TEST(CheckpointReaderTest, ASlabThatIsMissingOrShortIsNamedWithTheTensor) {
  const SampleCheckpoint sample(2);
  const std::string slab = sample.dir.path("ps-1/slab");
  uint64_t end = 0;
  for (const ManifestRecord& record : sample.manifest.records) {
    if (record.directory == 1) {
      end = std::max(end, record.extent.offset + record.extent.bytes);
    }
  }
  ASSERT_EQ(truncate(slab.c_str(), static_cast<off_t>(end)), 0);
  Open(sample.manifest);
  ASSERT_EQ(truncate(slab.c_str(), static_cast<off_t>(end - 1)), 0);
  absl::Status status = CheckpointReader::Open(sample.manifest).status();
  EXPECT_TRUE(Says(status, kLoss, slab));
  EXPECT_TRUE(Says(status, kLoss, "tensor '"));
  std::filesystem::remove(slab);
  status = CheckpointReader::Open(sample.manifest).status();
  EXPECT_TRUE(Says(status, absl::StatusCode::kNotFound, slab));
  EXPECT_TRUE(Says(status, absl::StatusCode::kNotFound, "tensor '"));
}

TEST(StateHashTest, DoesNotDependOnServersOrChunksAndLeavesServedOut) {
  const SampleCheckpoint one(1);
  const Hash128 hash = *Open(one.manifest)->Verify();
  for (const uint64_t servers : {1, 2, 5}) {
    for (const uint64_t chunk_elems : {1, 140'000, 10'000'000}) {
      const SampleCheckpoint other(servers, chunk_elems);
      EXPECT_EQ(*Open(other.manifest)->Verify(), hash);
    }
  }
  // The same values, all served as fp32 and in another order of tensors.
  std::vector<BlockDigests> digests(3);
  ModelLayout layout = testing::SampleLayout();
  std::swap(layout.tensors[0], layout.tensors[2]);
  const uint32_t original[] = {2, 1, 0};
  for (uint32_t t = 0; t < 3; ++t) {
    layout.tensors[t].served = DType::kF32;
    const uint64_t elems = layout.tensors[t].elem_count();
    const uint64_t block = layout.tensors[t].block_elems();
    for (const Field field : {Field::kParam, Field::kSlot0, Field::kSlot1}) {
      for (uint64_t begin = 0; begin < elems; begin += block) {
        std::vector<float> values;
        for (uint64_t i = begin; i < std::min(begin + block, elems); ++i) {
          values.push_back(SampleValue(original[t], field, i));
        }
        digests[t].push_back(HashBytes(values.data(), values.size() * 4));
      }
    }
  }
  EXPECT_EQ(StateHash(layout, digests), hash);
  digests[1][2].low ^= 1;
  EXPECT_NE(StateHash(layout, digests), hash);
  digests[1][2].low ^= 1;
  layout.tensors[1].name += "x";
  EXPECT_NE(StateHash(layout, digests), hash);
}

}  // namespace
}  // namespace ballast
