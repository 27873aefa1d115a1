// SPDX-License-Identifier: Apache-2.0
// The launcher over scripts that stand for the roles: what it does when one of
// them ends, refuses, hangs or is interrupted. Whole runs: tests/integration.
#include "ps/cli/training.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr char kJob[] = R"(
run: {steps: 30}
model: {layers: 1, heads: 1, width: 8, context: 8}
data: {path: text.txt}
batch: {micro_batches: 4, micro_batch_size: 1}
worker: {memory: 1MiB, count: 2}
server: {memory: 1MiB, count: 2}
)";

// Nobody listens on port 1, so that calls of the launcher fail at once.
constexpr char kAnnounce[] = R"(
while [ $# -gt 0 ]; do
  if [ "$1" = --announce-fd ]; then fd=$2; fi
  shift
done
eval "echo 127.0.0.1:1 >&$fd; exec $fd>&-"
)";
// All five roles have been started.
constexpr char kUntilAllStarted[] =
    "while [ $(wc -l <${0%/*}/pids) -lt 5 ]; do sleep 0.02; done\n";
constexpr char kUntilTold[] =
    "trap 'kill $!; exit 0' TERM\nsleep 1000 & wait\n";
constexpr char kStuck[] = "trap '' TERM\nwhile :; do sleep 1; done\n";

struct Outcome {
  int code = 0;
  std::string out;
  std::string err;
};

class TrainingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name =
        (fs::temp_directory_path() / "training_test.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    std::ofstream(folder_ / "job.yaml") << kJob;
  }
  void TearDown() override {
    // Whatever happened, no role is left.
    std::ifstream pids(folder_ / "pids");
    for (pid_t pid = 0; pids >> pid;) {
      EXPECT_EQ(kill(pid, 0), -1) << pid;
      EXPECT_EQ(errno, ESRCH);
    }
    fs::remove_all(folder_);
  }

  void Script(const std::string& role, const std::string& body) {
    const fs::path path = folder_ / role;
    std::ofstream(path) << "#!/bin/bash\necho $$ >>" << folder_.string()
                        << "/pids\n"
                        << body;
    chmod(path.c_str(), 0755);
  }

  Outcome Train(const std::map<std::string, std::string>& bodies) {
    for (const auto& [role, body] : bodies) {
      Script(role, body);
    }
    const auto file =
        LoadJobFile((folder_ / "job.yaml").string(),
                    {absl::StrCat("run.dir=", (folder_ / "run").string())});
    EXPECT_TRUE(file.ok()) << file.status();
    const auto run = LockedRunFolder::Open(*file, false, "job.yaml");
    EXPECT_TRUE(run.ok()) << run.status();
    TrainingOptions options;
    options.job_path = "job.yaml";
    Surroundings surroundings;
    surroundings.binary_dir = folder_.string();
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    Outcome outcome;
    outcome.code = RunTraining(*file, *run, options, surroundings);
    outcome.out = testing::internal::GetCapturedStdout();
    outcome.err = testing::internal::GetCapturedStderr();
    return outcome;
  }

  fs::path folder_;
};

TEST_F(TrainingTest, EndsWellWhenEveryRoleDoes) {
  const Outcome outcome = Train({{"ballast-coordinator", kAnnounce},
                                 {"ballast-ps", "exit 0"},
                                 {"ballast-worker", "exit 0"}});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
}

TEST_F(TrainingTest, GivesEachRoleItsArguments) {
  Train({{"ballast-coordinator",
          std::string("echo \"$@\"\n") + kAnnounce + kUntilAllStarted},
         {"ballast-ps", "echo \"$@\""},
         {"ballast-worker", "echo \"$@\""}});
  const std::string config =
      absl::StrCat("--config ", (folder_ / "run/config.yaml").string());
  const auto log = [this](const char* name) {
    return LastLines(
        (folder_ / "run/logs" / (std::string(name) + ".log")).string(), 1);
  };
  EXPECT_THAT(log("coordinator"),
              HasSubstr(absl::StrCat(config, " --announce-fd ")));
  EXPECT_EQ(log("server-1"),
            absl::StrCat("  ", config,
                         " --coordinator 127.0.0.1:1 --index 1 --data-dir ",
                         (folder_ / "run/servers/server-1").string(),
                         " --listen 127.0.0.1:0\n"));
  EXPECT_EQ(
      log("worker-0"),
      absl::StrCat("  ", config, " --coordinator 127.0.0.1:1 --index 0\n"));
}

TEST_F(TrainingTest, NamesAKilledRoleAndShowsItsLastLines) {
  const Outcome outcome =
      Train({{"ballast-coordinator", std::string(kAnnounce) + kUntilTold},
             {"ballast-ps",
              "echo this is $1 >&2\ncase \"$*\" in *'--index 1'*) kill -9 $$;; "
              "esac\n" +
                  std::string(kUntilTold)},
             {"ballast-worker", kUntilTold}});
  EXPECT_EQ(outcome.code, kExitFailed);
  EXPECT_THAT(outcome.err, HasSubstr("ballast: server-1 (pid "));
  EXPECT_THAT(outcome.err, HasSubstr("was killed by signal 9 (Killed)"));
  EXPECT_THAT(outcome.err, HasSubstr("logs/server-1.log:\n  this is --config"));
  EXPECT_THAT(outcome.err, HasSubstr("start over with: ballast train"));
}

