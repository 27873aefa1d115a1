// SPDX-License-Identifier: Apache-2.0
// The gradient log as a redo log: marks, syncs, and what a later life finds.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/gradient_log.h"
#include "storage/record.h"
#include "tests/storage/storage_testing.h"
#include "tests/testing/sim_disk.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;

constexpr auto kLoss = absl::StatusCode::kDataLoss;
constexpr uint64_t kPayload = 3 * kPageBytes;  // A record is four pages.

class LogRecoveryTest : public ::testing::Test {
 protected:
  GradientLog::Options Options() {
    GradientLog::Options options;
    options.disk = &disk_;
    options.dir = "/ps";
    options.run = kRun;
    options.keep = true;
    options.segment_bytes = 10 * kPageBytes;
    options.buffer_bytes = 64 << 10;
    return options;
  }
  absl::Status Open() {
    auto log = GradientLog::Open(Options());
    if (log.ok()) {
      log_ = *std::move(log);
    }
    return log.status();
  }
  absl::Status Reopen(SimDisk::End end) {
    disk_.Stop();
    log_.reset();
    disk_.Restart(end);
    return Open();
  }
  static GradientName Name(uint64_t step, uint32_t chunk) {
    return {1, step, chunk, kAllUses, {0, 8}};
  }
  static std::unique_ptr<AlignedBuffer> Payload(uint64_t step, uint32_t chunk) {
    auto bytes = std::make_unique<AlignedBuffer>(kPayload);
    FillRandom(step * 100 + chunk, bytes->span());
    return bytes;
  }
  absl::StatusOr<LogPosition> Append(const GradientName& name) {
    const auto payload = Payload(name.step, name.chunk);
    std::optional<absl::Status> written;
    auto position =
        log_->Append(name, payload->data(), payload->size(),
                     [&](absl::Status status) { written = std::move(status); });
    if (!position.ok()) {
      return position;
    }
    disk_.Pump();
    if (!written->ok()) {
      return *written;
    }
    return position;
  }
  absl::Status Sync() {
    std::optional<absl::Status> synced;
    log_->Sync([&](absl::Status status) { synced = std::move(status); });
    disk_.Pump();
    return *synced;
  }
  absl::Status Read(const GradientName& name, const LogPosition& position) {
    AlignedBuffer found(position.bytes);
    std::optional<absl::Status> read;
    log_->Read(name, position, found.data(),
               [&](absl::Status status) { read = std::move(status); });
    disk_.Pump();
    if (read->ok() &&
        std::memcmp(found.data(), Payload(name.step, name.chunk)->data(),
                    kPayload) != 0) {
      return absl::InternalError("other bytes");
    }
    return *read;
  }
  // Two gradients, a mark and a sync.
  absl::Status Vote(uint64_t step) {
    VoteMark mark = {1, step, "server-0", absl::StrCat("vote ", step), {}};
    for (uint32_t chunk = 0; chunk < 2; ++chunk) {
      const auto position = Append(Name(step, chunk));
      if (!position.ok()) {
        return position.status();
      }
      mark.gradients.emplace_back(chunk, *position);
    }
    absl::Status marked;
    marked.Update(log_->AppendMark(
        mark, [&](const absl::Status& status) { marked.Update(status); }));
    disk_.Pump();
    marked.Update(Sync());
    return marked;
  }
  std::vector<std::string> Votes() const {
    std::vector<std::string> votes;
    for (const VoteMark& mark : log_->contents().marks) {
      votes.push_back(mark.vote);
    }
    return votes;
  }
  std::string SegmentPath(uint64_t serial) const {
    return absl::StrCat("/ps/log/segment-",
                        absl::Hex(serial, absl::kZeroPad16));
  }

  SimDisk disk_{7};
  std::unique_ptr<GradientLog> log_;
};

