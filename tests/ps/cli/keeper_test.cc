// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/keeper.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "common/clock.h"
#include "ps/cli/child_process.h"

namespace ballast {
namespace {

// glibc 2.36 declares them without C linkage.
int OpenPidfd(pid_t pid) {
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

void SignalPidfd(int pidfd, int number) {
  syscall(SYS_pidfd_send_signal, pidfd, number, nullptr, 0);
}

constexpr absl::Duration kPatience = absl::Seconds(10);

class KeeperTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name =
        (std::filesystem::temp_directory_path() / "keeper_test.XXXXXX")
            .string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    options_.grace = absl::Milliseconds(200);
    options_.end_timeout = absl::Milliseconds(200);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // A launcher that starts the scripts by name, and is killed once each has
  // said that it is up. Returns a descriptor of each, and of the keeper.
  std::map<std::string, int> KilledLauncher(
      const std::map<std::string, std::string>& scripts) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    const pid_t launcher = fork();
    if (launcher == 0) {
      Launch(scripts, ready[1]);
    }
    std::map<std::string, int> pidfds;
    for (size_t i = 0; i <= scripts.size(); ++i) {
      pid_t pid = 0;
      EXPECT_EQ(read(ready[0], &pid, sizeof(pid)), ssize_t{sizeof(pid)});
      char letter = 0;
      EXPECT_EQ(read(ready[0], &letter, 1), 1);
      pidfds[std::string(1, letter)] = OpenPidfd(pid);
    }
    for (size_t i = 0; i < scripts.size(); ++i) {
      char up = 0;
      EXPECT_EQ(read(ready[0], &up, 1), 1);
      EXPECT_EQ(up, '+');
    }
    kill(launcher, SIGKILL);
    waitpid(launcher, nullptr, 0);
    close(ready[0]);
    close(ready[1]);
    return pidfds;
  }

  [[noreturn]] void Launch(const std::map<std::string, std::string>& scripts,
                           int ready) {
    auto keeper = Keeper::Start(options_);
    std::vector<std::unique_ptr<ChildProcess>> children;
    const auto tell = [ready](pid_t pid, char letter) {
      if (write(ready, &pid, sizeof(pid)) < 0 || write(ready, &letter, 1) < 0) {
        _exit(1);
      }
    };
    tell((*keeper)->pid(), 'k');
    for (const auto& [name, script] : scripts) {
      ChildProcess::Options child;
      child.name = name;
      child.argv = {"/bin/bash", "-c",
                    "{ sleep 0; " + script + "; echo -n + >&" +
                        std::to_string(ready) + "; exec " +
                        std::to_string(ready) +
                        ">&-; while :; do sleep 0.05; done; }"};
      child.log_path = (folder_ / name).string();
      child.keep_fds = {ready};
      child.keeper = keeper->get();
      child.coordinator = name == "c";
      children.push_back(*ChildProcess::Start(child));
      tell(children.back()->pid(), name[0]);
    }
    pause();
    _exit(1);
  }

  static bool EndsWithin(int pidfd, absl::Duration duration) {
    pollfd ready = {pidfd, POLLIN, 0};
    return poll(&ready, 1,
                static_cast<int>(absl::ToInt64Milliseconds(duration))) == 1;
  }

  Keeper::Options options_;
  std::filesystem::path folder_;
};

TEST_F(KeeperTest, EndsAtOnceWithItsLauncherWhenNobodyIsLeft) {
  const absl::Time start = MonotonicNow();
  auto keeper = Keeper::Start(options_);
  ASSERT_TRUE(keeper.ok()) << keeper.status();
  ChildProcess::Options child;
  child.name = "script";
  child.argv = {"/bin/sh", "-c", "exit 0"};
  child.log_path = (folder_ / "log").string();
  child.keeper = keeper->get();
  auto started = ChildProcess::Start(child);
  ASSERT_TRUE(started.ok()) << started.status();
  started->reset();
  keeper->reset();
  EXPECT_LT(MonotonicNow() - start, kPatience);
}

TEST_F(KeeperTest, EndsWhoIsLeftAfterAKilledLauncher) {
  const auto pidfds = KilledLauncher(
      {{"a", "trap 'echo told; exit 0' TERM"}, {"b", "trap '' TERM"}});
  EXPECT_TRUE(EndsWithin(pidfds.at("a"), kPatience));
  EXPECT_TRUE(EndsWithin(pidfds.at("b"), kPatience));
  EXPECT_TRUE(EndsWithin(pidfds.at("k"), kPatience));
  std::string told;
  std::ifstream(folder_ / "a") >> told;
  EXPECT_EQ(told, "told");
}

TEST_F(KeeperTest, LeavesTheMembersToTheCoordinatorWhileItLives) {
  options_.stop_timeout = absl::Minutes(1);
  const auto pidfds =
      KilledLauncher({{"a", "trap 'exit 0' TERM"}, {"c", "true"}});
  // Nothing is sent to anyone, however many graces pass.
  EXPECT_FALSE(EndsWithin(pidfds.at("a"), absl::Seconds(1)));
  EXPECT_FALSE(EndsWithin(pidfds.at("c"), absl::ZeroDuration()));
  SignalPidfd(pidfds.at("c"), SIGKILL);
  EXPECT_TRUE(EndsWithin(pidfds.at("a"), kPatience));
  EXPECT_TRUE(EndsWithin(pidfds.at("k"), kPatience));
}

TEST_F(KeeperTest, ACoordinatorThatTakesTooLongIsEndedToo) {
  options_.stop_timeout = absl::Milliseconds(100);
  const auto pidfds = KilledLauncher({{"c", "trap '' TERM"}});
  EXPECT_TRUE(EndsWithin(pidfds.at("c"), kPatience));
  EXPECT_TRUE(EndsWithin(pidfds.at("k"), kPatience));
}

TEST_F(KeeperTest, HoldsTheLockUntilAllHaveEnded) {
  const std::string lock = (folder_ / "lock").string();
  options_.lock_fd = open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(flock(options_.lock_fd, LOCK_EX), 0);
  const auto pidfds = KilledLauncher({{"c", "true"}});
  close(options_.lock_fd);
  const int other = open(lock.c_str(), O_RDWR | O_CLOEXEC);
  EXPECT_EQ(flock(other, LOCK_EX | LOCK_NB), -1);
  SignalPidfd(pidfds.at("c"), SIGKILL);
  ASSERT_TRUE(EndsWithin(pidfds.at("k"), kPatience));
  EXPECT_EQ(flock(other, LOCK_EX | LOCK_NB), 0);
  close(other);
}

}  // namespace
}  // namespace ballast
