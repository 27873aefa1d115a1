// SPDX-License-Identifier: Apache-2.0
#include "storage/record.h"

#include <gtest/gtest.h>

#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using testing::Says;

constexpr auto kLoss = absl::StatusCode::kDataLoss;

TensorSpec Matrix(uint64_t rows, uint64_t columns, DType served) {
  TensorSpec tensor;
  tensor.name = "h.0.attn.weight";
  tensor.shape = {rows, columns};
  tensor.served = served;
  return tensor;
}

struct Sample {
  explicit Sample(uint64_t elems, DType served = DType::kBF16,
                  OptimizerKind optimizer = OptimizerKind::kAdamW)
      : tensor(Matrix(1, elems, served)),
        layout(RecordLayout::For(tensor, {0, 0, 0, elems}, optimizer)),
        id{testing::kRun, 2, 7, HashBytes(tensor.name), 0, elems},
        image(layout.total_bytes) {
    testing::FillRandom(elems, image.span());
    digests = SealRecord(layout, id, image.span());
  }
  absl::Status Check() const {
    return CheckRecord(layout, id, image.span(), "slab at 0");
  }
  absl::Status CheckPrefix() const {
    return CheckRecord(layout, id, image.span().subspan(0, layout.prefix_bytes),
                       "slab at 0");
  }

  TensorSpec tensor;
  RecordLayout layout;
  RecordId id;
  AlignedBuffer image;
  BlockDigests digests;
};

TEST(RecordTest, LaysFieldsOutBehindTheHeaderInOrder) {
  for (const uint64_t elems :
       {uint64_t{1}, uint64_t{63}, kBlockElems - 1, kBlockElems,
        kBlockElems + 1, 3 * kBlockElems + 5}) {
    for (const DType served : {DType::kF32, DType::kBF16}) {
      for (const OptimizerKind optimizer :
           {OptimizerKind::kAdamW, OptimizerKind::kSgd}) {
        const RecordLayout layout = RecordLayout::For(
            Matrix(1, elems, served), {0, 0, 0, elems}, optimizer);
        EXPECT_EQ(layout.at(Field::kServed).bytes,
                  served == DType::kBF16 ? elems * 2 : 0);
        EXPECT_EQ(layout.at(Field::kParam).bytes, elems * 4);
        EXPECT_EQ(layout.at(Field::kSlot0).bytes, elems * 4);
        EXPECT_EQ(layout.at(Field::kSlot1).bytes,
                  optimizer == OptimizerKind::kAdamW ? elems * 4 : 0);
        EXPECT_EQ(layout.header_bytes % 64, 0u);
        EXPECT_EQ(layout.prefix_bytes % kPageBytes, 0u);
        EXPECT_EQ(layout.total_bytes % kPageBytes, 0u);
        EXPECT_EQ(layout.block_count(),
                  (elems + kBlockElems - 1) / kBlockElems);
        uint64_t end = layout.header_bytes;
        for (const auto& place : layout.fields) {
          if (place.bytes != 0) {
            EXPECT_GE(place.offset, end);
            EXPECT_EQ(place.offset % 64, 0u);
            end = place.offset + place.bytes;
          }
        }
        EXPECT_LE(end, layout.total_bytes);
        EXPECT_LE(layout.at(layout.first_field()).offset +
                      layout.at(layout.first_field()).bytes,
                  layout.prefix_bytes);
      }
    }
  }
}

TEST(RecordTest, ChecksWhatItSealedWholeAndAsAPrefix) {
  for (const uint64_t elems :
       {uint64_t{1}, uint64_t{1000}, kBlockElems, 2 * kBlockElems + 3}) {
    for (const DType served : {DType::kF32, DType::kBF16}) {
      const Sample sample(elems, served);
      EXPECT_EQ(sample.Check(), absl::OkStatus());
      EXPECT_EQ(sample.CheckPrefix(), absl::OkStatus());
      EXPECT_EQ(ReadDigests(sample.layout, sample.image.span()),
                sample.digests);
      EXPECT_EQ(DigestFields(sample.layout, sample.image.span()),
                sample.digests);
    }
  }
}

TEST(RecordTest, ADigestIsTheHashOfTheBytesOfItsBlock) {
  const Sample sample(kBlockElems + 10);
  const auto& place = sample.layout.at(Field::kSlot0);
  EXPECT_EQ(sample.digests[DigestIndex(sample.layout, Field::kSlot0, 0)],
            HashBytes(sample.image.data() + place.offset, kBlockElems * 4));
  EXPECT_EQ(
      sample.digests[DigestIndex(sample.layout, Field::kSlot0, 1)],
      HashBytes(sample.image.data() + place.offset + kBlockElems * 4, 10 * 4));
  EXPECT_EQ(sample.digests.size(), 4u * 2);
}

TEST(RecordTest, BlocksOfATableAreWholeRows) {
  TensorSpec table = Matrix(100, 5000, DType::kF32);
  table.by_rows = true;
  const RecordLayout layout = RecordLayout::For(
      table, {0, 0, 13 * 5000, 39 * 5000}, OptimizerKind::kAdamW);
  EXPECT_EQ(layout.block_elems, 13u * 5000);
  EXPECT_EQ(layout.block_count(), 2u);
}

