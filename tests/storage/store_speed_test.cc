// SPDX-License-Identifier: Apache-2.0
#include "storage/store_speed.h"

#include <gtest/gtest.h>

#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

TEST(StoreSpeedTest, MeasuresBothWaysReadsRightAndLeavesNothing) {
  const testing::TempDir dir;
  StoreSpeedOptions options;
  options.dir = dir.path("speed");
  options.body_bytes = 64 << 10;
  options.record_count = 16;
  options.rounds = 3;
  const auto speed = MeasureStoreSpeed(options);
  ASSERT_EQ(speed.status(), absl::OkStatus());
  EXPECT_EQ(speed->wrong, 0u);
  EXPECT_GT(speed->raw_gbps, 0);
  EXPECT_GT(speed->store_gbps, 0);
  EXPECT_GT(speed->checked_gbps, 0);
  EXPECT_GT(speed->commit_ms, 0);
  EXPECT_LE(speed->bytes, 2 * 16 * options.body_bytes);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(StoreSpeedTest, RefusesAFolderThatExists) {
  const testing::TempDir dir;
  StoreSpeedOptions options;
  options.dir = dir.path();
  EXPECT_EQ(MeasureStoreSpeed(options).status().code(),
            absl::StatusCode::kAlreadyExists);
}

}  // namespace
}  // namespace ballast
