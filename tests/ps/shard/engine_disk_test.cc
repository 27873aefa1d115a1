// SPDX-License-Identifier: Apache-2.0
// An engine on a disk that loses power, fills up and fails; and what a life
// does besides training.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/ps/shard/engine_harness.h"
#include "tests/testing/sim_disk.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

class EngineDiskTest : public ::testing::Test {
 protected:
  static HarnessOptions Options(SimDisk* disk, uint64_t memory = 64 << 20) {
    HarnessOptions options;
    options.dir = "/data";
    options.disk = disk;
    options.pump = [disk] { disk->PumpOne(); };
    options.memory = memory;
    options.tiny = true;
    return options;
  }
  // What nothing ever happened to.
  static const std::string& TwinState(uint64_t step) {
    static std::map<uint64_t, std::string>& states =
        *new std::map<uint64_t, std::string>();
    std::string& state = states[step];
    if (state.empty()) {
      SimDisk disk(1);
      EngineHarness twin(Options(&disk));
      EXPECT_TRUE(twin.StartLife().ok());
      EXPECT_TRUE(twin.TrainThrough(step));
      state = twin.StateOf(step);
    }
    return state;
  }
};

TEST_F(EngineDiskTest, PowerCutsLoseNoVoteAndNoBit) {
  constexpr uint64_t kSteps = 3;
  uint64_t whole = 0;
  {
    SimDisk disk(1);
    EngineHarness run(Options(&disk, 0));
    run.steps_left = 10'000'000;
    ASSERT_TRUE(run.StartLife().ok());
    ASSERT_TRUE(run.TrainThrough(kSteps));
    whole = 10'000'000 - run.steps_left;
  }
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    SimDisk disk(seed);
    HarnessOptions options = Options(&disk, seed % 2 == 0 ? 0 : 64 << 20);
    // Small, so that bases are made all the time.
    options.log_limit = 1'000'000;
    EngineHarness run(options);
    bool done = false;
    for (uint64_t life = 1; !done; ++life) {
      ASSERT_LT(life, 40u);
      run.steps_left = life > 15
                           ? UINT64_MAX
                           : 1 + (whole * (seed * 5 + life * 7) / 13) % whole;
      const absl::Status status = run.StartLife();
      ASSERT_TRUE(status.ok()) << status;
      done = run.TrainThrough(kSteps);
      ASSERT_TRUE(run.engine().failure().ok()) << run.engine().failure();
      if (!done) {
        disk.Stop();
        run.Kill();
        disk.Restart(SimDisk::End::kPower);
      }
    }
    run.steps_left = UINT64_MAX;
    EXPECT_EQ(run.StateOf(kSteps), TwinState(kSteps));
  }
}

TEST_F(EngineDiskTest, AVoteIsNotGivenBeforeItsSyncHasEnded) {
  SimDisk disk(1);
  EngineHarness run(Options(&disk));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.WaitLoaded());
  int syncs = 0;
  disk.OnSync([&](const SimDisk::Sync& sync) {
    if (absl::StrContains(sync.path, "/data/log/") && sync.wrote) {
      EXPECT_FALSE(run.voted(1));
      ++syncs;
    }
  });
  ASSERT_TRUE(run.Push(1) && run.WaitVote(1));
  EXPECT_EQ(syncs, 1) << "one sync a step";
}

TEST_F(EngineDiskTest, AFailedSyncOfTheLogEndsItWithoutAVote) {
  SimDisk disk(1);
  EngineHarness run(Options(&disk));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.WaitLoaded());
  disk.Fail(SimDisk::Operation::kSync, "/data/log/",
            absl::DataLossError("/data/log/segment: Input/output error"));
  ASSERT_TRUE(run.Push(1));
  EXPECT_FALSE(run.WaitVote(1));
  EXPECT_FALSE(run.voted(1));
  EXPECT_EQ(run.engine().failure().code(), absl::StatusCode::kDataLoss);
  const auto report = run.engine().LastReport();
  ASSERT_TRUE(report.has_value());
  EXPECT_THAT(report->fatal().message(), HasSubstr("Input/output error"));
}

