// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr char kJob[] = R"(
run: {steps: 30}
model: {layers: 1, heads: 1, width: 8, context: 8}
batch: {micro_batches: 4, micro_batch_size: 1}
worker: {memory: 1MiB}
server: {memory: 1MiB}
)";

class RunFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name =
        (fs::temp_directory_path() / "run_folder_test.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    std::ofstream(folder_ / "text.txt") << "nine char";
    std::ofstream(folder_ / "job.yaml")
        << kJob << "data: {path: " << (folder_ / "text.txt").string() << "}\n";
  }
  void TearDown() override { fs::remove_all(folder_); }

  JobFile Load(std::vector<std::string> set = {}) {
    set.push_back(absl::StrCat("run.dir=", (folder_ / "run").string()));
    const auto file = LoadJobFile((folder_ / "job.yaml").string(), set);
    EXPECT_TRUE(file.ok()) << file.status();
    return *file;
  }

  std::string OpenError(const JobFile& file, bool resume) {
    const auto folder = LockedRunFolder::Open(file, resume, "job.yaml");
    EXPECT_FALSE(folder.ok());
    return folder.ok() ? "" : folder.status().ToString();
  }

  fs::path folder_;
};

TEST_F(RunFolderTest, WritesAConfigurationThatLoadsToTheSameJob) {
  const JobFile file = Load({"worker.count=2"});
  const auto folder = LockedRunFolder::Open(file, false, "job.yaml");
  ASSERT_TRUE(folder.ok()) << folder.status();
  const auto again = LoadJobFile(folder->config_path(), {});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(OperationsFields(again->job), OperationsFields(file.job));
  EXPECT_EQ(NumericsHash(again->job), NumericsHash(file.job));
}

// What a run leaves that committed a step.
void LeaveAStep(const fs::path& run) {
  std::ofstream(run / "metrics.jsonl") << "{\"step\": 1}\n";
}

TEST_F(RunFolderTest, AStartThatCameToNothingCanBeRepeated) {
  ASSERT_TRUE(LockedRunFolder::Open(Load(), false, "job.yaml").ok());
  std::ofstream(folder_ / "run/metrics.jsonl").flush();
  fs::create_directories(folder_ / "run/checkpoints");
  EXPECT_TRUE(LockedRunFolder::Open(Load(), false, "job.yaml").ok());
  EXPECT_THAT(OpenError(Load(), true), HasSubstr("nothing to resume in"));
}

TEST_F(RunFolderTest, AnEarlierRunIsRefusedAndNothingIsTouched) {
  ASSERT_TRUE(LockedRunFolder::Open(Load(), false, "job.yaml").ok());
  LeaveAStep(folder_ / "run");
  const auto written = fs::last_write_time(folder_ / "run/config.yaml");
  EXPECT_THAT(OpenError(Load(), false),
              HasSubstr("holds an earlier run; continue it with `ballast train "
                        "job.yaml --resume`"));
  EXPECT_EQ(fs::last_write_time(folder_ / "run/config.yaml"), written);
}

TEST_F(RunFolderTest, AServersDataFolderOfAnotherRunIsRefused) {
  fs::create_directories(folder_ / "run/servers/server-0");
  EXPECT_THAT(OpenError(Load(), false),
              HasSubstr("run/servers holds records of another run"));
  fs::remove(folder_ / "run/servers/server-0");
  EXPECT_TRUE(LockedRunFolder::Open(Load(), false, "job.yaml").ok());
}

TEST_F(RunFolderTest, ResumingNothingIsRefusedAndLeavesNothing) {
  EXPECT_THAT(OpenError(Load(), true), HasSubstr("nothing to resume in"));
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

TEST_F(RunFolderTest, AResumeMayChangeOperationsAndNotNumerics) {
  ASSERT_TRUE(LockedRunFolder::Open(Load(), false, "job.yaml").ok());
  LeaveAStep(folder_ / "run");
  EXPECT_TRUE(
      LockedRunFolder::Open(Load({"worker.count=3", "server.memory=2MiB"}),
                            true, "job.yaml")
          .ok());
  const std::string error = OpenError(Load({"optimizer.lr=0.5"}), true);
  EXPECT_THAT(error, HasSubstr("INVALID_ARGUMENT: optimizer.lr is 0.5; the "
                               "run to resume has 0.001 ("));
}

TEST_F(RunFolderTest, TwoLaunchersDoNotShareAFolder) {
  const auto first = LockedRunFolder::Open(Load(), false, "job.yaml");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT(OpenError(Load(), false),
              HasSubstr("is in use by another `ballast train`"));
}

TEST_F(RunFolderTest, TheTextMustBeAFileLongerThanAContext) {
  Job job = Load().job;
  EXPECT_TRUE(CheckText(job).ok());
  job.model.context = 9;
  EXPECT_THAT(CheckText(job).ToString(),
              HasSubstr("has 9 bytes; want more than model.context = 9"));
  job.data.path = (folder_ / "none").string();
  EXPECT_THAT(CheckText(job).ToString(), HasSubstr("is not there"));
  job.data.path = folder_.string();
  EXPECT_THAT(CheckText(job).ToString(), HasSubstr("is not a file"));
  job.data.path = (folder_ / "empty").string();
  std::ofstream(job.data.path).flush();
  EXPECT_THAT(CheckText(job).ToString(), HasSubstr("is empty"));
}

TEST_F(RunFolderTest, FindsTheReasonInALog) {
  const std::string log = (folder_ / "log").string();
  EXPECT_EQ(LastComplaint(log), "");
  std::ofstream(log) << "x INFO event=a why=\"no error\"\n"
                        "x ERROR event=failed why=\"too \\\"small\\\"\" at=3\n"
                        "x INFO event=bye\n";
  EXPECT_EQ(LastComplaint(log), "too \"small\"");
  std::ofstream(log, std::ios::app)
      << "ballast-ps: server-1: the disk is full: 3 of 4\n";
  EXPECT_EQ(LastComplaint(log), "server-1: the disk is full: 3 of 4");
}

TEST_F(RunFolderTest, ShowsTheLastLinesOfALog) {
  std::ofstream(folder_ / "log") << "a\nb\nc\nd";
  EXPECT_EQ(LastLines((folder_ / "log").string(), 2), "  c\n  d\n");
  EXPECT_EQ(LastLines((folder_ / "log").string(), 9), "  a\n  b\n  c\n  d\n");
  EXPECT_EQ(LastLines((folder_ / "none").string(), 2), "");
}

}  // namespace
}  // namespace ballast
