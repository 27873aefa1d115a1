// SPDX-License-Identifier: Apache-2.0
// The embedded store's own dangers: other processes, damage, kills and a full
// disk. What every store promises is in state_store_conformance_test.cc.
#include "storage/state_store.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>

#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using testing::Says;

constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kLoss = absl::StatusCode::kDataLoss;

std::unique_ptr<StateStore> Open(const std::string& dir) {
  auto store = OpenEmbeddedStateStore(dir);
  EXPECT_EQ(store.status(), absl::OkStatus());
  return store.ok() ? *std::move(store) : nullptr;
}

TEST(StateStoreTest, ASecondOpenerIsRefused) {
  const testing::TempDir dir;
  const auto store = Open(dir.path("state"));
  EXPECT_TRUE(Says(OpenEmbeddedStateStore(dir.path("state")).status(),
                   kPrecondition, "in use by another process"));
}

TEST(StateStoreTest, AForeignFolderIsRefusedAndAMissingStoreIsLossIfWanted) {
  const testing::TempDir dir;
  testing::Spill(dir.path("notes.txt"), "x");
  EXPECT_TRUE(Says(OpenEmbeddedStateStore(dir.path()).status(), kPrecondition,
                   "'notes.txt'"));
  EmbeddedStoreOptions options;
  options.create = false;
  EXPECT_TRUE(Says(OpenEmbeddedStateStore(dir.path("none"), options).status(),
                   kLoss, "CURRENT"));
}

TEST(StateStoreTest, ALostCurrentIsNotMadeAnew) {
  const testing::TempDir dir;
  { Open(dir.path("s"))->Apply({{"a", "1"}}).IgnoreError(); }
  std::filesystem::remove(dir.path("s/CURRENT"));
  EXPECT_TRUE(Says(OpenEmbeddedStateStore(dir.path("s")).status(), kLoss,
                   "has lost its file CURRENT"));
}

// A flipped byte may hit bytes that carry nothing (a bloom of padding), so the
// claim is: every value read is the one written, or there is an error.
TEST(StateStoreTest, ADamagedFileNeverGivesAWrongValue) {
  const testing::TempDir dir;
  std::map<std::string, std::string> wanted;
  {
    const auto store = Open(dir.path("s"));
    for (int i = 0; i < 40; ++i) {
      wanted[absl::StrCat("key", i)] = std::string(200, static_cast<char>(i));
      ASSERT_EQ(store->Apply(
                    {{absl::StrCat("key", i), wanted[absl::StrCat("key", i)]}}),
                absl::OkStatus());
      if (i == 20) {
        ASSERT_EQ(store->Range("", "z", 99)->size(), 21u);
      }
    }
  }
  // Once opened again, the log is a table and the first of two logs is gone.
  { Open(dir.path("s")); }
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(dir.path("s"))) {
    files.push_back(entry.path().filename().string());
  }
  std::mt19937_64 random(testing::Seed());
  int errors = 0;
  for (int i = 0; i < 60; ++i) {
    std::filesystem::remove_all(dir.path("copy"));
    std::filesystem::copy(dir.path("s"), dir.path("copy"));
    const std::string file = dir.path("copy/" + files[random() % files.size()]);
    const uint64_t bytes = std::filesystem::file_size(file);
    if (bytes == 0) {
      continue;
    }
    testing::FlipByte(file, random() % bytes);
    const auto store = OpenEmbeddedStateStore(dir.path("copy"));
    if (!store.ok()) {
      EXPECT_EQ(store.status().code(), kLoss) << file << store.status();
      ++errors;
      continue;
    }
    for (const auto& [key, value] : wanted) {
      const auto got = (*store)->Get(key);
      if (got.ok()) {
        EXPECT_EQ(*got, value) << file;
      } else {
        EXPECT_EQ(got.status().code(), kLoss) << file << got.status();
        ++errors;
      }
    }
  }
  EXPECT_GT(errors, 0);
}

TEST(StateStoreTest, WhatWasAppliedOutlivesAKill) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "TSan allows no threads in a forked child: the kill is NOT "
                  "tested";
#endif
  const testing::TempDir dir;
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto store = Open(dir.path("s"));
    const bool ok = store->Apply({{"decision", "clip"}}).ok();
    [[maybe_unused]] const auto put = write(pipe_fds[1], ok ? "y" : "n", 1);
    pause();
    _exit(1);
  }
  close(pipe_fds[1]);  // A child that dies ends the wait.
  char told = 0;
  ASSERT_EQ(read(pipe_fds[0], &told, 1), 1);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(pipe_fds[0]);
  EXPECT_EQ(told, 'y');
  EXPECT_EQ(*Open(dir.path("s"))->Get("decision"), "clip");
}

TEST(StateStoreTest, AFullDiskIsAnErrorThatHeals) {
  const testing::SmallDisk disk(8 << 20);
  if (!disk.ok()) {
    GTEST_SKIP() << "a small tmpfs cannot be mounted here (not root?): the "
                    "full disk is NOT tested";
  }
  // Whatever the amount of space that is left when it meets the end.
  for (uint64_t ballast_kib = 6000; ballast_kib <= 7800; ballast_kib += 437) {
    const std::string dir = disk.path(absl::StrCat("s", ballast_kib));
    auto store = Open(dir);
    testing::Spill(disk.path("ballast"), std::string(ballast_kib << 10, 'x'));
    absl::Status status;
    int applied = 0;
    for (; applied < 100; ++applied) {
      status = store->Apply(
          {{absl::StrCat("key", applied), std::string(20 << 10, 'v')}});
      if (!status.ok()) {
        break;
      }
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(store->Apply({{"more", "1"}}).code(),
              absl::StatusCode::kResourceExhausted);
    for (int i = 0; i < applied; ++i) {
      EXPECT_EQ(store->Get(absl::StrCat("key", i))->size(), 20u << 10);
    }
    if (ballast_kib % 2 == 0) {  // A restart on the full disk.
      store.reset();
      auto again = OpenEmbeddedStateStore(dir);
      EXPECT_TRUE(again.ok() || absl::IsResourceExhausted(again.status()))
          << again.status();
      store = again.ok() ? *std::move(again) : nullptr;
    }
    std::filesystem::remove(disk.path("ballast"));
    store = store == nullptr ? Open(dir) : std::move(store);
    EXPECT_EQ(store->Apply({{"after", "1"}}), absl::OkStatus());
    for (int i = 0; i < applied; ++i) {
      EXPECT_EQ(store->Get(absl::StrCat("key", i))->size(), 20u << 10);
    }
    store.reset();
    store = Open(dir);
    EXPECT_EQ(*store->Get("after"), "1");
    EXPECT_EQ(store->Range("", "z", 999)->size(),
              static_cast<size_t>(applied) + 1);
    store.reset();
    std::filesystem::remove_all(dir);
  }
}

}  // namespace
}  // namespace ballast