TEST_F(EngineDiskTest, AFullDiskIsWaitedForAndNamed) {
  for (const uint64_t memory : {uint64_t{64} << 20, uint64_t{0}}) {
    SimDisk disk(1);
    HarnessOptions options = Options(&disk, memory);
    options.log_limit = 1'000'000;  // Segments are made and dropped.
    EngineHarness run(options);
    ASSERT_TRUE(run.StartLife().ok());
    ASSERT_TRUE(run.TrainThrough(1));
    disk.set_capacity(disk.used_bytes());
    run.CheckpointStep(3);
    run.steps_left = 20'000;
    EXPECT_FALSE(run.TrainThrough(6)) << "the disk was not full";
    ASSERT_TRUE(run.engine().failure().ok()) << run.engine().failure();
    const v1::MemberStats stats = run.engine().stats();
    EXPECT_THAT(stats.phase(), HasSubstr("read-only: "));
    EXPECT_THAT(stats.phase(), HasSubstr("/data/"));
    EXPECT_THAT(stats.phase(), HasSubstr("bytes"));
    disk.set_capacity(UINT64_MAX);
    run.steps_left = UINT64_MAX;
    ASSERT_TRUE(run.TrainThrough(6));
    EXPECT_EQ(run.StateOf(6), TwinState(6));
  }
}

TEST_F(EngineDiskTest, ALifeOnAFullDiskBeginsWhenThereIsSpace) {
  SimDisk disk(1);
  disk.set_capacity(0);
  EngineHarness run(Options(&disk));
  ASSERT_TRUE(run.StartLife().ok());
  run.steps_left = 100;
  EXPECT_FALSE(run.WaitLoaded());
  ASSERT_TRUE(run.engine().failure().ok()) << run.engine().failure();
  EXPECT_THAT(run.engine().stats().phase(), HasSubstr("read-only: "));
  disk.set_capacity(UINT64_MAX);
  run.clock_ahead = absl::Seconds(1);
  run.steps_left = UINT64_MAX;
  ASSERT_TRUE(run.TrainThrough(1));
  EXPECT_EQ(run.StateOf(1), TwinState(1));
}

// The old timeline's checkpoint is being written when the new one begins.
TEST_F(EngineDiskTest, ANewTimelineInOneLifeDropsTheOldOne) {
  for (const uint64_t memory : {uint64_t{64} << 20, uint64_t{0}}) {
    for (const Durability durability :
         {Durability::kCheckpoint, Durability::kStep}) {
      SimDisk disk(1);
      HarnessOptions options = Options(&disk, memory);
      options.durability = durability;
      EngineHarness run(options);
      ASSERT_TRUE(run.StartLife().ok());
      run.CheckpointStep(2);
      ASSERT_TRUE(run.TrainThrough(2));
      run.Branch(0);
      v1::ServerDirective load = run.MakeDirective();
      load.set_load_own(false);
      run.Deliver(load);
      ASSERT_TRUE(run.TrainThrough(3));
      EXPECT_EQ(run.StateOf(3), TwinState(3));
      for (const v1::ReportRequest& report : run.reports()) {
        EXPECT_FALSE(report.has_checkpoint_saved() &&
                     report.checkpoint_saved().timeline() == 1);
      }
    }
  }
}

TEST_F(EngineDiskTest, MoreWorkersThanPlannedShareTheCredit) {
  SimDisk disk(1);
  EngineHarness run(Options(&disk));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.WaitLoaded());
  EXPECT_EQ(run.StreamsWithCredit(3), 3);  // worker.count is 1.
}

TEST_F(EngineDiskTest, AskedToLeaveItReportsAndLeavesWhenTold) {
  SimDisk disk(1);
  EngineHarness run(Options(&disk));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(1));
  run.engine().Drain("SIGTERM");
  const auto reported = [&] {
    return run.reports().back().has_draining() &&
           run.reports().back().draining().reason() == "SIGTERM";
  };
  ASSERT_TRUE(run.RunUntil(reported));
  v1::ServerDirective exit;
  exit.set_task(v1::SERVER_EXIT);
  exit.set_timeline(1);
  run.Deliver(exit);
  run.RunUntil([&] { return run.engine().over(); });
  EXPECT_TRUE(run.engine().over());
  EXPECT_TRUE(run.engine().failure().ok());
  EXPECT_TRUE(run.engine().LastReport()->has_leaving());
}

TEST_F(EngineDiskTest, NobodyToldItToLeaveSoItLeavesAfterTheDrainTimeout) {
  SimDisk disk(1);
  EngineHarness run(Options(&disk));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(1));
  run.engine().Drain("SIGTERM");
  ASSERT_TRUE(
      run.RunUntil([&] { return run.reports().back().has_draining(); }));
  run.clock_ahead = absl::Seconds(29);  // Of 30.
  run.RunUntil([&] { return run.engine().over(); }, absl::Milliseconds(50));
  EXPECT_FALSE(run.engine().over());
  run.clock_ahead = absl::Seconds(31);
  run.RunUntil([&] { return run.engine().over(); });
  EXPECT_TRUE(run.engine().over());
  EXPECT_TRUE(run.engine().failure().ok());
}

}  // namespace
}  // namespace ballast::testing
