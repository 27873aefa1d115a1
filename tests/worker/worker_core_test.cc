// SPDX-License-Identifier: Apache-2.0
#include "tests/worker/worker_core_fixture.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kFirstTerm;
using testing::Part;
using ::testing::SizeIs;
using testing::WorkerCoreTest;

TEST_F(WorkerCoreTest, AnAssignmentBecomesOnePassAndOneReport) {
  Train(5, {{0, 2}, {2, 1}});
  ASSERT_TRUE(running_.has_value());
  EXPECT_FALSE(running_->evaluate);
  EXPECT_EQ(running_->timeline, 1u);
  EXPECT_EQ(running_->step, 5u);
  EXPECT_EQ(running_->version, 4u);
  EXPECT_EQ(running_->incarnation, 7u);
  EXPECT_THAT(running_->parts,
              ElementsAre(Part{{0, 2}, {0, 1}}, Part{{2, 1}, {0, 1}}));
  EXPECT_THAT(Done(), IsEmpty());
  Succeed();
  EXPECT_THAT(Done(), ElementsAre(std::pair(5, number_)));
  EXPECT_EQ(reports_.back().worker_done().pushed_bytes(), 10u);
  EXPECT_EQ(started_, 1);
  EXPECT_EQ(core_.NextWake(), absl::InfiniteFuture());
}

TEST_F(WorkerCoreTest, ADirectiveThatIsNotTheNewestChangesNothing) {
  const v1::PollReply old = Directive(v1::WORKER_TRAIN, 4, {{0, 8}});
  Train(5, {{0, 1}});
  Tell(old);
  EXPECT_THAT(called_off_, IsEmpty());
  v1::PollReply again = Directive(v1::WORKER_TRAIN, 9, {{0, 8}});
  again.set_number(number_ - 1);
  Tell(again);
  EXPECT_THAT(called_off_, IsEmpty());
  Succeed();
  EXPECT_THAT(Done(), ElementsAre(std::pair(5, number_ - 1)));
}

TEST_F(WorkerCoreTest, AskedForTheSameAgainItAnswersWithoutComputing) {
  Train(5, {{0, 1}});
  Succeed();
  number_ += kFirstTerm;  // Another coordinator.
  Train(5, {{0, 1}});
  EXPECT_EQ(started_, 1);
  EXPECT_THAT(Done(),
              ElementsAre(std::pair(5, kFirstTerm + 1), std::pair(5, number_)));
  EXPECT_EQ(reports_.back().worker_done().pushed_bytes(), 10u);
}

TEST_F(WorkerCoreTest, AddedSpansRunBehindThePassInFlight) {
  Train(5, {{0, 2}});
  Train(5, {{0, 2}, {4, 2}});
  EXPECT_THAT(called_off_, IsEmpty());
  Succeed();
  EXPECT_THAT(Done(), IsEmpty());
  ASSERT_TRUE(running_.has_value());
  EXPECT_THAT(running_->parts, ElementsAre(Part{{4, 2}, {0, 1}}));
  Succeed();
  EXPECT_THAT(Done(), ElementsAre(std::pair(5, number_)));
  EXPECT_EQ(reports_.back().worker_done().pushed_bytes(), 20u);
}

TEST_F(WorkerCoreTest, SpansThatAreSiblingsAreSummedBeforeTheyArePushed) {
  Train(5, {{2, 1}, {3, 1}});
  EXPECT_THAT(running_->parts, ElementsAre(Part{{2, 2}, {0, 1}}));
}

