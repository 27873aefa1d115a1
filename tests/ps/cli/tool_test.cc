// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/tool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "ps/membership/run_state.h"
#include "ps/membership/step_chain.h"
#include "storage/state_store.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Result {
  int code = 0;
  std::string out;
  std::string err;
};

Result RunBallast(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "ballast");
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  Result result;
  result.code = RunTool(static_cast<int>(arguments.size()), arguments.data(),
                        Surroundings());
  result.out = testing::internal::GetCapturedStdout();
  result.err = testing::internal::GetCapturedStderr();
  return result;
}

class ToolTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name =
        (std::filesystem::temp_directory_path() / "tool_test.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    job_ = folder_ + "/job.yaml";
    std::ofstream(job_)
        << "run: {steps: 30}\n"
           "model: {layers: 1, heads: 1, width: 8, context: 8}\n"
           "data: {path: none.txt}\n"
           "batch: {micro_batches: 4, micro_batch_size: 1}\n"
           "worker: {memory: 1MiB}\n"
           "server: {memory: 1MiB}\n";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string folder_;
  std::string job_;
};

TEST_F(ToolTest, EveryCommandExplainsItself) {
  const std::vector<std::vector<const char*>> commands = {
      {},
      {"train"},
      {"status"},
      {"worker"},
      {"worker", "add"},
      {"worker", "drain"},
      {"server"},
      {"server", "add"},
      {"server", "drain"},
      {"stop"},
      {"shard"},
      {"shard", "list"},
      {"shard", "get"},
      {"shard", "locate"},
      {"checkpoint"},
      {"checkpoint", "list"},
      {"checkpoint", "verify"},
      {"checkpoint", "export"}};
  for (std::vector<const char*> command : commands) {
    command.push_back("--help");
    const Result result = RunBallast(command);
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.out, HasSubstr("Exit codes:"));
    EXPECT_THAT(result.out, HasSubstr("Example:\n  ballast "));
  }
}

TEST_F(ToolTest, WrongUsageExitsWithTwoAndOneLine) {
  const std::vector<std::vector<const char*>> commands = {
      {},
      {"trian"},
      {"train"},
      {"train", "a.yaml", "b.yaml"},
      {"train", "a.yaml", "--workers", "0"},
      {"train", "a.yaml", "--stop-after", "-1"},
      {"train", "a.yaml", "--no-such"},
      {"train", "a.yaml", "--chaos", ""},
      {"train", "a.yaml", "--chaos", "seed=1,kill=worker"},
      {"worker"},
      {"worker", "add", "0"},
      {"worker", "add", "two"},
      {"worker", "drain"},
      {"worker", "drain", "server-1"},
      {"server", "drain", "server-1", "--timeout", "soon"},
      {"server", "add", "--timeout", "0s"},
      {"checkpoint", "verify", "--chain", "x", "--step", "1"},
      {"checkpoint", "verify", "--chain", "x", "--run-dir", "y"},
      {"shard"},
      {"shard", "get"},
      {"checkpoint", "export", "--run-dir", "x"},
      {"checkpoint", "export", "--output", "x", "--format", "pickle"}};
  for (const std::vector<const char*>& command : commands) {
    const Result result = RunBallast(command);
    EXPECT_EQ(result.code, kExitUsage)
        << (command.empty() ? "" : command.back());
    EXPECT_THAT(result.err, StartsWith("ballast: "));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
  }
}

