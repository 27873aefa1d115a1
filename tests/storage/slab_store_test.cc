// SPDX-License-Identifier: Apache-2.0
#include "storage/slab_store.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "storage/record.h"
#include "tests/storage/storage_testing.h"
#include "tests/testing/sim_disk.h"

namespace ballast {
namespace {

using testing::Await;
using testing::kRun;
using testing::Says;

constexpr auto kLoss = absl::StatusCode::kDataLoss;
constexpr uint64_t kBody = 16 * kPageBytes;

SlabStore::Options At(const std::string& dir) {
  SlabStore::Options options;
  options.dir = dir;
  options.run = kRun;
  options.owner = "ps-0 pid 1";
  options.extend_bytes = 8 * kBody;
  return options;
}

std::unique_ptr<SlabStore> Open(const std::string& dir) {
  auto store = SlabStore::Open(At(dir));
  EXPECT_EQ(store.status(), absl::OkStatus());
  return store.ok() ? *std::move(store) : nullptr;
}

absl::Status Put(SlabStore* store, const Extent& extent, uint64_t seed) {
  AlignedBuffer data(extent.bytes);
  testing::FillRandom(seed, data.span());
  return Await(
      [&](auto done) { store->Write(extent, data.data(), std::move(done)); });
}

// Whether the extent holds what Put(seed) wrote.
bool Holds(SlabStore* store, const Extent& extent, uint64_t seed) {
  AlignedBuffer wanted(extent.bytes);
  testing::FillRandom(seed, wanted.span());
  AlignedBuffer found(extent.bytes);
  return Await([&](auto done) {
           store->Read(extent, extent.bytes, found.data(), std::move(done));
         }).ok() &&
         std::memcmp(found.data(), wanted.data(), extent.bytes) == 0;
}

// Writes `count` bodies, seeded by version and chunk, and names them.
StoredCheckpoint Write(SlabStore* store, uint64_t step, uint32_t count) {
  StoredCheckpoint checkpoint = {1, step, {}};
  for (uint32_t chunk = 0; chunk < count; ++chunk) {
    const Extent extent = *store->Allocate(kBody);
    EXPECT_EQ(Put(store, extent, step * 1000 + chunk), absl::OkStatus());
    checkpoint.entries.push_back({chunk, step, 1, extent});
  }
  return checkpoint;
}

bool IsIntact(SlabStore* store, const StoredCheckpoint& checkpoint) {
  for (const CheckpointEntry& entry : checkpoint.entries) {
    if (!Holds(store, entry.extent, entry.version * 1000 + entry.chunk)) {
      return false;
    }
  }
  return true;
}

void ReleaseAll(SlabStore* store, const StoredCheckpoint& checkpoint) {
  for (const CheckpointEntry& entry : checkpoint.entries) {
    store->Release(entry.extent);
  }
}

std::unique_ptr<SlabStore> OpenOn(testing::SimDisk* disk) {
  SlabStore::Options options = At("/ps");
  options.disk = disk;
  auto store = SlabStore::Open(options);
  EXPECT_EQ(store.status(), absl::OkStatus());
  return store.ok() ? *std::move(store) : nullptr;
}

// As Write, on a simulated disk.
StoredCheckpoint WriteOn(testing::SimDisk* disk, SlabStore* store,
                         uint64_t step, uint32_t count) {
  StoredCheckpoint checkpoint = {1, step, {}};
  AlignedBuffer body(kBody);
  for (uint32_t chunk = 0; chunk < count; ++chunk) {
    const Extent extent = *store->Allocate(kBody);
    absl::Status written = absl::UnknownError("not yet");
    store->Write(extent, body.data(),
                 [&](absl::Status status) { written = std::move(status); });
    disk->Pump();
    EXPECT_EQ(written, absl::OkStatus());
    checkpoint.entries.push_back({chunk, step, 1, extent});
  }
  return checkpoint;
}

TEST(SlabStoreTest, ACheckpointIsThereAfterAReopen) {
  const testing::TempDir dir;
  {
    const auto store = Open(dir.path("ps"));
    EXPECT_TRUE(store->checkpoints().empty());
    ASSERT_EQ(store->Commit(Write(store.get(), 5, 3)), absl::OkStatus());
    ASSERT_EQ(store->Commit(Write(store.get(), 9, 3)), absl::OkStatus());
    EXPECT_EQ(store->stats().bytes_written, 6 * kBody);
    EXPECT_EQ(store->stats().syncs, 2u);
  }
  const auto store = Open(dir.path("ps"));
  const std::vector<StoredCheckpoint> found = store->checkpoints();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].step, 5u);
  EXPECT_EQ(found[1].step, 9u);
  ASSERT_EQ(found[1].entries.size(), 3u);
  EXPECT_EQ(found[1].entries[2].chunk, 2u);
  EXPECT_EQ(found[1].entries[2].version, 9u);
  EXPECT_TRUE(IsIntact(store.get(), found[0]));
  EXPECT_TRUE(IsIntact(store.get(), found[1]));
}

