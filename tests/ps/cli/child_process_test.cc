// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/child_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace ballast {
namespace {

class ChildProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name =
        (std::filesystem::temp_directory_path() / "child_test.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<ChildProcess> Start(const std::string& script) {
    ChildProcess::Options options;
    options.name = "script";
    options.argv = {"/bin/sh", "-c", script};
    options.log_path = (folder_ / "log").string();
    auto child = ChildProcess::Start(options);
    EXPECT_TRUE(child.ok()) << child.status();
    return *std::move(child);
  }

  // Blocks until it has ended, without reaping it.
  static void AwaitEnd(const ChildProcess& child) {
    siginfo_t info;
    ASSERT_EQ(
        waitid(P_PID, static_cast<id_t>(child.pid()), &info, WEXITED | WNOWAIT),
        0);
  }

  std::string Log() {
    std::ostringstream text;
    text << std::ifstream(folder_ / "log").rdbuf();
    return text.str();
  }

  std::filesystem::path folder_;
};

TEST_F(ChildProcessTest, TellsExitCodeAndKeepsBothOutputs) {
  const auto child = Start("echo out; echo err >&2; exit 78");
  AwaitEnd(*child);
  ASSERT_TRUE(child->Ended());
  EXPECT_EQ(child->exit_code(), 78);
  EXPECT_EQ(child->Ending(), "exited with code 78");
  EXPECT_EQ(Log(), "out\nerr\n");
}

TEST_F(ChildProcessTest, TellsTheSignalThatEndedIt) {
  const auto child = Start("kill -KILL $$");
  AwaitEnd(*child);
  ASSERT_TRUE(child->Ended());
  EXPECT_EQ(child->exit_code(), -1);
  EXPECT_EQ(child->Ending(), "was killed by signal 9 (Killed)");
}

TEST_F(ChildProcessTest, LivesInItsOwnSessionWithSignalsAsUsual) {
  sigset_t blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  sigset_t before;
  sigprocmask(SIG_BLOCK, &blocked, &before);
  // Fields 6 of stat is the session; SIGTERM must end a blocked wait.
  const auto child =
      Start("cut -d' ' -f6 /proc/$$/stat; kill -TERM $$; read x");
  sigprocmask(SIG_SETMASK, &before, nullptr);
  AwaitEnd(*child);
  ASSERT_TRUE(child->Ended());
  EXPECT_EQ(child->Ending(), "was killed by signal 15 (Terminated)");
  EXPECT_EQ(Log(), std::to_string(child->pid()) + "\n");
}

TEST_F(ChildProcessTest, NothingIsLeftWhenItIsDestroyed) {
  auto child = Start("exec sleep 1000");
  const pid_t pid = child->pid();
  EXPECT_FALSE(child->Ended());
  child.reset();
  EXPECT_EQ(kill(pid, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

TEST_F(ChildProcessTest, PassesTheDescriptorsThatItIsGivenAlone) {
  int kept[2];
  int closed[2];
  ASSERT_EQ(pipe2(kept, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(closed, O_CLOEXEC), 0);
  ChildProcess::Options options;
  options.name = "script";
  options.argv = {"/bin/bash", "-c",
                  "echo hello >&" + std::to_string(kept[1]) + "; { echo no >&" +
                      std::to_string(closed[1]) +
                      "; } 2>/dev/null || echo closed"};
  options.log_path = (folder_ / "log").string();
  options.keep_fds = {kept[1]};
  auto child = ChildProcess::Start(options);
  ASSERT_TRUE(child.ok()) << child.status();
  char text[6] = {};
  EXPECT_EQ(read(kept[0], text, 6), 6);
  AwaitEnd(**child);
  EXPECT_EQ(std::string(text, 6), "hello\n");
  EXPECT_EQ(Log(), "closed\n");
  for (const int fd : {kept[0], kept[1], closed[0], closed[1]}) {
    close(fd);
  }
}

TEST_F(ChildProcessTest, AMissingBinaryIsNamed) {
  ChildProcess::Options options;
  options.name = "server-0";
  options.argv = {(folder_ / "ballast-ps").string()};
  options.log_path = (folder_ / "log").string();
  const absl::Status status = ChildProcess::Start(options).status();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_NE(status.message().find("ballast-ps: No such file"),
            absl::string_view::npos)
      << status;
}

}  // namespace
}  // namespace ballast
