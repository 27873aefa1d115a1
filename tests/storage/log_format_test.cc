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
  header.previous_segment = 7;
  header.previous_end = 5 * kPageBytes;
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
  for (size_t i = 0; i < 152; ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 4);
    EXPECT_EQ(DecodeLogHeader(bad, "log").status().code(), kLoss) << i;
  }
}

TEST(LogFormatTest, AnythingShortIsNoHeader) {
  const std::string good = EncodeLogHeader(Sample());
  for (size_t bytes = 0; bytes < 152; ++bytes) {
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
    page = good.substr(0, random() % 152) + page;
    if (page.substr(0, 152) != good.substr(0, 152)) {
      EXPECT_EQ(DecodeLogHeader(page, "log").status().code(), kLoss);
    }
  }
}

TEST(LogFormatTest, ZerosAreNoRecordAndTheMessageSaysWhere) {
  EXPECT_TRUE(Says(
      DecodeLogHeader(std::string(kPageBytes, '\0'), "segment-1 at 0").status(),
      kLoss, "segment-1 at 0 holds no log record"));
}

TEST(LogFormatTest, AMarkDecodesToItselfAndAnyOtherLengthIsLoss) {
  VoteMark mark;
  mark.timeline = 2;
  mark.step = 17;
  mark.owner = "server-1";
  mark.vote = std::string("vo\0te", 5);
  mark.gradients = {{3, {9, 4096, 100}}, {4, {9, 12288, 0}}};
  const std::string payload = EncodeVoteMark(mark);
  const auto decode = [](absl::string_view bytes) {
    return DecodeVoteMark(bytes, 2, 17, "segment-9 at 0");
  };
  const VoteMark found = *decode(payload);
  EXPECT_EQ(found.step, 17u);
  EXPECT_EQ(found.timeline, 2u);
  EXPECT_EQ(found.owner, mark.owner);
  EXPECT_EQ(found.vote, mark.vote);
  EXPECT_EQ(found.gradients, mark.gradients);
  for (size_t bytes = 0; bytes < payload.size(); ++bytes) {
    EXPECT_TRUE(Says(decode(payload.substr(0, bytes)).status(), kLoss,
                     "segment-9 at 0"));
  }
  EXPECT_EQ(decode(payload + "x").status().code(), kLoss);
}

TEST(LogFormatTest, DescribesAGradientInWords) {
  EXPECT_EQ(DescribeGradient({1, 5, 7, kAllUses, {0, 4}}),
            "timeline 1 step 5 chunk 7 use all span [0, 4)");
}

}  // namespace
}  // namespace ballast