TEST(RecordTest, ANewSealLeavesNoBytesOfTheBufferBetweenFields) {
  const Sample sample(100);
  Sample other(100);
  AlignedBuffer image(sample.layout.total_bytes);
  for (const auto& place : sample.layout.fields) {
    std::memcpy(image.data() + place.offset, sample.image.data() + place.offset,
                place.bytes);
  }
  SealRecord(sample.layout, sample.id, image.span());
  EXPECT_TRUE(std::equal(image.span().begin(), image.span().end(),
                         sample.image.span().begin()));
}

TEST(RecordTest, AnyFlippedByteOfHeaderOrFieldIsFound) {
  Sample sample(5000);
  const auto broken = [&sample](uint64_t offset) {
    sample.image.data()[offset] ^= std::byte{0x40};
    const absl::Status status = sample.Check();
    sample.image.data()[offset] ^= std::byte{0x40};
    return status.code() == kLoss;
  };
  for (uint64_t offset = 0; offset < sample.layout.header_bytes; ++offset) {
    EXPECT_TRUE(broken(offset)) << "header byte " << offset;
  }
  for (const auto& place : sample.layout.fields) {
    for (uint64_t i = 0; i < place.bytes; i += 61) {
      EXPECT_TRUE(broken(place.offset + i)) << place.offset + i;
    }
    EXPECT_TRUE(broken(place.offset + place.bytes - 1));
  }
  EXPECT_EQ(sample.Check(), absl::OkStatus());
}

TEST(RecordTest, APrefixDoesNotAnswerForLaterFields) {
  Sample sample(5000);
  sample.image.data()[sample.layout.at(Field::kSlot1).offset] ^= std::byte{1};
  EXPECT_EQ(sample.CheckPrefix(), absl::OkStatus());
  EXPECT_TRUE(
      Says(sample.Check(), kLoss, "slab at 0: block 0 of field slot 1"));
  sample.image.data()[sample.layout.at(Field::kServed).offset] ^= std::byte{1};
  EXPECT_TRUE(Says(sample.CheckPrefix(), kLoss, "block 0 of field served"));
}

TEST(RecordTest, NamesWhatIsDifferentAboutAnotherRecord) {
  const Sample sample(100);
  const auto check = [&sample](const RecordId& expected) {
    return CheckRecord(sample.layout, expected, sample.image.span(), "slab");
  };
  RecordId expected = sample.id;
  expected.version = 8;
  EXPECT_TRUE(Says(check(expected), kLoss, "version is 7, want 8"));
  expected = sample.id;
  expected.timeline = 3;
  EXPECT_TRUE(Says(check(expected), kLoss, "timeline is 2, want 3"));
  expected = sample.id;
  expected.run.low ^= 1;
  EXPECT_TRUE(Says(check(expected), kLoss, "run is"));
  expected = sample.id;
  expected.tensor.high ^= 1;
  EXPECT_TRUE(Says(check(expected), kLoss, "tensor hash is"));
  expected = sample.id;
  expected.begin += 100;
  expected.end += 100;
  EXPECT_TRUE(Says(check(expected), kLoss, "begin is 0, want 100"));
}

TEST(RecordTest, AnExtentThatWasNeverWrittenHoldsNoRecord) {
  const Sample sample(100);
  const AlignedBuffer zeros(sample.layout.total_bytes);
  EXPECT_TRUE(
      Says(CheckRecord(sample.layout, sample.id, zeros.span(), "slab at 4096"),
           kLoss, "slab at 4096 holds no record"));
}

TEST(RecordTest, RandomBytesAreNeverARecord) {
  const Sample sample(300);
  AlignedBuffer image(sample.layout.total_bytes);
  const uint64_t seed = testing::Seed();
  for (uint64_t i = 0; i < 200; ++i) {
    testing::FillRandom(seed + i, image.span());
    if (i % 2 == 0) {  // Get past the magic and the version.
      std::memcpy(image.data(), sample.image.data(), 12 + i % 180);
    }
    EXPECT_EQ(
        CheckRecord(sample.layout, sample.id, image.span(), "slab").code(),
        kLoss);
  }
}

TEST(RecordTest, NamesFieldsAsUsersKnowThem) {
  EXPECT_EQ(FieldName(Field::kParam, OptimizerKind::kAdamW), "param");
  EXPECT_EQ(FieldName(Field::kSlot0, OptimizerKind::kAdamW), "exp_avg");
  EXPECT_EQ(FieldName(Field::kSlot0, OptimizerKind::kSgd), "momentum_buffer");
  EXPECT_EQ(FieldName(Field::kSlot1, OptimizerKind::kAdamW), "exp_avg_sq");
  EXPECT_EQ(FieldName(Field::kServed, OptimizerKind::kSgd), "served");
}

}  // namespace
}  // namespace ballast