TEST(SlabStoreTest, ReadsAPrefixOfAnExtent) {
  const testing::TempDir dir;
  const auto store = Open(dir.path("ps"));
  const Extent extent = *store->Allocate(kBody);
  ASSERT_EQ(Put(store.get(), extent, 1), absl::OkStatus());
  AlignedBuffer wanted(kBody);
  testing::FillRandom(1, wanted.span());
  AlignedBuffer found(kBody);
  ASSERT_EQ(Await([&](auto done) {
              store->Read(extent, kPageBytes, found.data(), std::move(done));
            }),
            absl::OkStatus());
  EXPECT_EQ(std::memcmp(found.data(), wanted.data(), kPageBytes), 0);
  EXPECT_EQ(found.data()[kPageBytes], std::byte{0});
  EXPECT_EQ(store->stats().bytes_read, kPageBytes);
}

TEST(SlabStoreTest, PiecesOfAnExtentLieWhereTheyBelong) {
  const testing::TempDir dir;
  const auto store = Open(dir.path("ps"));
  const Extent before = *store->Allocate(kBody);
  const Extent extent = *store->Allocate(kBody);
  const Extent behind = *store->Allocate(kBody);
  ASSERT_EQ(Put(store.get(), before, 1), absl::OkStatus());
  ASSERT_EQ(Put(store.get(), behind, 3), absl::OkStatus());
  AlignedBuffer data(kBody);
  testing::FillRandom(2, data.span());
  constexpr uint64_t kPiece = 6 * kPageBytes;  // The last one is shorter.
  for (const uint64_t offset : {2 * kPiece, uint64_t{0}, kPiece}) {
    const uint64_t bytes = std::min(kPiece, kBody - offset);
    ASSERT_EQ(Await([&](auto done) {
                store->WritePiece(extent, offset, bytes, data.data() + offset,
                                  std::move(done));
              }),
              absl::OkStatus());
  }
  EXPECT_TRUE(Holds(store.get(), before, 1));
  EXPECT_TRUE(Holds(store.get(), extent, 2));
  EXPECT_TRUE(Holds(store.get(), behind, 3));
  AlignedBuffer found(kPiece);
  ASSERT_EQ(Await([&](auto done) {
              store->ReadPiece(extent, kPiece, kPiece, found.data(),
                               std::move(done));
            }),
            absl::OkStatus());
  EXPECT_EQ(std::memcmp(found.data(), data.data() + kPiece, kPiece), 0);
}

TEST(SlabStoreTest, ExtentsOfALiveCheckpointAreNeverReused) {
  const testing::TempDir dir;
  const auto store = Open(dir.path("ps"));
  const StoredCheckpoint checkpoint = Write(store.get(), 1, 4);
  ASSERT_EQ(store->Commit(checkpoint), absl::OkStatus());
  ReleaseAll(store.get(), checkpoint);
  std::set<uint64_t> pinned;
  for (const CheckpointEntry& entry : checkpoint.entries) {
    pinned.insert(entry.extent.offset);
  }
  for (int i = 0; i < 20; ++i) {
    const Extent extent = *store->Allocate(kBody);
    EXPECT_EQ(pinned.count(extent.offset), 0u);
    ASSERT_EQ(Put(store.get(), extent, 1), absl::OkStatus());
  }
  EXPECT_TRUE(IsIntact(store.get(), checkpoint));
}