TEST_F(ToolTest, PrintConfigShowsValuesWithTheirSourcesAndStartsNothing) {
  const Result result =
      RunBallast({"train", "--set", "worker.count=2", job_.c_str(), "--servers",
                  "3", "--print-config"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, ::testing::ContainsRegex("worker.count +2 +# --set"));
  EXPECT_THAT(result.out, ::testing::ContainsRegex("server.count +3 +# --set"));
  EXPECT_THAT(result.out,
              ::testing::ContainsRegex("run.steps +30 +# .*job.yaml:1"));
  EXPECT_THAT(result.out,
              ::testing::ContainsRegex("optimizer.lr +0.001 +# default"));
  EXPECT_FALSE(std::filesystem::exists("runs"));
}

TEST_F(ToolTest, BadConfigurationExitsWith78BeforeAnythingStarts) {
  const Result unknown =
      RunBallast({"train", job_.c_str(), "--set", "worker.memry=1"});
  EXPECT_EQ(unknown.code, kExitBadConfig);
  EXPECT_THAT(unknown.err, HasSubstr("did you mean worker.memory?"));
  const Result missing =
      RunBallast({"train", (folder_ + "/none.yaml").c_str()});
  EXPECT_EQ(missing.code, kExitBadConfig);
  const Result text = RunBallast({"train", job_.c_str()});
  EXPECT_EQ(text.code, kExitBadConfig);
  EXPECT_THAT(text.err, HasSubstr("data.path none.txt is not there"));
  EXPECT_FALSE(std::filesystem::exists("runs"));
}

TEST_F(ToolTest, AMissingRoleIsNamed) {
  std::ofstream(folder_ + "/text") << std::string(1000, 'x');
  const Result result =
      RunBallast({"train", job_.c_str(), "--set",
                  ("data.path=" + folder_ + "/text").c_str(), "--set",
                  ("run.dir=" + folder_ + "/run").c_str()});
  EXPECT_EQ(result.code, kExitFailed);
  EXPECT_THAT(result.err, HasSubstr("ballast-coordinator"));
}

TEST_F(ToolTest, QueriesWithoutAClusterFailWithTheAddress) {
  std::ofstream(folder_ + "/coordinator.address") << "127.0.0.1:1\n";
  for (const char* command : {"status", "stop"}) {
    const Result result = RunBallast({command, "--run-dir", folder_.c_str()});
    EXPECT_EQ(result.code, kExitFailed);
    EXPECT_THAT(result.err, HasSubstr("no answer from a coordinator at "
                                      "127.0.0.1:1"));
  }
  const Result list =
      RunBallast({"shard", "list", "--coordinator", "127.0.0.1:1"});
  EXPECT_EQ(list.code, kExitFailed);
  const Result nowhere =
      RunBallast({"status", "--run-dir", (folder_ + "/none").c_str()});
  EXPECT_EQ(nowhere.code, kExitFailed);
  EXPECT_THAT(nowhere.err, HasSubstr("no coordinator.address in"));
}

TEST_F(ToolTest, AChangeOfSizeNeedsACluster) {
  for (const std::vector<const char*>& command :
       std::vector<std::vector<const char*>>{
           {"worker", "add", "--coordinator", "127.0.0.1:1"},
           {"server", "drain", "1", "--coordinator", "127.0.0.1:1"}}) {
    const Result result = RunBallast(command);
    EXPECT_EQ(result.code, kExitFailed);
    EXPECT_THAT(result.err, HasSubstr("no answer from a coordinator"));
  }
}

TEST_F(ToolTest, AChainThatIsNotThereIsSaidSoAndNothingIsMade) {
  const Result result =
      RunBallast({"checkpoint", "verify", "--chain", folder_.c_str()});
  EXPECT_EQ(result.code, kExitFailed);
  EXPECT_THAT(result.err, HasSubstr("no step log in " + folder_));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/coordinator"));
}

TEST_F(ToolTest, TheChainOfAStoppedRunIsCheckedOffline) {
  {
    const auto store = OpenEmbeddedStateStore(folder_ + "/coordinator");
    ASSERT_TRUE(store.ok()) << store.status();
    RunIdentity identity;
    identity.run_id = std::string(32, '0');
    identity.timeline = 1;
    std::vector<StateChange> changes = {PutIdentity(identity),
                                        PutBranch(1, {})};
    v1::Decision decision;
    std::string chain;
    for (uint64_t step = 1; step <= 3; ++step) {
      decision.set_timeline(1);
      decision.set_step(step);
      decision.set_chain(chain = ChainOf(chain, decision));
      changes.push_back(PutDecision(decision));
    }
    ASSERT_TRUE((*store)->Apply(changes).ok());
  }
  const Result whole =
      RunBallast({"checkpoint", "verify", "--chain", folder_.c_str()});
  EXPECT_EQ(whole.code, kExitDone) << whole.err;
  EXPECT_THAT(whole.out, HasSubstr("steps 1 to 3"));
  EXPECT_THAT(whole.out, HasSubstr("3 of 3 records"));
  {
    const auto store = OpenEmbeddedStateStore(folder_ + "/coordinator");
    ASSERT_TRUE(store.ok()) << store.status();
    v1::Decision changed;
    changed.set_timeline(1);
    changed.set_step(2);
    changed.set_loss(1.0);
    changed.set_chain(std::string(16, 'x'));
    ASSERT_TRUE((*store)->Apply({PutDecision(changed)}).ok());
    // While somebody has it open, it is not read.
    const Result busy =
        RunBallast({"checkpoint", "verify", "--chain", folder_.c_str()});
    EXPECT_EQ(busy.code, kExitFailed);
  }
  const Result broken = RunBallast(
      {"checkpoint", "verify", "--json", "--chain", folder_.c_str()});
  EXPECT_EQ(broken.code, kExitFailed);
  EXPECT_THAT(broken.err, HasSubstr("step 2 of timeline 1"));
}

TEST_F(ToolTest, CheckpointsOfAnEmptyFolderAreNotThere) {
  const Result verify =
      RunBallast({"checkpoint", "verify", "--run-dir", folder_.c_str()});
  EXPECT_EQ(verify.code, kExitFailed);
  EXPECT_THAT(verify.err, HasSubstr("no checkpoint in"));
  const Result list = RunBallast(
      {"checkpoint", "list", "--run-dir", folder_.c_str(), "--json"});
  EXPECT_EQ(list.code, kExitFailed);
  EXPECT_THAT(list.err, HasSubstr("no checkpoint in"));
}

}  // namespace
}  // namespace ballast
