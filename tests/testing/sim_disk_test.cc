// SPDX-License-Identifier: Apache-2.0
#include "tests/testing/sim_disk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "storage/record.h"
#include "tests/storage/storage_testing.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;

constexpr auto kOff = absl::StatusCode::kUnavailable;

std::string Text(SimDisk* disk, const std::string& path) {
  return disk->ReadFile(path, 1 << 20).value_or("(none)");
}

// A file of whole pages that were written through a queue.
class SimDiskTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(disk_.MakeDirectories("/d"), absl::OkStatus());
    file_ = *disk_.OpenDirect("/d/file", /*create=*/true);
    ASSERT_EQ(file_->Preallocate(0, 64 * kPageBytes), absl::OkStatus());
    ASSERT_EQ(file_->Sync(), absl::OkStatus());
    ASSERT_EQ(disk_.SyncDirectory("/d"), absl::OkStatus());
    queue_ = *disk_.StartQueue({});
  }
  absl::Status Do(IoKind kind, uint64_t page, AlignedBuffer* data) {
    std::optional<absl::Status> result;
    queue_->Submit({kind, file_.get(), page * kPageBytes, data->data(),
                    data->size(),
                    [&](absl::Status status) { result = std::move(status); }});
    disk_.Pump();
    return *result;
  }
  absl::Status Fill(uint64_t page, uint64_t pages, char byte) {
    AlignedBuffer data(pages * kPageBytes);
    std::memset(data.data(), byte, data.size());
    return Do(IoKind::kWrite, page, &data);
  }
  // The bytes that the sectors of a page begin with.
  std::string Sectors(uint64_t page) {
    const auto file = *disk_.OpenForRead("/d/file");
    std::string bytes(kPageBytes, '?');
    EXPECT_EQ(
        file->Read(page * kPageBytes,
                   {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()}),
        absl::OkStatus());
    std::string first;
    for (uint64_t at = 0; at < kPageBytes; at += kSectorBytes) {
      first += bytes[at] == 0 ? '0' : bytes[at];
    }
    return first;
  }
  void Reopen(SimDisk::End end) {
    disk_.Stop();
    queue_.reset();
    disk_.Restart(end);
    file_ = *disk_.OpenDirect("/d/file", /*create=*/false);
    queue_ = *disk_.StartQueue({});
  }

  SimDisk disk_{1};
  std::unique_ptr<DiskFile> file_;
  std::unique_ptr<IoQueue> queue_;
};

TEST_F(SimDiskTest, WhatWasSyncedOutlivesThePower) {
  ASSERT_EQ(Fill(3, 2, 'a'), absl::OkStatus());
  ASSERT_EQ(file_->Sync(), absl::OkStatus());
  Reopen(SimDisk::End::kPower);
  EXPECT_EQ(Sectors(2), "00000000");
  EXPECT_EQ(Sectors(3), "aaaaaaaa");
  EXPECT_EQ(Sectors(4), "aaaaaaaa");
}

TEST_F(SimDiskTest, WithoutASyncAnySectorsMayBeLostAndOthersKept) {
  std::set<std::string> seen;
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(Fill(3, 1, 'a'), absl::OkStatus());
    ASSERT_EQ(file_->Sync(), absl::OkStatus());
    ASSERT_EQ(Fill(3, 1, 'b'), absl::OkStatus());
    EXPECT_EQ(Sectors(3), "bbbbbbbb");
    Reopen(SimDisk::End::kPower);
    seen.insert(Sectors(3));
  }
  EXPECT_GT(seen.size(), 80u);
  for (const std::string& sectors : seen) {
    EXPECT_EQ(sectors.find_first_not_of("ab"), std::string::npos);
  }
}