TEST_F(WorkerCoreTest, APassThatStandsStillGivesWayToOneWithTheAddedSpans) {
  Train(5, {{0, 2}});
  Train(5, {{0, 2}, {2, 2}});
  Pass(WorkerCore::kBlockedMax - absl::Milliseconds(1));
  Tick();
  EXPECT_THAT(called_off_, IsEmpty());
  core_.OnPassProgress(running_->id, now_);
  Take();
  Pass(WorkerCore::kBlockedMax - absl::Milliseconds(1));
  Tick();
  EXPECT_THAT(called_off_, IsEmpty());
  TickAtWake();
  EXPECT_THAT(called_off_, ElementsAre(running_->id));
  EndPass(absl::CancelledError("called off"), {});
  ASSERT_TRUE(running_.has_value());  // At once, and both together.
  EXPECT_THAT(running_->parts, ElementsAre(Part{{0, 4}, {0, 1}}));
}

TEST_F(WorkerCoreTest, APassThatStandsStillAloneIsLeftToItsServers) {
  Train(5, {{0, 2}});
  Pass(absl::Seconds(30));
  Tick();
  EXPECT_THAT(called_off_, IsEmpty());
}

TEST_F(WorkerCoreTest, AServersDeathCostsOneAttemptAndItsReturnStartsTheNext) {
  Train(5, {{0, 2}});
  BreakOff();  // Before the coordinator knows.
  EXPECT_FALSE(running_.has_value());
  SetLife(1, 0);
  Train(5, {{0, 2}});
  EXPECT_FALSE(running_.has_value());
  EXPECT_EQ(core_.waits_for(), "server-1: its return, for step 5");
  EXPECT_EQ(core_.waits_since(), now_);
  Pass(absl::Seconds(59));
  Tick();
  EXPECT_FALSE(exit_.has_value());
  SetLife(1, 103);
  Train(5, {{0, 2}});
  ASSERT_TRUE(running_.has_value());
  EXPECT_THAT(running_->parts, ElementsAre(Part{{0, 2}, {0, 1}}));
  EXPECT_EQ(core_.waits_for(), "");
  Succeed();
  EXPECT_THAT(Done(), ElementsAre(std::pair(5, number_)));
}

TEST_F(WorkerCoreTest, ALifeThatCameBackWithoutItsVoteGetsItsShareAgain) {
  Train(5, {{0, 2}});
  Succeed();
  SetLife(1, 103);
  Train(5, {{0, 2}});
  ASSERT_TRUE(running_.has_value());
  EXPECT_THAT(running_->parts, ElementsAre(Part{{0, 2}, {1}}));
  Succeed();
  EXPECT_THAT(Done(), ElementsAre(std::pair(5, kFirstTerm + 1),
                                  std::pair(5, kFirstTerm + 2)));
}

TEST_F(WorkerCoreTest, ALifeThatCameBackWithItsVoteNeedsNothing) {
  Train(5, {{0, 2}});
  AllPushed();
  // The other server has it all; this one died before it answered.
  EndPass(absl::UnavailableError("server-1: reset"), {0});
  SetLife(1, 103);
  voted_ = {103};
  Train(5, {{0, 2}});
  EXPECT_EQ(started_, 1);
  EXPECT_THAT(Done(), ElementsAre(std::pair(5, number_)));
}

TEST_F(WorkerCoreTest, TheVoteOfALifeSaysNothingAboutTheNextOne) {
  SetLife(1, 103);
  voted_ = {103};
  Train(5, {{0, 2}});
  EXPECT_THAT(running_->parts, ElementsAre(Part{{0, 2}, {0}}));
  Succeed();
  SetLife(1, 104);
  Train(5, {{0, 2}});
  EXPECT_THAT(running_->parts, ElementsAre(Part{{0, 2}, {1}}));
}

TEST_F(WorkerCoreTest, AnAcknowledgementOfAnEarlierLifeCountsForNothing) {
  SetLife(1, 103);
  Train(5, {{0, 2}});
  EndPass(absl::AbortedError("another life"), {1}, /*life=*/102);
  TickAtWake();
  ASSERT_TRUE(running_.has_value());
  EXPECT_THAT(running_->parts, ElementsAre(Part{{0, 2}, {0, 1}}));
}

