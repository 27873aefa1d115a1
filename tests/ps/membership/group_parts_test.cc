// SPDX-License-Identifier: Apache-2.0
// The small parts that the core is made of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "ps/membership/assignment.h"
#include "ps/membership/fault_book.h"
#include "ps/membership/holdings.h"
#include "ps/membership/progress_watch.h"
#include "ps/membership/server_table.h"
#include "ps/membership/step_log.h"
#include "ps/membership/wanted_list.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Time kStart = absl::UnixEpoch();

v1::Decision DecisionOf(uint64_t timeline, uint64_t step) {
  v1::Decision decision;
  decision.set_timeline(timeline);
  decision.set_step(step);
  return decision;
}

// Timeline 1 has steps 1 to 7, timeline 2 left it at 5 and has 6 to 8.
StepLog TwoBranches() {
  StepLog log;
  for (uint64_t step = 1; step <= 7; ++step) {
    log.Append(DecisionOf(1, step));
  }
  log.Branch(2, {1, 5});
  for (uint64_t step = 6; step <= 8; ++step) {
    log.Append(DecisionOf(2, step));
  }
  return log;
}

TEST(StepLogTest, AStepIsOfTheBranchThatMadeIt) {
  const StepLog log = TwoBranches();
  EXPECT_EQ(log.At(5)->timeline(), 1u);
  EXPECT_EQ(log.At(6)->timeline(), 2u);
  EXPECT_EQ(log.At(9), nullptr);
  EXPECT_EQ(log.At(0), nullptr);
  EXPECT_EQ(log.Range(4, 7).size(), 3u);
  EXPECT_TRUE(log.Bridges(0, 8));
  EXPECT_FALSE(log.Bridges(0, 9));
  EXPECT_EQ(log.base(), StepKey({1, 5}));
}

TEST(StepLogTest, VersionsOfAnAbandonedBranchAreNoneOfOurs) {
  const StepLog log = TwoBranches();
  EXPECT_TRUE(log.Contains({1, 5}));
  EXPECT_FALSE(log.Contains({1, 6}));
  EXPECT_TRUE(log.Contains({2, 5}));  // The same version.
  EXPECT_FALSE(log.Contains({2, 4}));
  EXPECT_TRUE(log.Contains({2, 8}));
  EXPECT_TRUE(log.Contains({9, 0}));  // Initial values.
  EXPECT_FALSE(log.Contains({9, 1}));
  EXPECT_EQ(log.LeftAt(1), 5u);
  EXPECT_EQ(log.LeftAt(2), UINT64_MAX);
  EXPECT_EQ(log.LeftAt(3), std::nullopt);
}

TEST(StepLogTest, ABranchOfABranchThatHadJustBegunSkipsIt) {
  StepLog log = TwoBranches();
  log.Branch(3, {1, 3});
  EXPECT_EQ(log.LeftAt(1), 3u);
  EXPECT_EQ(log.At(4), nullptr);
  log.Branch(4, {3, 3});
  EXPECT_EQ(log.LeftAt(1), 3u);
  EXPECT_EQ(log.At(3)->timeline(), 1u);
}

TEST(StepLogTest, DropsTheOldestFirstAndKeepsTheStepItself) {
  StepLog log = TwoBranches();
  EXPECT_THAT(log.DropBelow(3, 100), ElementsAre(StepKey{1, 1}, StepKey{1, 2}));
  // Steps 6 and 7 of the first branch are older than 6 of the second.
  EXPECT_EQ(log.DropBelow(6, 4).size(), 4u);
  EXPECT_THAT(log.DropBelow(6, 4), ElementsAre(StepKey{1, 7}));
  EXPECT_TRUE(log.Bridges(5, 8));
  EXPECT_FALSE(log.Bridges(4, 8));
}

v1::JoinRequest Holding(uint64_t timeline, uint64_t version, uint64_t redoable,
                        uint64_t redoable_timeline) {
  v1::JoinRequest join;
  join.set_name("server-0");
  v1::HeldChunks* held = join.add_held();
  held->set_timeline(timeline);
  held->set_version(version);
  held->set_redoable(redoable);
  held->set_redoable_timeline(redoable_timeline);
  held->add_chunks()->set_count(10);
  return join;
}

