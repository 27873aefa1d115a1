// SPDX-License-Identifier: Apache-2.0
#include "proto/bulk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "common/hash.h"

namespace ballast {
namespace {

BulkHeader PushOfTwoItems() {
  BulkHeader header;
  header.kind = BulkKind::kPush;
  header.timeline = 3;
  header.step = 41;
  header.incarnation = (uint64_t{1} << 40) + 7;
  header.placement_version = 2;
  header.sequence = 99;
  header.credit_bytes = uint64_t{5} << 32;
  header.items.resize(2);
  header.items[0].chunk = 70000;
  header.items[0].use = 1;
  header.items[0].span = {4, 2};
  header.items[0].elem_count = uint64_t{1} << 33;
  header.items[0].payload_bytes = 24;
  header.items[0].has_loss = true;
  header.items[0].loss = 1.5;
  header.items[1].dtype = DType::kBF16;
  header.items[1].elem_begin = 65536;
  header.items[1].payload_bytes = 8;
  return header;
}

TEST(BulkHeaderTest, DecodesWhatItEncoded) {
  const BulkHeader header = PushOfTwoItems();
  const std::string bytes = EncodeBulkHeader(header);
  ASSERT_EQ(bytes.size(), header.encoded_bytes());
  const auto decoded = DecodeBulkHeader(bytes, bytes.size() + 32);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(*decoded, header);
}

TEST(BulkHeaderTest, RefusesEveryTruncation) {
  const std::string bytes = EncodeBulkHeader(PushOfTwoItems());
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(DecodeBulkHeader(bytes.substr(0, length), length).ok())
        << length;
  }
}

TEST(BulkHeaderTest, RefusesEveryFlippedBit) {
  const std::string bytes = EncodeBulkHeader(PushOfTwoItems());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_FALSE(DecodeBulkHeader(damaged, damaged.size() + 32).ok()) << bit;
  }
}

// The offsets are those of docs/FORMATS.md.
TEST(BulkHeaderTest, RefusesAReservedFieldThatIsSet) {
  std::string bytes = EncodeBulkHeader(PushOfTwoItems());
  bytes[64] = 1;
  bytes.replace(72, 8, 8, '\0');
  const uint64_t checksum = HashBytes(bytes).low;
  std::memcpy(bytes.data() + 72, &checksum, sizeof(checksum));
  const auto decoded = DecodeBulkHeader(bytes, bytes.size() + 32);
  EXPECT_THAT(std::string(decoded.status().message()),
              ::testing::HasSubstr("reserved field"));
}

BulkHeader Base() {
  BulkHeader header;
  header.kind = BulkKind::kReplicaBase;
  header.step = 9;
  header.record_timeline = 2;
  header.sequence = 1;
  header.items.resize(1);
  header.items[0].chunk = 5;
  header.items[0].elem_begin = 4096;
  header.items[0].elem_count = 8192;
  header.items[0].payload_bytes = 4096;
  header.items[0].record_version = 9;
  return header;
}

BulkHeader Gradient() {
  BulkHeader header;
  header.kind = BulkKind::kReplicaGradient;
  header.step = 10;
  header.items.resize(1);
  header.items[0].use = kBulkAllUses;
  header.items[0].span = {0, 6};
  header.items[0].elem_count = 25;
  header.items[0].payload_bytes = 100;
  return header;
}

bool Decodes(const BulkHeader& header) {
  const std::string bytes = EncodeBulkHeader(header);
  const auto decoded =
      DecodeBulkHeader(bytes, bytes.size() + header.payload_bytes());
  return decoded.ok() && *decoded == header;
}

TEST(BulkHeaderTest, APieceOfARecordLiesWithinIt) {
  EXPECT_TRUE(Decodes(Base()));
  BulkHeader header = Base();
  header.items[0].elem_begin = 4097;  // One byte behind the end.
  EXPECT_FALSE(Decodes(header));
  header.items[0].elem_begin = std::numeric_limits<uint64_t>::max();
  EXPECT_FALSE(Decodes(header));
  header = Base();
  header.items[0].payload_bytes = 0;
  EXPECT_FALSE(Decodes(header));
  header = Base();
  header.items.push_back(header.items[0]);
  EXPECT_FALSE(Decodes(header));
  header.items.clear();
  EXPECT_FALSE(Decodes(header));
  header = Base();
  header.items[0].record_version = 10;  // Newer than what it stands for.
  EXPECT_FALSE(Decodes(header));
}

