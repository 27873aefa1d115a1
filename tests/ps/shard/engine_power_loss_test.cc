// SPDX-License-Identifier: Apache-2.0
// The real engine of a shard server, cut at every write and every sync of its
// first steps. The next life brings what a coordinator asks of it and ends with
// the bits of a run that nothing ever happened to; and taking out a sync that a
// vote or a base needs is noticed.

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/ps/shard/engine_harness.h"
#include "tests/storage/storage_testing.h"
#include "tests/testing/sim_disk.h"

namespace ballast::testing {
namespace {

constexpr uint64_t kSteps = 3;
// Enough for the twin many times over; a life that needs more is stuck.
constexpr uint64_t kEngineSteps = 200'000;

HarnessOptions Options(SimDisk* disk) {
  HarnessOptions options;
  options.dir = "/data";
  options.disk = disk;
  options.pump = [disk] { disk->PumpOne(); };
  // Small, so that bases are made and segments recycled all the time.
  options.log_limit = 4'500'000;
  return options;
}

const std::string& TwinState() {
  static const std::string& state = *new std::string([] {
    SimDisk disk(1);
    EngineHarness twin(Options(&disk));
    EXPECT_TRUE(twin.StartLife().ok());
    EXPECT_TRUE(twin.TrainThrough(kSteps));
    return twin.StateOf(kSteps);
  }());
  return state;
}

struct Cut {
  uint64_t n = 1;  // The change that does not end.
  // After it the process is killed, lives on for a while, and then the power
  // goes: what the second life said must not have been in the page cache alone.
  bool kill_first = false;
  std::function<bool(const SimDisk::Sync&)> skips;
};

// False when the run has no n-th change. Violations are test failures.
bool RunWithCut(const Cut& cut) {
  SimDisk disk(cut.n);
  disk.SkipSyncs(cut.skips);
  EngineHarness run(Options(&disk));
  run.steps_left = kEngineSteps;
  disk.CutAfter(cut.n);
  if (run.StartLife().ok()) {
    run.TrainThrough(kSteps);
  }
  const bool reached = disk.stopped();
  disk.Stop();
  run.Kill();
  if (cut.kill_first) {
    disk.Restart(SimDisk::End::kKill);
    EXPECT_EQ(run.StartLife(), absl::OkStatus());
    run.WaitLoaded();
    disk.Stop();
    run.Kill();
  }
  disk.Restart(SimDisk::End::kPower);
  run.steps_left = kEngineSteps;
  const absl::Status started = run.StartLife();
  EXPECT_EQ(started, absl::OkStatus());
  if (started.ok()) {
    const bool trained = run.TrainThrough(kSteps);
    EXPECT_TRUE(trained) << run.engine().failure();
    if (trained) {
      EXPECT_EQ(run.StateOf(kSteps), TwinState());
    }
  }
  return reached;
}

// `--every` cuts at every change, which takes minutes; otherwise a few, others
// in each run. (power_loss_test cuts the same storage everywhere.)
uint64_t Stride() {
  for (const std::string& argument : ::testing::internal::GetArgvs()) {
    if (argument == "--every") {
      return 1;
    }
  }
  return 16;
}

TEST(EnginePowerLossTest, EveryCutIsSurvivedWithoutLosingAVoteOrABit) {
  TwinState();
  const uint64_t stride = Stride();
  const uint64_t first = 1 + Seed() % stride;
  uint64_t cuts = 0;
  for (const bool kill_first : {false, true}) {
    for (uint64_t n = first; !::testing::Test::HasFailure();
         n += stride, ++cuts) {
      SCOPED_TRACE(absl::StrCat("change ", n, kill_first ? ", killed" : ""));
      if (!RunWithCut({n, kill_first, nullptr})) {
        break;
      }
    }
  }
  std::printf("%llu cuts\n", static_cast<unsigned long long>(cuts));
  EXPECT_GT(cuts, 10u);
}

// The first segment of an unsynced tail was gone, and a scan took what stood
// before it for dropped.
TEST(EnginePowerLossTest, ATailWhoseFirstSegmentIsGoneLosesNoVote) {
  TwinState();
  EXPECT_TRUE(RunWithCut({123, false, nullptr}));
}

// Whether cuts here and there show that the syncs are missing.
bool IsNoticed(const std::function<bool(const SimDisk::Sync&)>& skips) {
  ::testing::TestPartResultArray failures;
  const ::testing::ScopedFakeTestPartResultReporter reporter(
      ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS,
      &failures);
  for (const bool kill_first : {false, true}) {
    for (uint64_t n = 1; RunWithCut({n, kill_first, skips}); n += 7) {
      if (failures.size() > 0) {
        return true;
      }
    }
  }
  return failures.size() > 0;
}

TEST(EnginePowerLossTest, TakingOutASyncOfTheLogIsNoticed) {
  TwinState();
  EXPECT_TRUE(IsNoticed([](const SimDisk::Sync& sync) {
    return sync.wrote && absl::StrContains(sync.path, "/data/log/segment-");
  }));
}

TEST(EnginePowerLossTest, TakingOutASyncOfTheSlabIsNoticed) {
  TwinState();
  EXPECT_TRUE(IsNoticed(
      [](const SimDisk::Sync& sync) { return sync.path == "/data/slab"; }));
}

TEST(EnginePowerLossTest, TakingOutASyncOfTheIndexIsNoticed) {
  TwinState();
  EXPECT_TRUE(IsNoticed([](const SimDisk::Sync& sync) {
    return sync.wrote && sync.of == SimDisk::Sync::Of::kStore;
  }));
}

}  // namespace
}  // namespace ballast::testing