TEST_F(WorkerCoreTest, WhatALifeAcknowledgedIsNotPushedToItAgain) {
  Train(5, {{0, 2}});
  EndPass(absl::UnavailableError("server-1: reset"), {0});
  SetLife(1, 103);
  Train(5, {{0, 2}, {2, 2}});
  EXPECT_THAT(running_->parts,
              ElementsAre(Part{{0, 2}, {1}}, Part{{2, 2}, {0, 1}}));
}

TEST_F(WorkerCoreTest, ADeathInThePassCallsItOffUnlessAllIsPushed) {
  Train(5, {{0, 2}});
  SetLife(1, 0);
  Train(5, {{0, 2}});
  EXPECT_THAT(called_off_, SizeIs(1));
  EndPass(absl::CancelledError("called off"), {});
  SetLife(1, 103);
  Train(5, {{0, 2}});
  AllPushed();
  SetLife(1, 0);
  Train(5, {{0, 2}});
  EXPECT_THAT(called_off_, SizeIs(1));  // The other's answers are on their way.
  Pass(WorkerCore::kLastAcksMax);
  Tick();
  EXPECT_THAT(called_off_, SizeIs(2));
  Tick();
  EXPECT_THAT(called_off_, SizeIs(2));  // Once.
}

TEST_F(WorkerCoreTest, ADirectiveAheadOfThePlacementWaitsForIt) {
  Train(5, {{0, 2}});
  Succeed();
  answers_ = false;
  SetLife(0, 103);
  const int before = asked_;
  Train(6, {{0, 2}});
  EXPECT_EQ(asked_, before + 1);
  EXPECT_FALSE(running_.has_value());
  Tick();
  EXPECT_EQ(asked_, before + 1);  // One question at a time.
  core_.OnPlacementFailed(now_);
  Take();
  EXPECT_EQ(asked_, before + 1);
  TickAtWake();
  EXPECT_EQ(asked_, before + 2);
  core_.OnPlacement(WorkerCore::ViewOf(placement_), now_);
  Take();
  EXPECT_TRUE(running_.has_value());
}

TEST_F(WorkerCoreTest, APlacementAheadOfTheDirectiveWaitsForIt) {
  const v1::PollReply old = Directive(v1::WORKER_TRAIN, 5, {{0, 2}});
  SetLife(1, 103);
  Tell(old);  // The answer is newer: who has voted is not known yet.
  EXPECT_FALSE(running_.has_value());
  EXPECT_LT(core_.NextWake(), absl::InfiniteFuture());
  voted_ = {103};
  Train(5, {{0, 2}});
  EXPECT_THAT(running_->parts, ElementsAre(Part{{0, 2}, {0}}));
}

TEST_F(WorkerCoreTest, MovedChunksMakeEveryoneMissEverything) {
  Train(5, {{0, 2}});
  EndPass(absl::AbortedError("moved"), {0});
  placement_.set_placement_version(2);
  placement_.set_owner(1, 0);
  Train(5, {{0, 2}});
  EXPECT_THAT(running_->parts, ElementsAre(Part{{0, 2}, {0}}));
}

TEST_F(WorkerCoreTest, ATableThatChangesUnderAPassEndsItAtOnce) {
  Train(5, {{0, 2}});
  AllPushed();
  placement_.set_placement_version(2);
  Train(5, {{0, 2}});
  EXPECT_THAT(called_off_, SizeIs(1));
}

TEST_F(WorkerCoreTest, MovedIsRetriedWithTheNewTableWithoutAnotherDirective) {
  Train(5, {{0, 2}});
  const int before = asked_;
  EndPass(absl::AbortedError("server-0: moved"), {});
  EXPECT_EQ(asked_, before + 1);
  EXPECT_FALSE(running_.has_value());
  EXPECT_EQ(core_.waits_for(), "server-0: moved");
  TickAtWake();
  EXPECT_TRUE(running_.has_value());
}
}  // namespace
}  // namespace ballast
