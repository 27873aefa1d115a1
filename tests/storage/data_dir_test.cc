// SPDX-License-Identifier: Apache-2.0
#include "storage/data_dir.h"

#include <gtest/gtest.h>

#include <optional>

#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using testing::kRun;
using testing::Says;
using testing::Slurp;
using testing::Spill;

constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

absl::Status TryOpen(const std::string& path, const Hash128& run = kRun) {
  return DataDirectory::Open(PosixDisk(), path, run, "ps-1 pid 2").status();
}

TEST(DataDirectoryTest, IsMadeWithItsParentsAndOpensAgain) {
  const testing::TempDir dir;
  const std::string path = dir.path("a/b/c");
  EXPECT_EQ(TryOpen(path), absl::OkStatus());
  const std::string identity = Slurp(path + "/IDENTITY");
  EXPECT_EQ(TryOpen(path), absl::OkStatus());
  EXPECT_EQ(Slurp(path + "/IDENTITY"), identity);
}

TEST(DataDirectoryTest, ASecondOpenerIsRefusedNamingTheOwner) {
  const testing::TempDir dir;
  {
    const auto first =
        DataDirectory::Open(PosixDisk(), dir.path(), kRun, "ps-0 pid 77");
    ASSERT_EQ(first.status(), absl::OkStatus());
    EXPECT_TRUE(
        Says(TryOpen(dir.path()), kPrecondition, "is in use by ps-0 pid 77;"));
  }
  EXPECT_EQ(TryOpen(dir.path()), absl::OkStatus());
}

TEST(DataDirectoryTest, SaysWhoseItIsBeforeARunIsKnown) {
  const testing::TempDir dir;
  const auto run_of = [](const std::string& path) {
    return ReadDataDirectoryRun(PosixDisk(), path);
  };
  EXPECT_EQ(*run_of(dir.path("none")), std::nullopt);
  EXPECT_EQ(*run_of(dir.path()), std::nullopt);
  ASSERT_EQ(TryOpen(dir.path()), absl::OkStatus());
  EXPECT_EQ(*run_of(dir.path()), kRun);
  testing::FlipByte(dir.path("IDENTITY"), 3);
  EXPECT_TRUE(Says(run_of(dir.path()).status(), absl::StatusCode::kDataLoss,
                   "IDENTITY is damaged"));
}

TEST(DataDirectoryTest, AnotherRunIsRefusedByName) {
  const testing::TempDir dir;
  ASSERT_EQ(TryOpen(dir.path()), absl::OkStatus());
  EXPECT_TRUE(Says(TryOpen(dir.path(), {9, 9}), kPrecondition,
                   "belongs to run " + HashHex(kRun)));
}

TEST(DataDirectoryTest, AForeignFolderIsRefusedUntouched) {
  const testing::TempDir dir;
  Spill(dir.path("thesis.tex"), "years");
  EXPECT_TRUE(Says(TryOpen(dir.path()), kPrecondition, "'thesis.tex'"));
  int entries = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(dir.path())) {
    ++entries;
  }
  EXPECT_EQ(entries, 1);
}

TEST(DataDirectoryTest, AFileInTheWayIsRefused) {
  const testing::TempDir dir;
  Spill(dir.path("file"), "x");
  EXPECT_TRUE(Says(TryOpen(dir.path("file")), kPrecondition, "is a file"));
}

TEST(DataDirectoryTest, ACreationCutShortIsFinished) {
  const testing::TempDir dir;
  Spill(dir.path("LOCK"), "");
  Spill(dir.path("IDENTITY.tmp"), "ballast da");
  EXPECT_EQ(TryOpen(dir.path()), absl::OkStatus());
}

TEST(DataDirectoryTest, ALostIdentityIsNotMadeAnew) {
  const testing::TempDir dir;
  ASSERT_EQ(TryOpen(dir.path()), absl::OkStatus());
  std::filesystem::remove(dir.path("IDENTITY"));
  Spill(dir.path("slab"), "records");
  EXPECT_TRUE(Says(TryOpen(dir.path()), kPrecondition, "'slab'"));
}

TEST(DataDirectoryTest, AnyDamageToTheIdentityIsFound) {
  const testing::TempDir dir;
  ASSERT_EQ(TryOpen(dir.path()), absl::OkStatus());
  const std::string good = Slurp(dir.path("IDENTITY"));
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    Spill(dir.path("IDENTITY"), bad);
    EXPECT_EQ(TryOpen(dir.path()).code(), absl::StatusCode::kDataLoss) << i;
    Spill(dir.path("IDENTITY"), good.substr(0, i));
    EXPECT_EQ(TryOpen(dir.path()).code(), absl::StatusCode::kDataLoss) << i;
  }
}

TEST(DataDirectoryTest, ANewerFormatIsRefusedAsSuch) {
  const testing::TempDir dir;
  const std::string body =
      "ballast data directory\nformat_version 2\nrun " + HashHex(kRun) + "\n";
  Spill(dir.path("IDENTITY"),
        absl::StrCat(body, "checksum ", HashHex(HashBytes(body)), "\n"));
  EXPECT_TRUE(Says(TryOpen(dir.path()), kPrecondition, "format 2, want 1"));
}

}  // namespace
}  // namespace ballast
