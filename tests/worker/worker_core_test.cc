// SPDX-License-Identifier: Apache-2.0
#include "worker/worker_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Part = WorkerCore::Part;

constexpr uint64_t kFirstTerm = uint64_t{1} << 32;

class WorkerCoreTest : public ::testing::Test {
 protected:
  WorkerCoreTest() {
    for (const uint64_t life : {101u, 102u}) {
      v1::ServerEntry* const server = placement_.add_servers();
      server->set_name(absl::StrCat("server-", life - 101));
      server->set_incarnation(life);
    }
    placement_.set_placement_version(1);
    placement_.set_address_version(1);
    placement_.add_owner(0);
    placement_.add_owner(1);
    v1::JoinReply joined;
    joined.set_incarnation(7);
    joined.set_timeline(1);
    core_.OnJoined(joined, now_);
    Take();
  }

  void Pass(absl::Duration time) { now_ += time; }

  // The owner's part: keeps what the core asks for, answers for the placement.
  void Take() {
    WorkerCore::Actions actions = core_.TakeActions();
    if (actions.call_off.has_value()) {
      called_off_.push_back(*actions.call_off);
    }
    if (actions.start.has_value()) {
      EXPECT_FALSE(running_.has_value()) << "two passes at once";
      running_ = actions.start;
      ++started_;
    }
    for (v1::ReportRequest& report : actions.reports) {
      reports_.push_back(std::move(report));
    }
    rejoin_ = rejoin_ || actions.rejoin;
    if (actions.exit.has_value()) {
      exit_ = actions.exit;
    }
    if (actions.want_placement) {
      ++asked_;
      if (answers_) {
        core_.OnPlacement(WorkerCore::ViewOf(placement_), now_);
        Take();
      }
    }
  }

  v1::PollReply Directive(v1::WorkerTask task, uint64_t step,
                          std::initializer_list<Span> spans) {
    v1::PollReply reply;
    reply.set_number(++number_);
    v1::WorkerDirective* const worker = reply.mutable_worker();
    worker->set_task(task);
    worker->set_timeline(timeline_);
    worker->set_step(step);
    for (const Span& span : spans) {
      v1::MicroBatchSpan* const entry = worker->add_spans();
      entry->set_first(span.first);
      entry->set_count(span.count);
    }
    worker->set_placement_version(placement_.placement_version());
    worker->set_address_version(placement_.address_version());
    for (const uint64_t life : voted_) {
      worker->add_voted(life);
    }
    return reply;
  }
  void Tell(const v1::PollReply& reply) {
    core_.OnDirective(reply, now_);
    Take();
  }
  void Train(uint64_t step, std::initializer_list<Span> spans) {
    Tell(Directive(v1::WORKER_TRAIN, step, spans));
  }
  void Evaluate(uint64_t step, std::initializer_list<Span> spans) {
    Tell(Directive(v1::WORKER_EVALUATE, step, spans));
  }
  void Tell(v1::WorkerTask task) { Tell(Directive(task, 0, {})); }

  // A server's life changes; 0: it is gone.
  void SetLife(int server, uint64_t life) {
    placement_.mutable_servers(server)->set_incarnation(life);
    placement_.set_address_version(placement_.address_version() + 1);
  }

  void Tick() {
    core_.Tick(now_);
    Take();
  }
  // Moves on to when the core wants to be called.
  void TickAtWake() {
    ASSERT_LT(core_.NextWake(), absl::InfiniteFuture());
    now_ = std::max(now_, core_.NextWake());
    Tick();
  }
  void AllPushed() {
    core_.OnAllPushed(running_->id, now_);
    Take();
  }
  // The pass ends; `from` are the servers that acknowledged all of it.
  void EndPass(const absl::Status& status, std::initializer_list<uint32_t> from,
               uint64_t life = 0) {
    ASSERT_TRUE(running_.has_value());
    WorkerCore::PassEnd end;
    end.id = running_->id;
    end.status = status;
    end.figures.set_pushed_bytes(10);
    for (const Part& part : running_->parts) {
      for (const uint32_t server : from) {
        end.acks.push_back(
            {part.node, server,
             life != 0 ? life : running_->view.servers[server].life});
      }
      for (uint32_t m = part.node.first; m < part.node.end(); ++m) {
        if (running_->evaluate) {
          v1::MicroBatchLoss& loss = end.losses.emplace_back();
          loss.set_micro_batch(m);
          loss.set_loss_sum(m * 0.5);
        }
      }
    }
    running_.reset();
    core_.OnPassEnded(end, now_);
    Take();
  }
  void Succeed() { EndPass(absl::OkStatus(), {0, 1}); }
  void BreakOff() { EndPass(absl::UnavailableError("server-1: reset"), {}); }

  // Steps of the WorkerDone reports so far, with the numbers they answer.
  std::vector<std::pair<uint64_t, uint64_t>> Done() const {
    std::vector<std::pair<uint64_t, uint64_t>> done;
    for (const v1::ReportRequest& report : reports_) {
      if (report.has_worker_done()) {
        EXPECT_EQ(report.incarnation(), 7u);
        EXPECT_EQ(report.timeline(), report.worker_done().timeline());
        done.emplace_back(report.worker_done().step(),
                          report.worker_done().number());
      }
    }
    return done;
  }

  WorkerCore core_ = WorkerCore({.name = "worker-0",
                                 .micro_batches = 8,
                                 .give_up_after = absl::Seconds(60),
                                 .drain_timeout = absl::Seconds(5)});
  absl::Time now_ = absl::UnixEpoch();
  v1::Placement placement_;
  uint64_t number_ = kFirstTerm;
  uint64_t timeline_ = 1;
  std::vector<uint64_t> voted_;
  bool answers_ = true;  // Questions for the placement, at once.

  std::optional<WorkerCore::Pass> running_;
  int started_ = 0;
  int asked_ = 0;
  std::vector<uint64_t> called_off_;
  std::vector<v1::ReportRequest> reports_;
  bool rejoin_ = false;
  std::optional<absl::Status> exit_;
};

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
