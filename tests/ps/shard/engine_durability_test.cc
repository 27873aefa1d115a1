// SPDX-License-Identifier: Apache-2.0
// Durability `step`: an engine that is dropped anywhere and opened again gives
// the votes that it gave and makes the bits that an undisturbed twin makes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "ps/shard/shard_engine.h"
#include "tests/ps/shard/engine_harness.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

class EngineDurabilityTest : public ::testing::Test {
 protected:
  EngineDurabilityTest() {
    const ::testing::TestInfo* info =
        ::testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::path(::testing::TempDir()) /
            absl::StrCat("engine_", getpid(), "_", info->name());
    std::filesystem::remove_all(root_);
  }
  ~EngineDurabilityTest() override { std::filesystem::remove_all(root_); }

  HarnessOptions Options(const std::string& folder, uint64_t memory = 64 << 20,
                         uint64_t log_limit = 0) const {
    HarnessOptions options;
    options.dir = (root_ / folder).string();
    options.disk = PosixDisk();
    options.memory = memory;
    options.tiny = true;
    options.log_limit = log_limit;
    return options;
  }
  // What nothing ever happened to.
  std::string TwinState(uint64_t step, const std::set<uint64_t>& skipped = {}) {
    EngineHarness twin(Options("twin"));
    for (const uint64_t skip : skipped) {
      twin.SkipStep(skip);
    }
    EXPECT_TRUE(twin.StartLife().ok());
    EXPECT_TRUE(twin.TrainThrough(step));
    return twin.StateOf(step);
  }

  std::filesystem::path root_;
};

TEST_F(EngineDurabilityTest, ALifeGoesOnWhereTheOneBeforeItWas) {
  const std::string want = TwinState(4);
  for (const uint64_t memory : {uint64_t{64} << 20, uint64_t{0}}) {
    EngineHarness run(Options(absl::StrCat("run-", memory), memory));
    ASSERT_TRUE(run.StartLife().ok());
    ASSERT_TRUE(run.TrainThrough(3));
    ASSERT_TRUE(run.StartLife().ok());
    ASSERT_TRUE(run.TrainThrough(3));
    EXPECT_EQ(run.join().held(0).version(), 0u);
    EXPECT_EQ(run.join().held(0).redoable(), 3u);
    ASSERT_TRUE(run.TrainThrough(4));
    EXPECT_EQ(run.StateOf(4), want);
  }
}

TEST_F(EngineDurabilityTest, KilledAnywhereItLosesNoVoteAndNoBit) {
  constexpr uint64_t kSteps = 4;
  const std::string want = TwinState(kSteps);
  uint64_t whole = 0;
  {
    EngineHarness run(Options("measured", 0));
    run.steps_left = 1'000'000;
    ASSERT_TRUE(run.StartLife().ok());
    ASSERT_TRUE(run.TrainThrough(kSteps));
    whole = 1'000'000 - run.steps_left;
  }
  constexpr uint64_t kRuns = 12;
  for (uint64_t i = 0; i < kRuns; ++i) {
    SCOPED_TRACE(absl::StrCat("run ", i));
    EngineHarness run(
        Options(absl::StrCat("run-", i), i % 2 == 0 ? 0 : 64 << 20));
    int lives = 0;
    bool done = false;
    while (!done) {
      ASSERT_LT(++lives, 40);
      // Short lives and long ones, all different.
      run.steps_left = 1 + (whole * ((i + 1) * 7 + lives * 3) / 11) % whole;
      run.steps_left += lives > 20 ? whole : 0;
      const absl::Status status = run.StartLife();
      ASSERT_TRUE(status.ok()) << status;
      done = run.TrainThrough(kSteps);
      ASSERT_TRUE(run.engine().failure().ok()) << run.engine().failure();
      run.steps_left = UINT64_MAX;
    }
    EXPECT_EQ(run.StateOf(kSteps), want);
    run.Kill();
    std::filesystem::remove_all(root_ / absl::StrCat("run-", i));
  }
}