TEST(SlabStoreTest, ExtentsOfADroppedCheckpointAreReused) {
  const testing::TempDir dir;
  const auto store = Open(dir.path("ps"));
  const StoredCheckpoint checkpoint = Write(store.get(), 1, 8);
  ASSERT_EQ(store->Commit(checkpoint), absl::OkStatus());
  ReleaseAll(store.get(), checkpoint);
  ASSERT_EQ(store->Drop(1, 1), absl::OkStatus());
  EXPECT_TRUE(store->checkpoints().empty());
  EXPECT_EQ(*store->Allocate(8 * kBody), (Extent{0, 8 * kBody}));
}

TEST(SlabStoreTest, ADropLeavesWhatAWorkingOwnerOrAnotherCheckpointHolds) {
  const testing::TempDir dir;
  const auto store = Open(dir.path("ps"));
  StoredCheckpoint first = Write(store.get(), 1, 3);
  ASSERT_EQ(store->Commit(first), absl::OkStatus());
  StoredCheckpoint second = {1, 2, {first.entries[0]}};
  ASSERT_EQ(store->Commit(second), absl::OkStatus());
  store->Release(first.entries[0].extent);
  store->Release(first.entries[2].extent);
  ASSERT_EQ(store->Drop(1, 1), absl::OkStatus());
  // Chunk 0 is pinned by step 2, chunk 1 owned, chunk 2 free.
  EXPECT_EQ(*store->Allocate(kBody), first.entries[2].extent);
}

TEST(SlabStoreTest, AnAdoptedExtentOutlivesItsCheckpoint) {
  const testing::TempDir dir;
  StoredCheckpoint checkpoint;
  {
    const auto store = Open(dir.path("ps"));
    checkpoint = Write(store.get(), 1, 1);
    ASSERT_EQ(store->Commit(checkpoint), absl::OkStatus());
  }
  const auto store = Open(dir.path("ps"));
  const Extent extent = checkpoint.entries[0].extent;
  store->Adopt(extent);
  ASSERT_EQ(store->Drop(1, 1), absl::OkStatus());
  EXPECT_NE(store->Allocate(kBody)->offset, extent.offset);
  store->Release(extent);
  EXPECT_EQ(store->Allocate(kBody)->offset, extent.offset);
}

TEST(SlabStoreTest, WhatNoCheckpointNamesIsFreeAfterAReopen) {
  const testing::TempDir dir;
  uint64_t slab_bytes = 0;
  {
    const auto store = Open(dir.path("ps"));
    ASSERT_EQ(store->Commit(Write(store.get(), 1, 2)), absl::OkStatus());
    Write(store.get(), 2, 6);
    slab_bytes = std::filesystem::file_size(store->slab_path());
  }
  const auto store = Open(dir.path("ps"));
  Write(store.get(), 3, 6);
  EXPECT_EQ(std::filesystem::file_size(store->slab_path()), slab_bytes);
  EXPECT_TRUE(IsIntact(store.get(), store->checkpoints().at(0)));
}

TEST(SlabStoreTest, TheSameCommitAgainIsOkAndAnotherIsRefused) {
  const testing::TempDir dir;
  const auto store = Open(dir.path("ps"));
  StoredCheckpoint checkpoint = Write(store.get(), 1, 2);
  ASSERT_EQ(store->Commit(checkpoint), absl::OkStatus());
  EXPECT_EQ(store->Commit(checkpoint), absl::OkStatus());
  EXPECT_EQ(store->checkpoints().size(), 1u);
  checkpoint.entries[0].version = 0;
  EXPECT_TRUE(Says(store->Commit(checkpoint), absl::StatusCode::kAlreadyExists,
                   "step 1"));
  checkpoint.timeline = 2;  // After a rollback the step comes again.
  EXPECT_EQ(store->Commit(checkpoint), absl::OkStatus());
  EXPECT_EQ(store->Drop(7, 7), absl::OkStatus());
}