TEST(HoldingsTest, AChunkReachesWhatItsGradientsRedo) {
  const StepLog log = TwoBranches();
  EXPECT_EQ(*JudgeHoldings(log, 8, {0, 9}, Holding(2, 6, 8, 2)),
            (Holdings{6, 8}));
  EXPECT_EQ(*JudgeHoldings(log, 8, {0, 9}, Holding(2, 8, 9, 2)),
            (Holdings{8, 9}));
  EXPECT_EQ(JudgeHoldings(log, 8, {0, 9}, Holding(2, 6, 7, 2)).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(HoldingsTest, GradientsOfAnAbandonedBranchAreWorthNothing) {
  const StepLog log = TwoBranches();
  // Through 7 of timeline 1 is through 5 of ours.
  EXPECT_FALSE(JudgeHoldings(log, 8, {0}, Holding(1, 4, 7, 1)).ok());
  EXPECT_EQ(*JudgeHoldings(log, 5, {0}, Holding(1, 4, 7, 1)), (Holdings{4, 5}));
  EXPECT_FALSE(JudgeHoldings(log, 5, {0}, Holding(1, 6, 7, 1)).ok());
}

TEST(HoldingsTest, TheBestOfSeveralCounts) {
  const StepLog log = TwoBranches();
  v1::JoinRequest join = Holding(1, 2, 5, 1);
  join.MergeFrom(Holding(2, 7, 8, 2));
  join.mutable_held(1)->mutable_chunks(0)->set_first(3);
  join.set_name("server-0");
  EXPECT_EQ(*JudgeHoldings(log, 8, {3, 4}, join), (Holdings{7, 8}));
  const absl::Status status = JudgeHoldings(log, 8, {1, 2, 3}, join).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("cannot bring chunks 1 to 2 to version 8: it holds "
                        "version 2 of chunk 1 and gradients through step 5"));
}

TEST(HoldingsTest, WhatTheLogHasForgottenCannotBeRedone) {
  StepLog log = TwoBranches();
  log.DropBelow(4, 100);
  EXPECT_TRUE(JudgeHoldings(log, 8, {0}, Holding(1, 3, 8, 2)).ok());
  EXPECT_FALSE(JudgeHoldings(log, 8, {0}, Holding(1, 2, 8, 2)).ok());
}

TEST(HoldingsTest, AServerAheadOfTheLogIsDataLoss) {
  const StepLog log = TwoBranches();
  EXPECT_TRUE(JudgeHoldings(log, 8, {0}, Holding(2, 8, 9, 2)).ok());
  for (const auto& join : {Holding(2, 8, 10, 2), Holding(2, 9, 9, 2)}) {
    EXPECT_EQ(JudgeHoldings(log, 8, {0}, join).status().code(),
              absl::StatusCode::kDataLoss);
  }
}

TEST(HoldingsTest, AServerWithoutChunksHoldsWhatIsWanted) {
  const StepLog log = TwoBranches();
  EXPECT_EQ(*JudgeHoldings(log, 8, {}, v1::JoinRequest()), (Holdings{8, 8}));
  EXPECT_FALSE(JudgeHoldings(log, 8, {0}, v1::JoinRequest()).ok());
}

TEST(HoldingsTest, RangesAreShort) {
  EXPECT_EQ(RangesText({0, 1, 2, 5, 7, 8}), "0 to 2, 5, 7 to 8");
}

uint32_t CountOf(const Assignment& assignment, uint64_t worker) {
  uint32_t count = 0;
  for (const Span& span : assignment.SpansOf(worker)) {
    EXPECT_TRUE(IsNode(span, 13)) << span.first << "+" << span.count;
    count += span.count;
  }
  return count;
}

TEST(AssignmentTest, WhatIsLeftEvensOutTheLoads) {
  Assignment assignment;
  assignment.Begin(13, {1, 2, 3, 4});  // 4, 3, 3, 3.
  assignment.Remove(3, false);
  assignment.Remove(2, false);
  EXPECT_TRUE(assignment.has_left());
  assignment.DealLeft({1, 4, 5});
  EXPECT_FALSE(assignment.has_left());
  EXPECT_EQ(CountOf(assignment, 1), 4u);
  EXPECT_EQ(CountOf(assignment, 4), 4u);
  EXPECT_EQ(CountOf(assignment, 5), 5u);
  // Every micro-batch has one worker.
  std::set<uint32_t> all;
  for (const uint64_t worker : {1, 4, 5}) {
    for (const Span& span : assignment.SpansOf(worker)) {
      for (uint32_t i = span.first; i < span.end(); ++i) {
        EXPECT_TRUE(all.insert(i).second);
      }
    }
  }
  EXPECT_EQ(all.size(), 13u);
}

TEST(AssignmentTest, WhatWasDoneIsLeftOnlyWhenReopened) {
  Assignment assignment;
  assignment.Begin(8, {1, 2});
  assignment.Remove(2, true);
  EXPECT_FALSE(assignment.has_left());
  assignment.Reopen();
  EXPECT_TRUE(assignment.has_left());
  assignment.DealLeft({1});
  EXPECT_THAT(assignment.SpansOf(1), ElementsAre(Span{0, 4}, Span{4, 4}));
}

TEST(AssignmentTest, WithoutWorkersEverythingWaits) {
  Assignment assignment;
  assignment.Begin(8, {});
  EXPECT_TRUE(assignment.has_left());
  assignment.DealLeft({});
  EXPECT_TRUE(assignment.has_left());
  assignment.DealLeft({7});
  EXPECT_THAT(assignment.SpansOf(7), ElementsAre(Span{0, 8}));
  assignment.Remove(9, false);  // Nobody we know.
  EXPECT_FALSE(assignment.has_left());
}

v1::MemberStats Units(uint64_t units, const std::string& waits = "") {
  v1::MemberStats stats;
  stats.set_units_done(units);
  stats.set_waits_for(waits);
  return stats;
}

TEST(ProgressWatchTest, TheFirstUnitMayTakeTenLimits) {
  ProgressWatch watch(absl::Seconds(3));
  watch.Observe(1, Units(0), true, kStart);
  EXPECT_FALSE(
      watch.IsStuck(1, kStart + absl::Seconds(30) - absl::Nanoseconds(1)));
  EXPECT_TRUE(watch.IsStuck(1, kStart + absl::Seconds(30)));
}

TEST(ProgressWatchTest, ASlowMemberIsMeasuredByItsOwnUnits) {
  ProgressWatch watch(absl::Seconds(3));
  watch.Observe(1, Units(0), true, kStart);
  watch.Observe(1, Units(1), true, kStart + absl::Milliseconds(100));
  EXPECT_EQ(watch.LimitOf(1), absl::Seconds(3));
  watch.Observe(1, Units(2), true, kStart + absl::Milliseconds(1100));
  EXPECT_EQ(watch.LimitOf(1), absl::Seconds(8));
  EXPECT_EQ(watch.Stalled(1, kStart + absl::Milliseconds(1600)),
            absl::Milliseconds(500));
}

TEST(ProgressWatchTest, WaitingOwingNothingAndPausesDoNotCount) {
  ProgressWatch watch(absl::Seconds(3));
  watch.Observe(1, Units(0, "server-0: credit"), true, kStart);
  EXPECT_EQ(watch.Stalled(1, kStart + absl::Hours(1)), absl::ZeroDuration());
  const absl::Time later = kStart + absl::Hours(1);
  watch.Observe(1, Units(0), true, later);  // Its inputs have come.
  EXPECT_EQ(watch.Stalled(1, later + absl::Seconds(1)), absl::Seconds(1));
  watch.Restart(later + absl::Seconds(2));
  EXPECT_EQ(watch.Stalled(1, later + absl::Seconds(3)), absl::Seconds(1));
  watch.Observe(1, Units(0), false, later + absl::Seconds(3));
  EXPECT_EQ(watch.Stalled(1, later + absl::Hours(1)), absl::ZeroDuration());
  EXPECT_EQ(watch.Stalled(2, later), absl::ZeroDuration());
}

TEST(FaultBookTest, OnlyTheNewestAreKept) {
  FaultBook book;
  std::vector<StateChange> changes;
  for (size_t i = 0; i <= FaultBook::kMax; ++i) {
    book.Add(i + 1, v1::Fault(), kStart, &changes);
  }
  EXPECT_EQ(book.faults().size(), FaultBook::kMax);
  EXPECT_EQ(book.faults().begin()->first, 2u);
  EXPECT_EQ(changes.back().key, DeleteFault(1).key);
  EXPECT_FALSE(book.Amend(1, "killed", "signal 9", &changes));
  EXPECT_TRUE(book.Amend(2, "killed", "signal 9", &changes));
  EXPECT_FALSE(book.Amend(2, "killed", "signal 9", &changes));  // Known.
}

TEST(FaultBookTest, ACommittedStepClosesEveryOpenFaultOnce) {
  FaultBook book;
  std::vector<StateChange> changes;
  book.Add(1, v1::Fault(), kStart, &changes);
  book.Add(0, v1::Fault(), kStart + absl::Seconds(1), &changes);
  book.Committed(kStart + absl::Seconds(2), &changes);
  changes.clear();
  book.Committed(kStart + absl::Seconds(9), &changes);
  EXPECT_THAT(changes, IsEmpty());
  EXPECT_EQ(book.faults().at(1).recovered_seconds(), 2.0);
  EXPECT_EQ(book.faults().at(2).recovered_seconds(), 1.0);
}

TEST(WantedListTest, NewNamesFillTheGaps) {
  WantedList list(2, 1);
  EXPECT_THAT(list.Names(v1::ROLE_SERVER), ElementsAre("server-0", "server-1"));
  list.Remove("server-0");
  EXPECT_THAT(list.AddNew(v1::ROLE_SERVER, 2),
              ElementsAre("server-0", "server-2"));
  list.Drain("server-1");
  EXPECT_EQ(list.CountStaying(v1::ROLE_SERVER), 2u);
  EXPECT_TRUE(list.Has("server-1"));
  list.Add("server-1", v1::ROLE_SERVER);
  EXPECT_EQ(list.CountStaying(v1::ROLE_SERVER), 3u);
  list.Add("gpu-7", v1::ROLE_WORKER);
  EXPECT_THAT(list.Names(v1::ROLE_WORKER), ElementsAre("worker-0", "gpu-7"));
}

TEST(ServerTableTest, APlaceOutlivesItsLives) {
  ServerTable table(100);
  EXPECT_EQ(table.Add("a"), 0u);
  EXPECT_EQ(table.Add("b"), 1u);
  EXPECT_EQ(table.Add("a"), 0u);
  table.Place({0, 1, 1});
  EXPECT_THAT(table.Missing(), ElementsAre(0, 1));
  table.Enter(1, 7, "here:1");
  EXPECT_EQ(table.FindLife(7), 1u);
  EXPECT_EQ(table.FindLife(0), std::nullopt);
  EXPECT_EQ(table.address_version(), 101u);
  EXPECT_EQ(table.placement_version(), 1u);
  table.at(1).version = 3;
  table.Lose(1, kStart);
  EXPECT_EQ(table.address_version(), 102u);
  EXPECT_FALSE(table.at(1).version.has_value());
  EXPECT_THAT(table.ChunksOf(1), ElementsAre(1, 2));
  table.SetOwner(0, 1);
  table.Moved();
  EXPECT_FALSE(table.Owns(0));
  EXPECT_THAT(table.Owners(), ElementsAre(1));
  const ServerTable again(table.ToProto(), 200);
  EXPECT_THAT(again.ChunksOf(1), ElementsAre(0, 1, 2));
  EXPECT_EQ(again.placement_version(), 2u);
  EXPECT_EQ(again.at(1).incarnation, 0u);
  EXPECT_FALSE(again.Owns(0));
}

}  // namespace
}  // namespace ballast