TEST_F(EngineDurabilityTest, AVoteIsGivenAgainWithoutAnyGradient) {
  const std::string want = TwinState(2);
  EngineHarness run(Options("run"));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(1));
  ASSERT_TRUE(run.Push(2) && run.WaitVote(2));
  const uint64_t heard = run.votes_heard;
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.WaitLoaded());
  // The harness compares its bytes with those of the first.
  ASSERT_TRUE(run.RunUntil([&] { return run.votes_heard > heard; }));
  run.Decide(2);
  ASSERT_TRUE(run.WaitConfirm(2));
  EXPECT_EQ(run.StateOf(2), want);
}

TEST_F(EngineDurabilityTest, ADecisionMadeWhileItWasAwayIsRedone) {
  const std::string want = TwinState(2);
  EngineHarness run(Options("run"));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(1));
  ASSERT_TRUE(run.Push(2) && run.WaitVote(2));
  run.Decide(2);  // Posted, and never looked at.
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.WaitLoaded());
  EXPECT_EQ(run.StateOf(2), want);
}

TEST_F(EngineDurabilityTest, GradientsWithoutAVoteAreForgotten) {
  const std::string want = TwinState(1);
  EngineHarness run(Options("run"));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.WaitLoaded());
  ASSERT_TRUE(run.Push(1));  // All appended perhaps, none promised.
  ASSERT_FALSE(run.voted(1));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(1));
  EXPECT_EQ(run.StateOf(1), want);
}

TEST_F(EngineDurabilityTest, SkippedStepsAreRedoneAsSkipped) {
  const std::string want = TwinState(4, {2, 3});
  EngineHarness run(Options("run"));
  run.SkipStep(2);
  run.SkipStep(3);
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(3));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(4));
  EXPECT_EQ(run.StateOf(4), want);
}

// Basis: the same step number was voted for in a history that is no more.
TEST_F(EngineDurabilityTest, RecordsOfAnAbandonedTimelineAreNotReplayed) {
  EngineHarness run(Options("run"));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(2));
  // Voted for step 3 of timeline 1, which timeline 2 then skips.
  ASSERT_TRUE(run.Push(3) && run.WaitVote(3));
  run.Branch(2);
  run.SkipStep(3);
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.WaitLoaded());
  EXPECT_FALSE(run.voted(3)) << "a vote of timeline 1 was given in timeline 2";
  ASSERT_TRUE(run.Push(3) && run.WaitVote(3));
  run.Decide(3);
  ASSERT_TRUE(run.WaitConfirm(3));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(4));
  EXPECT_EQ(run.StateOf(4), TwinState(4, {3}));
}

TEST_F(EngineDurabilityTest, ADecisionBeyondTheLogNamesChunkAndNumbers) {
  EngineHarness run(Options("run"));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(1));
  ASSERT_TRUE(run.StartLife().ok());
  v1::ServerDirective directive = run.MakeDirective();
  directive.set_load_step(2);
  *directive.add_decisions() = directive.decisions(0);
  directive.mutable_decisions(1)->set_step(2);
  run.Deliver(directive);
  EXPECT_FALSE(run.WaitLoaded());
  const absl::Status& failure = run.engine().failure();
  EXPECT_EQ(failure.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(failure.message()),
              HasSubstr("chunk 0 (wte.weight [0, "));
  EXPECT_THAT(std::string(failure.message()),
              HasSubstr("version 0, redoable through 1; want version 2"));
}

TEST_F(EngineDurabilityTest, ALoadToldAgainAnswersTheVersion) {
  EngineHarness run(Options("run"));
  ASSERT_TRUE(run.StartLife().ok());
  const v1::ServerDirective load = run.MakeDirective();
  ASSERT_TRUE(run.TrainThrough(2));
  const size_t before = run.reports().size();
  run.Deliver(load);
  ASSERT_TRUE(run.RunUntil([&] { return run.reports().size() > before; }));
  EXPECT_TRUE(run.reports().back().has_loaded());
  EXPECT_EQ(run.reports().back().loaded().step(), 2u);
}