TEST(SlabStoreTest, ACommitOfAnExtentThatNobodyHoldsIsRefused) {
  const testing::TempDir dir;
  const auto store = Open(dir.path("ps"));
  StoredCheckpoint checkpoint = Write(store.get(), 1, 2);
  store->Release(checkpoint.entries[1].extent);
  EXPECT_TRUE(Says(store->Commit(checkpoint),
                   absl::StatusCode::kInvalidArgument, "for chunk 1"));
  // Nothing of it stays pinned.
  store->Release(checkpoint.entries[0].extent);
  EXPECT_EQ(store->Allocate(8 * kBody)->offset, 0u);
}

TEST(SlabStoreTest, ABaseIsThereAfterAReopenAndTheNewestCounts) {
  testing::SimDisk disk(1);
  {
    const auto store = OpenOn(&disk);
    EXPECT_TRUE(store->bases().empty());
    const StoredCheckpoint first = WriteOn(&disk, store.get(), 1, 3);
    ASSERT_EQ(store->CommitBase(first.entries), absl::OkStatus());
    const StoredCheckpoint second = WriteOn(&disk, store.get(), 2, 2);
    ASSERT_EQ(store->CommitBase({second.entries[1]}), absl::OkStatus());
    EXPECT_EQ(store->stats().syncs, 2u);
    ASSERT_EQ(store->CommitBase({second.entries[1]}), absl::OkStatus());
    EXPECT_EQ(store->stats().syncs, 2u);  // It stands.
  }
  const auto store = OpenOn(&disk);
  const std::vector<CheckpointEntry> bases = store->bases();
  ASSERT_EQ(bases.size(), 3u);
  for (uint32_t chunk = 0; chunk < 3; ++chunk) {
    EXPECT_EQ(bases[chunk].chunk, chunk);
    EXPECT_EQ(bases[chunk].version, chunk == 1 ? 2u : 1u);
    EXPECT_EQ(bases[chunk].timeline, 1u);
  }
}

TEST(SlabStoreTest, AnOldBaseIsFreeOnceTheNewOneStands) {
  testing::SimDisk disk(1);
  const auto store = OpenOn(&disk);
  const StoredCheckpoint first = WriteOn(&disk, store.get(), 1, 1);
  ASSERT_EQ(store->CommitBase(first.entries), absl::OkStatus());
  ReleaseAll(store.get(), first);
  const StoredCheckpoint second = WriteOn(&disk, store.get(), 2, 1);
  EXPECT_NE(second.entries[0].extent, first.entries[0].extent);
  ASSERT_EQ(store->CommitBase(second.entries), absl::OkStatus());
  ReleaseAll(store.get(), second);
  EXPECT_EQ(*store->Allocate(kBody), first.entries[0].extent);
  EXPECT_NE(*store->Allocate(kBody), second.entries[0].extent);
}

TEST(SlabStoreTest, ABaseThatACheckpointSharesOutlivesEither) {
  testing::SimDisk disk(1);
  const auto store = OpenOn(&disk);
  const StoredCheckpoint first = WriteOn(&disk, store.get(), 1, 1);
  ASSERT_EQ(store->CommitBase(first.entries), absl::OkStatus());
  ASSERT_EQ(store->Commit(first), absl::OkStatus());
  ReleaseAll(store.get(), first);
  ASSERT_EQ(store->Drop(1, 1), absl::OkStatus());
  EXPECT_NE(*store->Allocate(kBody), first.entries[0].extent);
  ASSERT_EQ(store->DropBase({0, 7}), absl::OkStatus());
  EXPECT_TRUE(store->bases().empty());
  EXPECT_EQ(*store->Allocate(kBody), first.entries[0].extent);
}

