// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/run_folder.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using Json = nlohmann::json;

StepMetrics Line(uint64_t step, double loss) {
  StepMetrics line;
  line.decision.set_step(step);
  line.decision.set_timeline(1);
  line.decision.set_loss(loss);
  line.log_bytes = 10 * step;
  return line;
}

EvaluationRecord Evaluation(uint64_t step, double loss) {
  return {{1, step}, loss, 0.5};
}

// "step:value" of each line.
std::vector<std::string> Read(const std::string& path, const char* field) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string text; std::getline(file, text);) {
    const Json line = Json::parse(text);
    lines.push_back(
        absl::StrCat(line["step"].get<int>(), ":", line[field].get<double>()));
  }
  return lines;
}

class RunFolderTest : public ::testing::Test {
 protected:
  std::unique_ptr<RunFolder> Open(const RunState& state, uint64_t step) {
    auto folder = *RunFolder::Open(dir_.path("run"));
    EXPECT_EQ(folder->Reconcile(state, step), absl::OkStatus());
    return folder;
  }
  std::vector<std::string> Metrics() {
    return Read(dir_.path("run/metrics.jsonl"), "loss");
  }
  std::vector<std::string> Evaluations() {
    return Read(dir_.path("run/evaluations.jsonl"), "validation_loss");
  }
  static RunState StateThrough(uint64_t last) {
    RunState state;
    state.identity.emplace();
    state.identity->timeline = 1;
    for (uint64_t step = 1; step <= last; ++step) {
      state.decisions[{1, step}] = Line(step, 2.0).decision;
    }
    return state;
  }
  using Lines = std::vector<std::string>;
  testing::TempDir dir_;
};

TEST_F(RunFolderTest, AStepHasOneLineHoweverOftenItIsTold) {
  const auto folder = Open({}, 0);
  ASSERT_EQ(folder->AppendMetrics({Line(1, 1), Line(2, 1)}), absl::OkStatus());
  ASSERT_EQ(folder->AppendMetrics({Line(2, 9), Line(3, 1)}), absl::OkStatus());
  EXPECT_EQ(Metrics(), (Lines{"1:1", "2:1", "3:1"}));
  ASSERT_EQ(folder->AppendEvaluations({Evaluation(0, 5), Evaluation(2, 1)}),
            absl::OkStatus());
  ASSERT_EQ(folder->AppendEvaluations({Evaluation(0, 9), Evaluation(2, 9)}),
            absl::OkStatus());
  EXPECT_EQ(Evaluations(), (Lines{"0:5", "2:1"}));
}

// Whatever a crash left of the file, the step log makes it whole.
TEST_F(RunFolderTest, ACrashAtAnyByteLeavesNoGap) {
  {
    const auto folder = Open({}, 0);
    ASSERT_EQ(folder->AppendMetrics({Line(1, 1), Line(2, 1), Line(3, 1)}),
              absl::OkStatus());
  }
  const std::string path = dir_.path("run/metrics.jsonl");
  const std::string whole = testing::Slurp(path);
  for (size_t cut = 0; cut <= whole.size(); ++cut) {
    testing::Spill(path, whole.substr(0, cut));
    const auto folder = Open(StateThrough(3), 3);
    ASSERT_EQ(folder->AppendMetrics({Line(3, 9), Line(4, 4)}),
              absl::OkStatus());
    const Lines lines = Metrics();
    ASSERT_EQ(lines.size(), 4u) << cut;
    for (size_t i = 0; i < 3; ++i) {
      // Read back, or filled in from the log.
      EXPECT_TRUE(lines[i] == absl::StrCat(i + 1, ":1") ||
                  lines[i] == absl::StrCat(i + 1, ":2"))
          << lines[i];
    }
    EXPECT_EQ(lines[3], "4:4");
  }
}

TEST_F(RunFolderTest, ARollBackTakesOutWhatCameAfterAndGoesOnFromThere) {
  const auto folder = Open({}, 0);
  ASSERT_EQ(folder->AppendMetrics({Line(1, 1), Line(2, 1), Line(3, 1)}),
            absl::OkStatus());
  ASSERT_EQ(folder->AppendEvaluations({Evaluation(1, 1), Evaluation(3, 1)}),
            absl::OkStatus());
  ASSERT_EQ(folder->RollBack(1), absl::OkStatus());
  EXPECT_EQ(Metrics(), (Lines{"1:1"}));
  EXPECT_EQ(Evaluations(), (Lines{"1:1"}));
  ASSERT_EQ(folder->AppendMetrics({Line(2, 7)}), absl::OkStatus());
  EXPECT_EQ(Metrics(), (Lines{"1:1", "2:7"}));
}

TEST_F(RunFolderTest, AFormerLeaderWritesToFilesWithoutAName) {
  const auto old = Open({}, 0);
  ASSERT_EQ(old->AppendMetrics({Line(1, 1)}), absl::OkStatus());
  const auto next = Open(StateThrough(2), 2);
  ASSERT_EQ(old->AppendMetrics({Line(2, 9), Line(3, 9)}), absl::OkStatus());
  ASSERT_EQ(next->AppendMetrics({Line(3, 3)}), absl::OkStatus());
  EXPECT_EQ(Metrics(), (Lines{"1:1", "2:2", "3:3"}));
}

TEST_F(RunFolderTest, AFullDiskLeavesNoHalfLine) {
  const testing::SmallDisk disk(1 << 20);
  if (!disk.ok()) {
    GTEST_SKIP() << "a small tmpfs cannot be mounted here (not root?): the "
                    "full disk is NOT tested";
  }
  auto folder = *RunFolder::Open(disk.path("run"));
  ASSERT_EQ(folder->Reconcile({}, 0), absl::OkStatus());
  testing::Spill(disk.path("ballast"), std::string(900 << 10, 'x'));
  uint64_t step = 1;
  absl::Status status;
  while (status.ok() && step < 5000) {
    status = folder->AppendMetrics({Line(step, 1)});
    step += status.ok() ? 1 : 0;
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  std::filesystem::remove(disk.path("ballast"));
  ASSERT_EQ(folder->AppendMetrics({Line(step, 1)}), absl::OkStatus());
  EXPECT_EQ(Read(disk.path("run/metrics.jsonl"), "loss").size(), step);
}

TEST_F(RunFolderTest, WhatWasMeasuredCanBeReadBack) {
  const auto folder = Open(StateThrough(1), 1);  // Filled in: not measured.
  StepMetrics line = Line(2, 1);
  line.decision.set_tokens(100);
  line.step_seconds = 0.5;
  line.log_seconds = 0.25;
  ASSERT_EQ(folder->AppendMetrics({line}), absl::OkStatus());
  const auto measured = folder->ReadMeasured();
  ASSERT_EQ(measured.status(), absl::OkStatus());
  ASSERT_EQ(measured->size(), 1u);
  EXPECT_EQ((*measured)[0].decision.tokens(), 100u);
  EXPECT_EQ((*measured)[0].step_seconds, 0.5);
  EXPECT_EQ((*measured)[0].log_seconds, 0.25);
  EXPECT_EQ((*measured)[0].log_bytes, 20u);
}

TEST_F(RunFolderTest, WhatDurabilityCostsIsInEachLine) {
  const Json line = Json::parse(MetricsJson(Line(3, 1)));
  EXPECT_EQ(line["log_bytes"], 30);
  EXPECT_EQ(line["log_s"], 0.0);
}

}  // namespace
}  // namespace ballast
