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

TEST_F(WorkerCoreTest, RetriesPauseLongerEachTimeAndANewsEndsThePause) {
  Train(5, {{0, 2}});
  absl::Duration last;
  for (int i = 0; i < 3; ++i) {
    BreakOff();
    const absl::Duration pause = core_.NextWake() - now_;
    EXPECT_GT(pause, last);
    EXPECT_LE(pause, WorkerCore::kRetryLast);
    last = pause;
    TickAtWake();
    ASSERT_TRUE(running_.has_value());
  }
  BreakOff();
  SetLife(1, 103);
  Train(5, {{0, 2}});
  EXPECT_TRUE(running_.has_value());  // Without a tick.
}

TEST_F(WorkerCoreTest, ServersThatStayAwayEndTheWorkerByName) {
  Train(5, {{0, 2}});
  const absl::Time begin = now_;
  while (!exit_.has_value()) {
    BreakOff();
    if (!exit_.has_value()) {
      TickAtWake();
    }
    ASSERT_LT(now_ - begin, absl::Seconds(63));
  }
  EXPECT_GE(now_ - begin, absl::Seconds(60));
  EXPECT_EQ(exit_->code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(exit_->message()),
              HasSubstr("worker-0 gave up step 5 after 1m without progress "
                        "(cluster.give_up_after); it waits for server-1"));
  EXPECT_TRUE(reports_.back().has_fatal());
}

TEST_F(WorkerCoreTest, AMissingServerEndsTheWorkerAfterTheSameTime) {
  SetLife(1, 0);
  Train(5, {{0, 2}});
  Pass(absl::Seconds(60) - absl::Milliseconds(1));
  Tick();
  EXPECT_FALSE(exit_.has_value());
  TickAtWake();
  ASSERT_TRUE(exit_.has_value());
  EXPECT_EQ(exit_->code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(exit_->message()), HasSubstr("server-1: its return"));
}