TEST_F(LogRecoveryTest, FindsMarksWholeAndGradientsReadable) {
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_TRUE(log_->contents().marks.empty());
  for (uint64_t step = 1; step <= 3; ++step) {
    ASSERT_EQ(Vote(step), absl::OkStatus());
  }
  ASSERT_EQ(Reopen(SimDisk::End::kPower), absl::OkStatus());
  EXPECT_THAT(Votes(), ElementsAre("vote 1", "vote 2", "vote 3"));
  const LogContents& contents = log_->contents();
  EXPECT_EQ(contents.marks[1].owner, "server-0");
  EXPECT_EQ(contents.marks[1].step, 2u);
  EXPECT_EQ(contents.marks[1].timeline, 1u);
  EXPECT_EQ(contents.gradients.size(), 6u);
  for (const auto& [key, gradient] : contents.gradients) {
    EXPECT_EQ(Read(gradient.name, gradient.position), absl::OkStatus());
  }
  const auto& [chunk, position] = contents.marks[2].gradients[1];
  EXPECT_EQ(chunk, 1u);
  EXPECT_EQ(position, contents.gradients.at({1, 3, 1}).position);
}

TEST_F(LogRecoveryTest, GoesOnInANewSegmentAndFindsBothLives) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Vote(1), absl::OkStatus());
  const uint64_t bytes = log_->bytes();
  EXPECT_EQ(bytes, 2 * LogRecordBytes(kPayload) + 2 * kPageBytes);
  ASSERT_EQ(Reopen(SimDisk::End::kKill), absl::OkStatus());
  EXPECT_EQ(log_->bytes(), bytes);
  const uint64_t last =
      log_->contents().gradients.at({1, 1, 1}).position.segment;
  ASSERT_EQ(Vote(2), absl::OkStatus());
  ASSERT_EQ(Reopen(SimDisk::End::kPower), absl::OkStatus());
  EXPECT_THAT(Votes(), ElementsAre("vote 1", "vote 2"));
  EXPECT_GT(log_->contents().gradients.at({1, 2, 0}).position.segment, last);
}

TEST_F(LogRecoveryTest, SpansOfAGradientAreNoCompleteGradient) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Append({1, 1, 0, 0, {0, 4}}).status(), absl::OkStatus());
  ASSERT_EQ(Append(Name(1, 1)).status(), absl::OkStatus());
  ASSERT_EQ(Sync(), absl::OkStatus());
  ASSERT_EQ(Reopen(SimDisk::End::kPower), absl::OkStatus());
  ASSERT_EQ(log_->contents().gradients.size(), 1u);
  EXPECT_EQ(log_->contents().gradients.begin()->first.chunk, 1u);
}

TEST_F(LogRecoveryTest, OfAGradientThatCameTwiceTheLaterCounts) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Append(Name(1, 0)).status(), absl::OkStatus());
  const auto later = Append(Name(1, 0));
  ASSERT_EQ(Sync(), absl::OkStatus());
  ASSERT_EQ(Reopen(SimDisk::End::kPower), absl::OkStatus());
  EXPECT_EQ(log_->contents().gradients.at({1, 1, 0}).position, *later);
}

TEST_F(LogRecoveryTest, WhatWasNotSyncedIsATailAndNoLoss) {
  int whole = 0;
  for (uint64_t i = 1; i <= 60; ++i) {
    ASSERT_EQ(i == 1 ? Open() : absl::OkStatus(), absl::OkStatus());
    const size_t before = log_->contents().marks.size();
    ASSERT_EQ(Vote(2 * i), absl::OkStatus());
    // Over several segments, of which the middle one may be gone altogether.
    for (uint32_t chunk = 0; chunk < 7; ++chunk) {
      ASSERT_EQ(Append(Name(2 * i + 1, chunk)).status(), absl::OkStatus());
    }
    ASSERT_EQ(Reopen(SimDisk::End::kPower), absl::OkStatus());
    ASSERT_EQ(log_->contents().marks.size(), before + 1);
    whole += log_->contents().gradients.count({1, 2 * i + 1, 0}) != 0 ? 1 : 0;
  }
  EXPECT_LT(whole, 60);
}