TEST_F(SimDiskTest, AKillKeepsThePageCacheAndALaterCutTakesIt) {
  ASSERT_EQ(Fill(3, 40, 'a'), absl::OkStatus());
  Reopen(SimDisk::End::kKill);
  EXPECT_EQ(Sectors(3), "aaaaaaaa");
  EXPECT_EQ(Sectors(42), "aaaaaaaa");
  Reopen(SimDisk::End::kPower);
  std::string all;
  for (uint64_t page = 3; page < 43; ++page) {
    all += Sectors(page);
  }
  EXPECT_NE(all.find('0'), std::string::npos);
  EXPECT_NE(all.find('a'), std::string::npos);
}

TEST_F(SimDiskTest, AFailedSyncLosesWhatItShouldHaveCovered) {
  ASSERT_EQ(Fill(3, 1, 'a'), absl::OkStatus());
  disk_.Fail(SimDisk::Operation::kSync, "file", absl::DataLossError("EIO"));
  EXPECT_TRUE(Says(file_->Sync(), absl::StatusCode::kDataLoss, "/d/file"));
  EXPECT_EQ(file_->Sync(), absl::OkStatus());
  ASSERT_EQ(Fill(4, 1, 'b'), absl::OkStatus());
  EXPECT_EQ(file_->Sync(), absl::OkStatus());
  EXPECT_EQ(Sectors(3), "aaaaaaaa");  // Still in the page cache.
  Reopen(SimDisk::End::kPower);
  EXPECT_EQ(Sectors(3), "00000000");
  EXPECT_EQ(Sectors(4), "bbbbbbbb");
}

TEST_F(SimDiskTest, NamesAreDurableOnlyAfterASyncOfTheirFolder) {
  int renamed = 0;
  for (int i = 0; i < 40; ++i) {
    ASSERT_EQ(disk_.Rename("/d/file", "/d/new"), absl::OkStatus());
    disk_.Stop();
    disk_.Restart(SimDisk::End::kPower);
    const auto names = *disk_.List("/d");
    ASSERT_EQ(names.size(), 1u);
    if (names[0] == "new") {
      ++renamed;
      ASSERT_EQ(disk_.Rename("/d/new", "/d/file"), absl::OkStatus());
      ASSERT_EQ(disk_.SyncDirectory("/d"), absl::OkStatus());
    }
  }
  EXPECT_GT(renamed, 5);
  EXPECT_LT(renamed, 35);
  ASSERT_EQ(disk_.Rename("/d/file", "/d/new"), absl::OkStatus());
  ASSERT_EQ(disk_.SyncDirectory("/d"), absl::OkStatus());
  disk_.Stop();
  disk_.Restart(SimDisk::End::kPower);
  EXPECT_THAT(*disk_.List("/d"), ElementsAre("new"));
  queue_.reset();
}

TEST_F(SimDiskTest, AReplacedFileIsOldOrNewWhereverItIsCut) {
  ASSERT_EQ(disk_.ReplaceFile("/d/text", "old"), absl::OkStatus());
  bool whole = false;
  int old = 0;
  for (uint64_t n = 1; !whole; ++n) {
    disk_.CutAfter(n);
    whole = disk_.ReplaceFile("/d/text", "new").ok();
    disk_.Stop();
    disk_.Restart(SimDisk::End::kPower);
    const std::string text = Text(&disk_, "/d/text");
    EXPECT_TRUE(text == "new" || (text == "old" && !whole)) << text;
    old += text == "old" ? 1 : 0;
    ASSERT_EQ(disk_.ReplaceFile("/d/text", "old"), absl::OkStatus());
  }
  EXPECT_GE(old, 3);
  queue_.reset();
}