TEST(SlabStoreTest, ABaseOfAnExtentThatNobodyHoldsIsRefused) {
  testing::SimDisk disk(1);
  const auto store = OpenOn(&disk);
  const StoredCheckpoint first = WriteOn(&disk, store.get(), 1, 2);
  store->Release(first.entries[1].extent);
  EXPECT_TRUE(Says(store->CommitBase(first.entries),
                   absl::StatusCode::kInvalidArgument, "for chunk 1"));
  EXPECT_TRUE(store->bases().empty());
}

// The batch may be on the disk although it failed: until that is settled both
// the old record and the new one stay.
TEST(SlabStoreTest, AFailedBaseLeavesTheOldOneAndIsSettledBeforeTheNext) {
  testing::SimDisk disk(1);
  const auto store = OpenOn(&disk);
  const StoredCheckpoint first = WriteOn(&disk, store.get(), 1, 1);
  ASSERT_EQ(store->CommitBase(first.entries), absl::OkStatus());
  ReleaseAll(store.get(), first);
  const StoredCheckpoint second = WriteOn(&disk, store.get(), 2, 1);
  disk.Fail(testing::SimDisk::Operation::kSync, "/index",
            absl::ResourceExhaustedError("full"));
  EXPECT_EQ(store->CommitBase(second.entries).code(),
            absl::StatusCode::kResourceExhausted);
  ReleaseAll(store.get(), second);
  EXPECT_EQ(store->bases()[0].version, 1u);
  const Extent third = *store->Allocate(kBody);
  EXPECT_NE(third, first.entries[0].extent);
  EXPECT_NE(third, second.entries[0].extent);
  ASSERT_EQ(store->DropBase({5}), absl::OkStatus());  // Settles.
  EXPECT_EQ(*store->Allocate(kBody), second.entries[0].extent);
  EXPECT_EQ(store->bases()[0].version, 1u);
}

TEST(SlabStoreTest, AFailedSyncEndsAllCommitsButNotWhatStands) {
  testing::SimDisk disk(1);
  StoredCheckpoint first;
  {
    const auto store = OpenOn(&disk);
    first = WriteOn(&disk, store.get(), 1, 2);
    ASSERT_EQ(store->Commit(first), absl::OkStatus());
    const StoredCheckpoint second = WriteOn(&disk, store.get(), 2, 2);
    disk.Fail(testing::SimDisk::Operation::kSync, "/slab",
              absl::DataLossError("EIO"));
    EXPECT_TRUE(Says(store->Commit(second), kLoss, "/slab"));
    EXPECT_TRUE(Says(store->Commit(second), kLoss, "restart the server"));
    EXPECT_TRUE(
        Says(store->CommitBase(second.entries), kLoss, "restart the server"));
    EXPECT_EQ(store->checkpoints().size(), 1u);
    EXPECT_TRUE(store->bases().empty());
  }
  const auto store = OpenOn(&disk);
  ASSERT_EQ(store->checkpoints().size(), 1u);
  EXPECT_EQ(store->checkpoints()[0].entries, first.entries);
}

TEST(SlabStoreTest, AKillWithoutCommitLeavesTheOldCheckpointIntact) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "TSan allows no threads in a forked child: the kill is NOT "
                  "tested";
#endif
  const testing::TempDir dir;
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto store = Open(dir.path("ps"));
    const StoredCheckpoint first = Write(store.get(), 1, 4);
    bool ok = store->Commit(first).ok();
    ReleaseAll(store.get(), first);
    for (uint64_t step = 2; step < 6; ++step) {
      ReleaseAll(store.get(), Write(store.get(), step, 4));
    }
    [[maybe_unused]] const auto put = write(pipe_fds[1], ok ? "y" : "n", 1);
    pause();
    _exit(1);
  }
  close(pipe_fds[1]);  // A child that dies ends the wait.
  char told = 0;
  ASSERT_EQ(read(pipe_fds[0], &told, 1), 1);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(pipe_fds[0]);
  ASSERT_EQ(told, 'y');
  const auto store = Open(dir.path("ps"));
  ASSERT_EQ(store->checkpoints().size(), 1u);
  EXPECT_EQ(store->checkpoints()[0].step, 1u);
  EXPECT_EQ(store->checkpoints()[0].entries.size(), 4u);
  EXPECT_TRUE(IsIntact(store.get(), store->checkpoints()[0]));
}