TEST_F(EngineDurabilityTest, ADirectoryOfAnotherRunIsRefusedInWords) {
  EngineHarness run(Options("run"));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(1));
  run.Kill();
  HarnessOptions options = Options("run");
  options.run = "ffffffffffffffffffffffffffffffff";
  EngineHarness other(options);
  const absl::Status status = other.StartLife();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("belongs to run 00112233445566778899aabbccddeeff"));
}

// Its numbers are those of the message.
uint64_t SmallestLimit(const HarnessOptions& options) {
  HarnessOptions tiny = options;
  tiny.dir += "-tiny";
  tiny.log_limit = 1 << 16;
  EngineHarness run(tiny);
  EXPECT_TRUE(run.StartLife().ok());
  EXPECT_FALSE(run.WaitLoaded());
  const std::string message(run.engine().failure().message());
  EXPECT_EQ(run.engine().failure().code(), absl::StatusCode::kInvalidArgument);
  const size_t at = message.find("at least ");
  EXPECT_NE(at, std::string::npos) << message;
  return std::stoull(message.substr(at + 9));
}

TEST_F(EngineDurabilityTest, TheSmallestLogWorksAndOneByteLessDoesNot) {
  for (const uint64_t memory : {uint64_t{64} << 20, uint64_t{0}}) {
    HarnessOptions options = Options(absl::StrCat("run-", memory), memory);
    const uint64_t smallest = SmallestLimit(options);
    options.log_limit = smallest - 1;
    EngineHarness refused(options);
    ASSERT_TRUE(refused.StartLife().ok());
    EXPECT_FALSE(refused.WaitLoaded());
    refused.Kill();

    options.log_limit = smallest;
    EngineHarness run(options);
    ASSERT_TRUE(run.StartLife().ok());
    ASSERT_TRUE(run.TrainThrough(8));
    // Bases went along, or eight steps would not have fitted.
    EXPECT_GE(run.confirm(8)->base_step(), 5u);
    EXPECT_LE(run.engine().stats().log_bytes(), smallest);
    EXPECT_GT(run.confirm(8)->log_bytes(), 0u);
    EXPECT_GT(run.confirm(8)->log_seconds(), 0.0);
    ASSERT_TRUE(run.StartLife().ok());
    ASSERT_TRUE(run.TrainThrough(9));
    EXPECT_EQ(run.StateOf(9), TwinState(9));
    std::filesystem::remove_all(root_ / "twin");
  }
}

TEST_F(EngineDurabilityTest, AnOwedCheckpointIsTakenAfterARecovery) {
  EngineHarness run(Options("run"));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.TrainThrough(2));
  ASSERT_TRUE(run.StartLife().ok());
  ASSERT_TRUE(run.WaitLoaded());
  v1::ServerDirective directive = run.MakeDirective();
  for (const uint64_t step : {1, 2}) {
    v1::CheckpointId* owed = directive.add_owed_checkpoints();
    owed->set_timeline(1);
    owed->set_step(step);
  }
  for (int times = 1; times <= 2; ++times) {  // Told again when it stands.
    run.Deliver(directive);
    const auto saved = [&] {
      std::vector<uint64_t> steps;
      for (const v1::ReportRequest& report : run.reports()) {
        if (report.has_checkpoint_saved()) {
          steps.push_back(report.checkpoint_saved().step());
        }
      }
      return steps;
    };
    ASSERT_TRUE(run.RunUntil(
        [&] { return saved().size() == static_cast<size_t>(times); }));
    EXPECT_EQ(saved().back(), 2u);
  }
}

}  // namespace
}  // namespace ballast::testing