TEST_F(SimDiskTest, AfterACutNothingChangesAndEveryRequestEnds) {
  AlignedBuffer data(kPageBytes);
  std::vector<absl::StatusCode> codes;
  for (uint64_t page = 0; page < 6; ++page) {
    queue_->Submit({IoKind::kWrite, file_.get(), page * kPageBytes, data.data(),
                    data.size(), [&](const absl::Status& status) {
                      codes.push_back(status.code());
                    }});
  }
  EXPECT_EQ(disk_.pending(), 6u);
  disk_.CutAfter(3);
  disk_.Pump();
  EXPECT_THAT(codes, ElementsAre(absl::StatusCode::kOk, absl::StatusCode::kOk,
                                 kOff, kOff, kOff, kOff));
  EXPECT_TRUE(disk_.stopped());
  EXPECT_EQ(file_->Sync().code(), kOff);
  EXPECT_EQ(disk_.OpenForRead("/d/file").status().code(), kOff);
  const uint64_t changes = disk_.changes();
  disk_.Restart(SimDisk::End::kKill);
  EXPECT_EQ(file_->Sync().code(), kOff);  // Of the former life.
  EXPECT_EQ(disk_.changes(), changes);
}

TEST_F(SimDiskTest, RequestsHappenInAnyOrderTheSameForOneSeed) {
  const auto order = [](uint64_t seed) {
    SimDisk disk(seed);
    const auto queue = *disk.StartQueue({});
    std::string done;
    for (char c = 'a'; c < 'k'; ++c) {
      IoRequest request;
      request.done = [&done, c](const absl::Status&) { done += c; };
      queue->Submit(std::move(request));
    }
    disk.Pump();
    return done;
  };
  EXPECT_EQ(order(5), order(5));
  EXPECT_NE(order(5), order(6));
}

TEST_F(SimDiskTest, AFullDiskRefusesAndHeals) {
  disk_.set_capacity(disk_.used_bytes() + 10 * kPageBytes);
  EXPECT_EQ(file_->Preallocate(64 * kPageBytes, 74 * kPageBytes),
            absl::OkStatus());
  EXPECT_TRUE(Says(file_->Preallocate(74 * kPageBytes, 75 * kPageBytes),
                   absl::StatusCode::kResourceExhausted, "/d/file"));
  disk_.set_capacity(~uint64_t{0});
  EXPECT_EQ(file_->Preallocate(74 * kPageBytes, 75 * kPageBytes),
            absl::OkStatus());
}

TEST_F(SimDiskTest, ALockEndsWithItsProcess) {
  const auto held = *disk_.Lock("/d/LOCK", "one");
  EXPECT_TRUE(Says(disk_.Lock("/d/LOCK", "two").status(),
                   absl::StatusCode::kAborted, "one"));
  Reopen(SimDisk::End::kKill);
  EXPECT_EQ(disk_.Lock("/d/LOCK", "two").status(), absl::OkStatus());
}

TEST_F(SimDiskTest, BatchesOfAStoreAreLostFromTheEndAndOnlyUnsynced) {
  std::set<size_t> kept;
  for (int i = 0; i < 60; ++i) {
    const std::string dir = absl::StrCat("/s", i);
    const auto store = *disk_.OpenStateStore(dir, {});
    ASSERT_EQ(store->Apply({{"a", "1"}}), absl::OkStatus());
    disk_.SkipSyncs([](const SimDisk::Sync& sync) {
      return sync.of == SimDisk::Sync::Of::kStore;
    });
    ASSERT_EQ(store->Apply({{"b", "2"}}), absl::OkStatus());
    ASSERT_EQ(store->Apply({{"c", "3"}}), absl::OkStatus());
    disk_.SkipSyncs(nullptr);
    disk_.Stop();
    EXPECT_EQ(store->Apply({{"d", "4"}}).code(), kOff);
    disk_.Restart(SimDisk::End::kPower);
    EmbeddedStoreOptions options;
    options.create = false;
    const auto again = *disk_.OpenStateStore(dir, options);
    const auto pairs = *again->Range("a", "z", 10);
    ASSERT_GE(pairs.size(), 1u);
    EXPECT_EQ(pairs.back().first, std::string(1, "abc"[pairs.size() - 1]));
    kept.insert(pairs.size());
  }
  EXPECT_THAT(kept, ElementsAre(1, 2, 3));
}

}  // namespace
}  // namespace ballast::testing