TEST(SlabStoreTest, ASecondOpenerIsRefusedNamingTheOwner) {
  const testing::TempDir dir;
  const auto store = Open(dir.path("ps"));
  EXPECT_TRUE(Says(SlabStore::Open(At(dir.path("ps"))).status(),
                   absl::StatusCode::kFailedPrecondition, "ps-0 pid 1"));
}

// Losses at open: each is told by path, none becomes a fresh store.
class SlabStoreLossTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto store = Open(dir_.path("ps"));
    ASSERT_EQ(store->Commit(Write(store.get(), 1, 4)), absl::OkStatus());
  }
  absl::Status TryOpen() {
    return SlabStore::Open(At(dir_.path("ps"))).status();
  }
  testing::TempDir dir_;
};

TEST_F(SlabStoreLossTest, ASlabCutShortIsLossNamingItsPath) {
  ASSERT_EQ(truncate(dir_.path("ps/slab").c_str(), 4 * kBody), 0);
  EXPECT_EQ(TryOpen(), absl::OkStatus());
  ASSERT_EQ(truncate(dir_.path("ps/slab").c_str(), 4 * kBody - 1), 0);
  EXPECT_TRUE(Says(TryOpen(), kLoss, dir_.path("ps/slab")));
}

TEST_F(SlabStoreLossTest, ALostSlabIsLoss) {
  std::filesystem::remove(dir_.path("ps/slab"));
  EXPECT_TRUE(Says(TryOpen(), kLoss, "slab is missing"));
  EXPECT_FALSE(std::filesystem::exists(dir_.path("ps/slab")));
}

TEST_F(SlabStoreLossTest, ALostIndexIsLoss) {
  std::filesystem::remove_all(dir_.path("ps/index"));
  EXPECT_TRUE(Says(TryOpen(), kLoss, dir_.path("ps/index")));
}

TEST_F(SlabStoreLossTest, ADamagedIndexIsLossNamingItsPath) {
  { Open(dir_.path("ps")); }  // The log becomes a table.
  for (const auto& entry :
       std::filesystem::directory_iterator(dir_.path("ps/index"))) {
    if (entry.path().extension() == ".sst") {
      testing::FlipByte(entry.path().string(), 10);
    }
  }
  EXPECT_TRUE(Says(TryOpen(), kLoss, dir_.path("ps/index")));
}

TEST(SlabStoreTest, AFullDiskIsAnErrorThatHealsAndLosesNothing) {
  const testing::SmallDisk disk(64 * kBody);
  if (!disk.ok()) {
    GTEST_SKIP() << "a small tmpfs cannot be mounted here (not root?): the "
                    "full disk is NOT tested";
  }
  const auto store = Open(disk.path("ps"));
  const StoredCheckpoint first = Write(store.get(), 1, 4);
  ASSERT_EQ(store->Commit(first), absl::OkStatus());
  std::vector<Extent> taken;
  absl::Status full;
  for (int i = 0; i < 100; ++i) {
    const auto extent = store->Allocate(kBody);
    if (!extent.ok()) {
      full = extent.status();
      break;
    }
    taken.push_back(*extent);
  }
  EXPECT_TRUE(
      Says(full, absl::StatusCode::kResourceExhausted, disk.path("ps/slab")));
  EXPECT_GT(taken.size(), 40u);
  EXPECT_EQ(Put(store.get(), taken.back(), 3), absl::OkStatus());
  EXPECT_TRUE(IsIntact(store.get(), first));
  // A release is enough to go on.
  store->Release(taken.front());
  const auto again = store->Allocate(kBody);
  ASSERT_EQ(again.status(), absl::OkStatus());
  EXPECT_EQ(*again, taken.front());
}