// A record is damaged whose place a later record calls synced.
TEST_F(LogRecoveryTest, ABadRecordBelowTheSyncedPositionIsLossNamingIt) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Vote(1), absl::OkStatus());
  ASSERT_EQ(Vote(2), absl::OkStatus());
  log_.reset();
  disk_.FlipBit(SegmentPath(1), LogRecordBytes(kPayload) + 40);
  EXPECT_TRUE(
      Says(Reopen(SimDisk::End::kPower), kLoss,
           absl::StrCat(SegmentPath(1), " at ", LogRecordBytes(kPayload))));
}

TEST_F(LogRecoveryTest, ADamagedMarkBelowTheSyncedPositionIsLoss) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Vote(1), absl::OkStatus());
  ASSERT_EQ(Vote(2), absl::OkStatus());
  log_.reset();
  disk_.FlipBit(SegmentPath(1), 2 * LogRecordBytes(kPayload) + kPageBytes + 8);
  EXPECT_TRUE(
      Says(Reopen(SimDisk::End::kPower), kLoss, "payload does not match"));
}

// The last sync leaves no trace of itself, so damage there is a tail.
TEST_F(LogRecoveryTest, ABadRecordAboveTheSyncedPositionEndsTheLog) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Vote(1), absl::OkStatus());
  ASSERT_EQ(Vote(2), absl::OkStatus());
  const LogPosition damaged = {2, 0, kPayload};
  log_.reset();
  disk_.FlipBit(SegmentPath(damaged.segment), kPageBytes + 100);
  ASSERT_EQ(Reopen(SimDisk::End::kPower), absl::OkStatus());
  EXPECT_THAT(Votes(), ElementsAre("vote 1"));
  EXPECT_GT(log_->contents().tail_bytes, 0u);
  ASSERT_EQ(Vote(2), absl::OkStatus());
  ASSERT_EQ(Reopen(SimDisk::End::kPower), absl::OkStatus());
  EXPECT_THAT(Votes(), ElementsAre("vote 1", "vote 2"));
}

TEST_F(LogRecoveryTest, ADamagedGradientBelowIsLossWhenItIsRead) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Vote(1), absl::OkStatus());
  ASSERT_EQ(Vote(2), absl::OkStatus());
  log_.reset();
  disk_.FlipBit(SegmentPath(1), kPageBytes + 100);
  ASSERT_EQ(Reopen(SimDisk::End::kPower), absl::OkStatus());
  const auto& gradient = log_->contents().gradients.at({1, 1, 0});
  EXPECT_TRUE(Says(Read(gradient.name, gradient.position), kLoss, "checksum"));
}

TEST_F(LogRecoveryTest, RecycledBytesNeverPassForNewOnes) {
  ASSERT_EQ(Open(), absl::OkStatus());
  for (uint64_t step = 1; step <= 12; ++step) {
    ASSERT_EQ(Vote(step), absl::OkStatus());
    log_->DropThrough(step - 1);
  }
  EXPECT_LE(disk_.List("/ps/log")->size(), 4u);
  // A recycled segment with the first record alone in it.
  ASSERT_EQ(Append(Name(13, 0)).status(), absl::OkStatus());
  ASSERT_EQ(Reopen(SimDisk::End::kKill), absl::OkStatus());
  for (const VoteMark& mark : log_->contents().marks) {
    EXPECT_GE(mark.step, 11u);
  }
  EXPECT_EQ(log_->contents().marks.back().vote, "vote 12");
  EXPECT_EQ(log_->contents().gradients.rbegin()->first.step, 13u);
}

TEST_F(LogRecoveryTest, DropsTheOldestOnlySoThatNoGapIsLeft) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Vote(9), absl::OkStatus());
  ASSERT_EQ(Vote(2), absl::OkStatus());  // Of a chunk that moves here.
  ASSERT_EQ(Vote(10), absl::OkStatus());
  const uint64_t bytes = log_->bytes();
  log_->DropThrough(8);
  EXPECT_EQ(log_->bytes(), bytes);
  log_->DropThrough(9);
  EXPECT_LT(log_->bytes(), bytes);
  ASSERT_EQ(Vote(11), absl::OkStatus());
  ASSERT_EQ(Reopen(SimDisk::End::kPower), absl::OkStatus());
  EXPECT_EQ(Votes().back(), "vote 11");
}

