// SPDX-License-Identifier: Apache-2.0
#include "storage/log_format.h"

#include <gtest/gtest.h>

#include "storage/record.h"
#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using testing::Says;

constexpr auto kLoss = absl::StatusCode::kDataLoss;

LogHeader Sample() {
  LogHeader header;
  header.run = testing::kRun;
  header.name = {2, 17, 5, 1, {4, 2}};
  header.segment = 9;
  header.offset = 3 * kPageBytes;
  header.synced_segment = 8;
  header.synced_offset = kPageBytes;
  header.payload_bytes = 12345;
  header.payload_hash = {1, 2};
  return header;
}

TEST(LogFormatTest, AHeaderIsOnePageAndDecodesToItself) {
  const std::string page = EncodeLogHeader(Sample());
  EXPECT_EQ(page.size(), kPageBytes);
  EXPECT_EQ(*DecodeLogHeader(page, "log"), Sample());
}

TEST(LogFormatTest, ARecordTakesWholePages) {
  EXPECT_EQ(LogRecordBytes(0), kPageBytes);
  EXPECT_EQ(LogRecordBytes(1), 2 * kPageBytes);
  EXPECT_EQ(LogRecordBytes(kPageBytes), 2 * kPageBytes);
  EXPECT_EQ(LogRecordBytes(kPageBytes + 1), 3 * kPageBytes);
}

TEST(LogFormatTest, AnyFlippedByteOfTheHeaderIsFound) {
  const std::string good = EncodeLogHeader(Sample());
  for (size_t i = 0; i < 128; ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 4);
    EXPECT_EQ(DecodeLogHeader(bad, "log").status().code(), kLoss) << i;
  }
}

TEST(LogFormatTest, AnythingShortIsNoHeader) {
  const std::string good = EncodeLogHeader(Sample());
  for (size_t bytes = 0; bytes < 128; ++bytes) {
    EXPECT_EQ(DecodeLogHeader(absl::string_view(good).substr(0, bytes), "log")
                  .status()
                  .code(),
              kLoss)
        << bytes;
  }
}

TEST(LogFormatTest, RandomBytesAreNeverAHeader) {
  std::mt19937_64 random(testing::Seed());
  const std::string good = EncodeLogHeader(Sample());
  for (int i = 0; i < 2000; ++i) {
    std::string page(random() % 300, '\0');
    for (char& byte : page) {
      byte = static_cast<char>(random());
    }
    page = good.substr(0, random() % 128) + page;
    if (page.substr(0, 128) != good.substr(0, 128)) {
      EXPECT_EQ(DecodeLogHeader(page, "log").status().code(), kLoss);
    }
  }
}

TEST(LogFormatTest, ZerosAreNoRecordAndTheMessageSaysWhere) {
  EXPECT_TRUE(Says(
      DecodeLogHeader(std::string(kPageBytes, '\0'), "segment-1 at 0").status(),
      kLoss, "segment-1 at 0 holds no log record"));
}

TEST(LogFormatTest, DescribesAGradientInWords) {
  EXPECT_EQ(DescribeGradient({1, 5, 7, kAllUses, {0, 4}}),
            "timeline 1 step 5 chunk 7 use all span [0, 4)");
}

}  // namespace
}  // namespace ballast
