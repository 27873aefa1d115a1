// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/chaos.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const absl::Time kStart = absl::UnixEpoch() + absl::Hours(1);

ChaosPlan Parsed(absl::string_view text) {
  const auto plan = ParseChaos(text);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.value_or(ChaosPlan());
}

TEST(ParseChaosTest, TakesClausesInAnyOrder) {
  const ChaosPlan plan = Parsed(
      "kill=worker:20s,seed=7,kill=server:1m30s,stop=worker:500ms,"
      "kill=coordinator:100ms");
  EXPECT_EQ(plan.seed, 7u);
  EXPECT_THAT(
      plan.rules,
      ElementsAre(
          ChaosRule{ChaosKind::kKill, "worker", absl::Seconds(20)},
          ChaosRule{ChaosKind::kKill, "server", absl::Seconds(90)},
          ChaosRule{ChaosKind::kStop, "worker", absl::Milliseconds(500)},
          ChaosRule{ChaosKind::kKill, "coordinator", absl::Milliseconds(100)}));
}

TEST(ParseChaosTest, TakesEverySeed) {
  EXPECT_EQ(Parsed("seed=0,kill=worker:1s").seed, 0u);
  EXPECT_EQ(Parsed("seed=18446744073709551615,kill=worker:1s").seed,
            UINT64_MAX);
}

TEST(ParseChaosTest, SaysWhatIsWrongAndTheGrammar) {
  for (const auto& [text, what] :
       std::vector<std::pair<const char*, const char*>>{
           {"", "`` is no seed=, kill= or stop="},
           {"seed=7", "has no kill= or stop="},
           {"kill=worker:20s", "has no seed"},
           {"seed=,kill=worker:1s", "`seed=` is no number"},
           {"seed=-1,kill=worker:1s", "`seed=-1` is no number"},
           {"seed= 1,kill=worker:1s", "`seed= 1` is no number"},
           {"seed=18446744073709551616,kill=worker:1s", "is no number"},
           {"seed=1,seed=1,kill=worker:1s", "`seed=1` is a second seed"},
           {"seed=1,kill=workers:1s", "`kill=workers:1s` names no role"},
           {"seed=1,kill=worker-1:1s", "names no role"},
           {"seed=1,kill=:1s", "names no role"},
           {"seed=1,kill=worker", "`kill=worker` has no such period"},
           {"seed=1,kill=worker:20", "has no such period"},
           {"seed=1,kill=worker:-20s", "has no such period"},
           {"seed=1,kill=worker:99ms", "has no such period"},
           {"seed=1,kill=worker:inf", "has no such period"},
           {"seed=1,kill=worker:1s,", "`` is no seed=, kill= or stop="},
           {"seed=1,kill=worker:1s,kill=worker:2s",
            "`kill=worker:2s` says its role a second time"},
           {"seed=1,pause=worker:1s", "`pause=worker:1s` is no seed="},
       }) {
    const absl::Status status = ParseChaos(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what)) << text;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("want seed=N,kill=ROLE:PERIOD"));
  }
}

TEST(ChaosScheduleTest, PeriodsRepeat) {
  ChaosSchedule schedule(Parsed("seed=1,kill=worker:20s"), kStart);
  EXPECT_THAT(schedule.Take(kStart + absl::Seconds(20) - absl::Nanoseconds(1)),
              IsEmpty());
  for (int i = 1; i <= 3; ++i) {
    const absl::Time due = kStart + absl::Seconds(20) * i;
    EXPECT_EQ(schedule.next_at(), due);
    EXPECT_EQ(schedule.Take(due).size(), 1u);
    EXPECT_THAT(schedule.Take(due), IsEmpty());
  }
}

TEST(ChaosScheduleTest, PeriodsSleptThroughCountOnceAndKeepTheirBeat) {
  ChaosSchedule schedule(Parsed("seed=1,kill=worker:20s"), kStart);
  EXPECT_EQ(schedule.Take(kStart + absl::Seconds(75)).size(), 1u);
  EXPECT_EQ(schedule.next_at(), kStart + absl::Seconds(80));
}

TEST(ChaosScheduleTest, WhatFellDueFirstComesFirst) {
  ChaosSchedule schedule(
      Parsed("seed=1,kill=coordinator:60s,kill=worker:20s,stop=server:45s"),
      kStart);
  const std::vector<ChaosRule> due = schedule.Take(kStart + absl::Seconds(60));
  ASSERT_EQ(due.size(), 3u);
  EXPECT_EQ(due[0].role, "worker");
  EXPECT_EQ(due[1].role, "server");
  EXPECT_EQ(due[1].kind, ChaosKind::kStop);
  EXPECT_EQ(due[2].role, "coordinator");
}

TEST(ChaosScheduleTest, WithoutRulesNothingIsEverDue) {
  ChaosSchedule schedule(ChaosPlan(), kStart);
  EXPECT_EQ(schedule.next_at(), absl::InfiniteFuture());
  EXPECT_THAT(schedule.Take(kStart + absl::Hours(9)), IsEmpty());
}

TEST(ChaosScheduleTest, TheSeedChoosesTheMembers) {
  const std::vector<std::string> names = {"worker-0", "worker-1", "worker-2"};
  const auto choices = [&names](const char* text) {
    const ChaosPlan plan = Parsed(text);
    ChaosSchedule schedule(plan, kStart);
    std::vector<std::string> chosen;
    for (int i = 0; i < 32; ++i) {
      chosen.push_back(schedule.Choose(plan.rules[0], names));
    }
    return chosen;
  };
  const auto seven = choices("seed=7,kill=worker:1s");
  EXPECT_EQ(seven, choices("seed=7,kill=worker:1s"));
  EXPECT_NE(seven, choices("seed=8,kill=worker:1s"));
  EXPECT_EQ(std::set<std::string>(seven.begin(), seven.end()).size(), 3u);
}

TEST(ChaosScheduleTest, OneRulesDrawsDoNotDependOnAnother) {
  const std::vector<std::string> workers = {"worker-0", "worker-1"};
  const std::vector<std::string> servers = {"server-0", "server-1"};
  const ChaosPlan plan = Parsed("seed=3,kill=worker:1s,kill=server:2s");
  ChaosSchedule alone(plan, kStart);
  ChaosSchedule both(plan, kStart);
  for (int i = 0; i < 32; ++i) {
    both.Choose(plan.rules[1], servers);
    EXPECT_EQ(alone.Choose(plan.rules[0], workers),
              both.Choose(plan.rules[0], workers));
  }
}

}  // namespace
}  // namespace ballast