TEST_F(TrainingTest, StartsAKilledRoleAgainAndGoesOn) {
  const std::string first_life =
      "if mkdir ${0%/*}/killed 2>/dev/null; then kill -9 $$; fi\n";
  const Outcome outcome =
      Train({{"ballast-coordinator",
              std::string(kAnnounce) +
                  "while [ $(wc -l <${0%/*}/pids) -lt 6 ]; do sleep 0.02; "
                  "done\n"},
             {"ballast-ps", "exit 0"},
             {"ballast-worker", first_life + "exit 0"}});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr(") was killed by signal 9 (Killed); "
                                     "started again\n"));
}

TEST_F(TrainingTest, ContinuesAKilledCoordinatorOnItsPort) {
  const Outcome outcome =
      Train({{"ballast-coordinator",
              std::string("echo \"$@\"\n") + kAnnounce + kUntilAllStarted +
                  "if mkdir ${0%/*}/killed 2>/dev/null; then kill -9 $$; fi\n"},
             {"ballast-ps", "exit 0"},
             {"ballast-worker", "exit 0"}});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("coordinator (pid "));
  const std::string log =
      LastLines((folder_ / "run/logs/coordinator.log").string(), 2);
  EXPECT_EQ(log.find("--continue"), log.rfind("--continue"));
  EXPECT_THAT(log, HasSubstr(" --continue --port 1\n"));
}

TEST_F(TrainingTest, TheCoordinatorHoldsALifelineToTheLauncher) {
  // Reading it blocks until the launcher is gone.
  const Outcome outcome =
      Train({{"ballast-coordinator",
              "for last; do if [ \"$flag\" = --supervisor-fd ]; then "
              "line=$last; fi; flag=$last; done\n" +
                  std::string(kAnnounce) +
                  "read -t 0.1 -u $line; if [ $? -gt 128 ]; then exit 0; fi; "
                  "exit 1\n"},
             {"ballast-ps", "exit 0"},
             {"ballast-worker", "exit 0"}});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
}

TEST_F(TrainingTest, ARoleThatRefusesItsConfigurationDecidesTheExitCode) {
  const Outcome outcome = Train(
      {{"ballast-coordinator", std::string(kAnnounce) + kUntilTold},
       {"ballast-ps", kUntilTold},
       {"ballast-worker", "echo worker.memory is too small >&2; exit 78"}});
  EXPECT_EQ(outcome.code, kExitBadConfig);
  EXPECT_THAT(outcome.err, HasSubstr("worker.memory is too small"));
}

TEST_F(TrainingTest, ACoordinatorThatNeverListensIsTheCulprit) {
  const Outcome outcome =
      Train({{"ballast-coordinator", "echo port in use >&2; exit 1"},
             {"ballast-ps", "exit 0"},
             {"ballast-worker", "exit 0"}});
  EXPECT_EQ(outcome.code, kExitFailed);
  EXPECT_THAT(outcome.err, HasSubstr("coordinator (pid "));
  EXPECT_THAT(outcome.err, HasSubstr("port in use"));
}

TEST_F(TrainingTest, WhatIgnoresTheEndIsKilledInBoundedTime) {
  const Outcome outcome =
      Train({{"ballast-coordinator", std::string(kAnnounce) + "exit 1"},
             {"ballast-ps", kStuck},
             {"ballast-worker", "exit 0"}});
  EXPECT_EQ(outcome.code, kExitFailed);
  EXPECT_THAT(outcome.err, HasSubstr("coordinator (pid "));
}

TEST_F(TrainingTest, AnInterruptBeforeTheFirstAddressEndsCleanly) {
  const Outcome outcome =
      Train({{"ballast-coordinator",
              "trap 'kill $!; exit 0' TERM\nkill -INT $PPID\n"
              "sleep 1000 & wait\n"},
             {"ballast-ps", "exit 1"},
             {"ballast-worker", "exit 1"}});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("stopping after the step in flight"));
  EXPECT_THAT(outcome.out, HasSubstr("stopped: nothing was saved yet"));
}

TEST_F(TrainingTest, ASecondInterruptEndsAtOnce) {
  const Outcome outcome =
      Train({{"ballast-coordinator",
              "trap 'kill -INT $PPID' TERM\nkill -INT $PPID\n"
              "while :; do sleep 0.1; done\n"},
             {"ballast-ps", "exit 1"},
             {"ballast-worker", "exit 1"}});
  EXPECT_EQ(outcome.code, kExitFailed);
  EXPECT_THAT(outcome.err, HasSubstr("ended at once"));
}

}  // namespace
}  // namespace ballast