TEST(BulkHeaderTest, AReplicaGetsCompleteGradientsOnly) {
  EXPECT_TRUE(Decodes(Gradient()));
  BulkHeader header = Gradient();
  header.items[0].use = 0;
  EXPECT_FALSE(Decodes(header));
  header = Gradient();
  header.items[0].elem_count = 24;
  EXPECT_FALSE(Decodes(header));
  header = Gradient();
  header.items[0].elem_begin = 1;
  EXPECT_FALSE(Decodes(header));
  header = Gradient();
  header.items[0].dtype = DType::kBF16;
  EXPECT_FALSE(Decodes(header));
}

TEST(BulkHeaderTest, TextsAreBoundedAndHaveNoItems) {
  for (const BulkKind kind : {BulkKind::kError, BulkKind::kReplicaMark}) {
    BulkHeader header;
    header.kind = kind;
    const std::string bytes = EncodeBulkHeader(header);
    EXPECT_TRUE(DecodeBulkHeader(bytes, bytes.size() + kBulkTextMax).ok());
    EXPECT_FALSE(DecodeBulkHeader(bytes, bytes.size() + kBulkTextMax + 1).ok());
    header.items.resize(1);
    EXPECT_FALSE(Decodes(header));
  }
}

TEST(BulkHeaderTest, AcknowledgementsCarryNoPayload) {
  for (const BulkKind kind : {BulkKind::kReplicaHello, BulkKind::kReplicaAck}) {
    BulkHeader header;
    header.kind = kind;
    header.credit_bytes = 7;
    header.items.resize(1);
    header.items[0].record_version = 4;
    EXPECT_TRUE(Decodes(header));
    header.items[0].payload_bytes = 1;
    EXPECT_FALSE(Decodes(header));
  }
}

TEST(BulkHeaderTest, RecordsAreNamedInBasesOnly) {
  BulkHeader header = PushOfTwoItems();
  header.items[1].record_version = 1;
  EXPECT_FALSE(Decodes(header));
}

TEST(BulkHeaderTest, RefusesPayloadsThatDoNotAddUp) {
  const std::string bytes = EncodeBulkHeader(PushOfTwoItems());
  EXPECT_FALSE(DecodeBulkHeader(bytes, bytes.size() + 31).ok());
  EXPECT_FALSE(DecodeBulkHeader(bytes, bytes.size() + 33).ok());
  EXPECT_TRUE(DecodeBulkHeader(bytes, bytes.size() + 32).ok());
}

TEST(BulkHeaderTest, RefusesLengthsThatWouldOverflowTheirSum) {
  BulkHeader header = PushOfTwoItems();
  header.items[0].payload_bytes = std::numeric_limits<uint64_t>::max();
  header.items[1].payload_bytes = 33;
  const std::string bytes = EncodeBulkHeader(header);
  EXPECT_FALSE(DecodeBulkHeader(bytes, bytes.size() + 32).ok());
}

TEST(BulkHeaderTest, RefusesAnAbsurdItemCountBeforeAllocating) {
  std::string bytes = EncodeBulkHeader(PushOfTwoItems());
  bytes[60] = bytes[61] = bytes[62] = bytes[63] = '\xff';
  EXPECT_FALSE(BulkHeaderBytes(bytes).ok());
}

TEST(BulkHeaderTest, SurvivesRandomBytes) {
  const unsigned seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937_64 random(seed);
  const std::string valid = EncodeBulkHeader(PushOfTwoItems());
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = valid.substr(0, 8);
    const size_t length = random() % 300;
    while (bytes.size() < length) {
      bytes.push_back(static_cast<char>(random()));
    }
    EXPECT_FALSE(DecodeBulkHeader(bytes, bytes.size()).ok());
  }
}

}  // namespace
}  // namespace ballast