TEST_F(LogRecoveryTest, OneSyncServesAllWhoWait) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Append(Name(1, 0)).status(), absl::OkStatus());
  const uint64_t before = log_->stats().syncs;
  int served = 0;
  for (int i = 0; i < 5; ++i) {
    log_->Sync([&](const absl::Status& status) { served += status.ok(); });
  }
  disk_.Pump();
  EXPECT_EQ(served, 5);
  EXPECT_EQ(log_->stats().syncs, before + 1);
  EXPECT_EQ(Sync(), absl::OkStatus());  // Nothing is new.
  EXPECT_EQ(log_->stats().syncs, before + 1);
}

TEST_F(LogRecoveryTest, ASyncWaitsForTheAppendsBeforeIt) {
  ASSERT_EQ(Open(), absl::OkStatus());
  for (uint32_t round = 0; round < 30; ++round) {
    const auto payload = Payload(1, round);
    std::vector<std::string> order;
    ASSERT_EQ(
        log_->Append(Name(1, round), payload->data(), payload->size(),
                     [&](const absl::Status&) { order.push_back("append"); })
            .status(),
        absl::OkStatus());
    log_->Sync([&](const absl::Status& status) {
      order.push_back(status.ok() ? "sync" : "failed");
    });
    disk_.Pump();
    EXPECT_THAT(order, ElementsAre("append", "sync"));
  }
}

TEST_F(LogRecoveryTest, AfterAFailedSyncNothingIsPromisedAgain) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Vote(1), absl::OkStatus());
  disk_.Fail(SimDisk::Operation::kSync, "segment-", absl::DataLossError("EIO"));
  EXPECT_TRUE(Says(Vote(2), kLoss, "nothing is voted from this log again"));
  EXPECT_TRUE(Says(Sync(), kLoss, "nothing is voted"));
  EXPECT_EQ(Append(Name(3, 0)).status().code(), kLoss);
  // A later life finds what was promised.
  ASSERT_EQ(Reopen(SimDisk::End::kPower), absl::OkStatus());
  EXPECT_THAT(Votes(), ElementsAre("vote 1"));
}

TEST_F(LogRecoveryTest, AFailedWriteIsAHoleThatNoSyncCovers) {
  ASSERT_EQ(Open(), absl::OkStatus());
  disk_.Fail(SimDisk::Operation::kWrite, "segment-",
             absl::DataLossError("EIO"));
  EXPECT_EQ(Append(Name(1, 0)).status().code(), kLoss);
  EXPECT_TRUE(Says(Sync(), kLoss, "hole"));
  EXPECT_TRUE(Says(Append(Name(1, 0)).status(), kLoss, "hole"));
}

TEST_F(LogRecoveryTest, AFailedSyncOnOpenIsLoss) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Vote(1), absl::OkStatus());
  log_.reset();
  disk_.Fail(SimDisk::Operation::kSync, "segment-", absl::DataLossError("EIO"));
  EXPECT_TRUE(Says(Reopen(SimDisk::End::kKill), kLoss, "segment-"));
}

TEST_F(LogRecoveryTest, AFullDiskRefusesAnAppendAndHeals) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Vote(1), absl::OkStatus());
  disk_.set_capacity(disk_.used_bytes());
  ASSERT_EQ(Append(Name(2, 0)).status().code(),
            absl::StatusCode::kResourceExhausted);
  disk_.set_capacity(~uint64_t{0});
  ASSERT_EQ(Vote(2), absl::OkStatus());
  ASSERT_EQ(Reopen(SimDisk::End::kPower), absl::OkStatus());
  EXPECT_THAT(Votes(), ElementsAre("vote 1", "vote 2"));
}

TEST_F(LogRecoveryTest, RecordsOfAnotherRunAreNoRecords) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Vote(1), absl::OkStatus());
  log_.reset();
  GradientLog::Options options = Options();
  options.run = {9, 9};
  const auto other = *GradientLog::Open(options);
  EXPECT_TRUE(other->contents().marks.empty());
  EXPECT_TRUE(other->contents().gradients.empty());
}

}  // namespace
}  // namespace ballast::testing