// Commits while the disk has no room for the index: the store keeps what it
// has, does not leak extents over retries, and heals.
TEST(SlabStoreTest, ACommitOnAFullDiskMayBeTriedAgain) {
  const testing::SmallDisk disk(64 * kBody);
  if (!disk.ok()) {
    GTEST_SKIP() << "a small tmpfs cannot be mounted here (not root?): the "
                    "full disk is NOT tested";
  }
  const auto store = Open(disk.path("ps"));
  StoredCheckpoint checkpoint = Write(store.get(), 1, 1);
  const CheckpointEntry entry = checkpoint.entries[0];
  checkpoint.entries.resize(4000, entry);  // 144 KiB of index.
  std::string ballast(64 * kBody, 'x');
  testing::Spill(disk.path("ballast"), ballast);
  absl::Status status;
  for (int i = 0; i < 50 && status.ok(); ++i) {
    checkpoint.step = 100 + static_cast<uint64_t>(i);
    status = store->Commit(checkpoint);
  }
  ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(store->Commit(checkpoint).code(),
              absl::StatusCode::kResourceExhausted);
  }
  std::filesystem::remove(disk.path("ballast"));
  EXPECT_EQ(store->Commit(checkpoint), absl::OkStatus());
  for (const StoredCheckpoint& found : store->checkpoints()) {
    EXPECT_EQ(store->Drop(found.timeline, found.step), absl::OkStatus());
  }
  store->Release(entry.extent);
  EXPECT_EQ(store->Allocate(8 * kBody)->offset, 0u);
}

// Every step: write some chunks anew, sometimes commit, drop or reopen. The
// model is what each (checkpoint, chunk) must hold.
TEST(SlabStoreTest, AgreesWithAModelUnderRandomUse) {
  std::mt19937_64 random(testing::Seed());
  const testing::TempDir dir;
  auto store = Open(dir.path("ps"));
  std::map<uint32_t, CheckpointEntry> working;
  std::map<uint64_t, StoredCheckpoint> committed;
  for (uint64_t step = 1; step < 120; ++step) {
    const uint64_t choice = random() % 8;
    if (choice < 5) {
      const auto chunk = static_cast<uint32_t>(random() % 6);
      const Extent extent =
          *store->Allocate(kPageBytes * (1 + chunk + random() % 2));
      ASSERT_EQ(Put(store.get(), extent, step * 1000 + chunk),
                absl::OkStatus());
      if (const auto it = working.find(chunk); it != working.end()) {
        store->Release(it->second.extent);
      }
      working[chunk] = {chunk, step, 1, extent};
    } else if (choice == 5) {
      StoredCheckpoint checkpoint = {1, step, {}};
      for (const auto& [chunk, entry] : working) {
        checkpoint.entries.push_back(entry);
      }
      ASSERT_EQ(store->Commit(checkpoint), absl::OkStatus());
      committed[step] = checkpoint;
    } else if (choice == 6 && committed.size() > 1) {
      const uint64_t dropped = committed.begin()->first;
      ASSERT_EQ(store->Drop(1, dropped), absl::OkStatus());
      committed.erase(dropped);
    } else if (choice == 7) {
      store.reset();
      store = Open(dir.path("ps"));
      working.clear();
      if (!committed.empty()) {
        for (const CheckpointEntry& entry :
             committed.rbegin()->second.entries) {
          store->Adopt(entry.extent);
          working[entry.chunk] = entry;
        }
      }
      ASSERT_EQ(store->checkpoints().size(), committed.size());
    }
    for (const auto& [at, checkpoint] : committed) {
      ASSERT_TRUE(IsIntact(store.get(), checkpoint)) << at;
    }
    for (const auto& [chunk, entry] : working) {
      ASSERT_TRUE(
          Holds(store.get(), entry.extent, entry.version * 1000 + chunk));
    }
  }
}

}  // namespace
}  // namespace ballast