TEST_F(WorkerCoreTest, AnErrorThatNobodyCanRepairEndsTheWorkerAndTheRun) {
  Train(5, {{0, 2}});
  EndPass(absl::ResourceExhaustedError("unit h.3: no room"), {});
  ASSERT_TRUE(exit_.has_value());
  EXPECT_EQ(exit_->code(), absl::StatusCode::kResourceExhausted);
  ASSERT_THAT(reports_, SizeIs(1));
  EXPECT_EQ(reports_[0].fatal().code(),
            static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(reports_[0].fatal().message(),
            "worker-0: step 5: unit h.3: no room");
}

TEST_F(WorkerCoreTest, AnAssignmentThatIsNoNodeIsRefused) {
  Train(5, {{1, 2}});
  ASSERT_TRUE(exit_.has_value());
  EXPECT_EQ(exit_->code(), absl::StatusCode::kInternal);
}

TEST_F(WorkerCoreTest, TheNextStepEndsAPassButNotItsLastAcknowledgements) {
  Train(5, {{0, 2}});
  Train(6, {{0, 2}});
  EXPECT_THAT(called_off_, SizeIs(1));
  EndPass(absl::CancelledError("called off"), {});
  EXPECT_EQ(running_->step, 6u);
  AllPushed();
  Train(7, {{0, 2}});
  EXPECT_THAT(called_off_, SizeIs(1));
  Succeed();
  EXPECT_THAT(Done(), ElementsAre(std::pair(6, number_ - 1)));
  EXPECT_EQ(running_->step, 7u);
  AllPushed();
  Train(8, {{0, 2}});
  TickAtWake();
  EXPECT_THAT(called_off_, SizeIs(2));
  EXPECT_GE(now_ - absl::UnixEpoch(), WorkerCore::kLastAcksMax);
}

TEST_F(WorkerCoreTest, AnotherTimelineEndsAPassAtOnceAndForgetsWhatItDid) {
  Train(5, {{0, 2}});
  AllPushed();
  ++timeline_;
  Train(5, {{0, 2}});
  EXPECT_THAT(called_off_, SizeIs(1));
  EndPass(absl::OkStatus(), {0, 1});  // The answers came nevertheless.
  ASSERT_TRUE(running_.has_value());
  EXPECT_EQ(running_->timeline, 2u);
  EXPECT_THAT(running_->parts, ElementsAre(Part{{0, 2}, {0, 1}}));
  Succeed();
  EXPECT_EQ(reports_.back().worker_done().timeline(), 2u);
}

TEST_F(WorkerCoreTest, ACoordinatorThatHasNothingToSayDoesNotStopThePass) {
  Train(5, {{0, 2}});
  number_ += kFirstTerm;
  Tell(v1::WORKER_WAIT);
  EXPECT_THAT(called_off_, IsEmpty());
  Succeed();
  Train(5, {{0, 2}});
  EXPECT_EQ(started_, 1);
  EXPECT_THAT(Done(),
              ElementsAre(std::pair(5, kFirstTerm + 1), std::pair(5, number_)));
}

TEST_F(WorkerCoreTest, AnEvaluationReadsItsVersionAndReportsEveryLoss) {
  Evaluate(5, {{0, 1}, {2, 2}});
  ASSERT_TRUE(running_.has_value());
  EXPECT_TRUE(running_->evaluate);
  EXPECT_EQ(running_->version, 5u);
  EXPECT_THAT(running_->parts, ElementsAre(Part{{0, 1}, {}}, Part{{2, 2}, {}}));
  Evaluate(5, {{0, 1}, {2, 2}, {4, 1}});  // Another worker's died.
  EXPECT_THAT(called_off_, IsEmpty());
  Succeed();
  EXPECT_THAT(reports_, IsEmpty());
  EXPECT_THAT(running_->parts, ElementsAre(Part{{4, 1}, {}}));
  Succeed();
  ASSERT_THAT(reports_, SizeIs(1));
  const v1::EvalResult& result = reports_[0].eval_result();
  EXPECT_EQ(result.step(), 5u);
  std::vector<std::pair<uint32_t, double>> losses;
  for (const v1::MicroBatchLoss& loss : result.losses()) {
    losses.emplace_back(loss.micro_batch(), loss.loss_sum());
  }
  EXPECT_THAT(losses, ElementsAre(std::pair(0, 0.0), std::pair(2, 1.0),
                                  std::pair(3, 1.5), std::pair(4, 2.0)));
  Train(6, {{0, 1}});
  EXPECT_FALSE(running_->evaluate);
}

TEST_F(WorkerCoreTest, ADirectiveToExitEndsThePassAndTheWorker) {
  Train(5, {{0, 2}});
  Tell(v1::WORKER_EXIT);
  EXPECT_THAT(called_off_, SizeIs(1));
  EXPECT_FALSE(exit_.has_value());
  EndPass(absl::CancelledError("called off"), {});
  ASSERT_TRUE(exit_.has_value());
  EXPECT_TRUE(exit_->ok());
  EXPECT_TRUE(reports_.back().has_leaving());
}

TEST_F(WorkerCoreTest, TermFinishesTheAssignmentAndLeavesWhenTold) {
  Train(5, {{0, 2}});
  core_.OnTerm(now_);
  Take();
  ASSERT_THAT(reports_, SizeIs(1));
  EXPECT_EQ(reports_[0].draining().reason(), "SIGTERM");
  EXPECT_THAT(called_off_, IsEmpty());
  Succeed();
  EXPECT_THAT(Done(), SizeIs(1));
  EXPECT_FALSE(exit_.has_value());
  Tell(v1::WORKER_EXIT);
  ASSERT_TRUE(exit_.has_value());
  EXPECT_TRUE(exit_->ok());
}

TEST_F(WorkerCoreTest, AnotherCoordinatorHearsOfTheWishToLeaveToo) {
  Tell(v1::WORKER_WAIT);
  core_.OnTerm(now_);
  Take();
  Tell(v1::WORKER_WAIT);
  EXPECT_THAT(reports_, SizeIs(1));
  number_ += kFirstTerm;
  Tell(v1::WORKER_WAIT);
  ASSERT_THAT(reports_, SizeIs(2));
  EXPECT_TRUE(reports_[1].has_draining());
}

TEST_F(WorkerCoreTest, TermIsObeyedWithinDrainTimeoutAndTheSecondAtOnce) {
  Train(5, {{0, 2}});
  core_.OnTerm(now_);
  Take();
  Pass(absl::Seconds(5) - absl::Milliseconds(1));
  Tick();
  EXPECT_FALSE(exit_.has_value());
  core_.OnTerm(now_);
  Take();
  ASSERT_TRUE(exit_.has_value());
  EXPECT_TRUE(exit_->ok());
}

TEST_F(WorkerCoreTest, ADrainThatNobodyAnswersEndsInTime) {
  Train(5, {{0, 2}});
  core_.OnTerm(now_);
  Take();
  Pass(absl::Seconds(5));
  Tick();
  ASSERT_TRUE(exit_.has_value());
  EXPECT_TRUE(exit_->ok());
  EXPECT_TRUE(reports_.back().has_leaving());
}

TEST_F(WorkerCoreTest, AFencedLifeEndsItsPassAndJoinsAgain) {
  Train(5, {{0, 2}});
  core_.OnSessionOver(absl::AbortedError("fenced"), now_);
  Take();
  EXPECT_THAT(called_off_, SizeIs(1));
  EXPECT_FALSE(rejoin_);
  EndPass(absl::CancelledError("called off"), {});
  EXPECT_TRUE(rejoin_);
  EXPECT_FALSE(running_.has_value());
  v1::JoinReply joined;
  joined.set_incarnation(8);
  joined.set_timeline(1);
  core_.OnJoined(joined, now_);
  Take();
  Train(5, {{0, 2}});
  ASSERT_TRUE(running_.has_value());
  EXPECT_EQ(running_->incarnation, 8u);
}

TEST_F(WorkerCoreTest, ACoordinatorThatIsGoneForGoodEndsTheWorker) {
  core_.OnSessionOver(absl::UnavailableError("silent"), now_);
  Take();
  ASSERT_TRUE(exit_.has_value());
  EXPECT_EQ(exit_->code(), absl::StatusCode::kUnavailable);
}

TEST_F(WorkerCoreTest, TheEndOfAPassThatIsNotTheCurrentOneIsIgnored) {
  Train(5, {{0, 2}});
  WorkerCore::PassEnd end;
  end.id = running_->id - 1;
  core_.OnPassEnded(end, now_);
  Take();
  EXPECT_THAT(Done(), IsEmpty());
  Succeed();
  EXPECT_THAT(Done(), SizeIs(1));
}

}  // namespace
}  // namespace ballast
