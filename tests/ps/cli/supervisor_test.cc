// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Kind = SupervisorAction::Kind;
using Stage = Supervisor::Stage;

ProcessEnd Killed(int signal = SIGKILL) {
  ProcessEnd end;
  end.exit_code = -1;
  end.signal = signal;
  end.text = absl::StrCat("was killed by signal ", signal);
  return end;
}

ProcessEnd Exited(int code) {
  ProcessEnd end;
  end.exit_code = code;
  end.text = absl::StrCat("exited with code ", code);
  return end;
}

// A supervisor and a world in which what it starts is alive at once.
class SupervisorTest : public ::testing::Test {
 protected:
  explicit SupervisorTest(SupervisorOptions options = Options())
      : supervisor_(options) {}

  static SupervisorOptions Options() {
    SupervisorOptions options;
    options.servers = 1;
    options.workers = 2;
    options.restarts_max = 4;
    options.stop_timeout = absl::Seconds(60);
    return options;
  }

  // What was done since the last call: "start worker-0", "15 server-0",
  // "stop", "abort", and the lines that were said.
  std::vector<std::string> Done() {
    std::vector<std::string> done;
    for (auto actions = supervisor_.TakeActions(); !actions.empty();
         actions = supervisor_.TakeActions()) {
      for (const SupervisorAction& action : actions) {
        switch (action.kind) {
          case Kind::kStart:
            supervisor_.Started(action.name, ++last_pid_, now_);
            pids_[action.name] = last_pid_;
            done.push_back(absl::StrCat(action.again ? "continue " : "start ",
                                        action.name));
            break;
          case Kind::kSignal:
            done.push_back(absl::StrCat(action.signal, " ", action.name));
            break;
          case Kind::kStopRun:
            done.push_back(action.abort ? "abort" : "stop");
            break;
          case Kind::kSay:
            said_ += action.text;
            break;
        }
      }
    }
    return done;
  }

  void End(const std::string& name, ProcessEnd end) {
    end.pid = pids_[name];
    supervisor_.Ended(name, end, now_);
  }

  // Everyone is up and the run trains.
  void Up() {
    supervisor_.Begin(now_);
    Done();
    supervisor_.Listening(now_);
    Done();
    Status(1);
    EXPECT_THAT(Done(), IsEmpty());
  }

  void Status(uint64_t step, const std::string& phase = "training",
              std::vector<std::string> wanted = {"server-0", "worker-0",
                                                 "worker-1"}) {
    v1::StatusReply status;
    status.set_step(step);
    status.set_phase(phase);
    for (const std::string& name : wanted) {
      status.add_wanted(name);
    }
    supervisor_.StatusSeen(status, now_);
  }

  void Pass(absl::Duration duration) {
    now_ += duration;
    supervisor_.TimePassed(now_);
  }

  absl::Time now_ = absl::UnixEpoch();
  Supervisor supervisor_;
  std::map<std::string, int64_t> pids_;
  int64_t last_pid_ = 100;
  std::string said_;
};

TEST_F(SupervisorTest, MembersStartOnceTheCoordinatorListens) {
  supervisor_.Begin(now_);
  EXPECT_THAT(Done(), ElementsAre("start coordinator"));
  EXPECT_FALSE(supervisor_.listening());
  supervisor_.Listening(now_);
  EXPECT_TRUE(supervisor_.listening());
  EXPECT_THAT(Done(), ElementsAre("start server-0", "start worker-0",
                                  "start worker-1"));
  EXPECT_EQ(supervisor_.Alive().size(), 4u);
  EXPECT_FALSE(supervisor_.over());
}

TEST_F(SupervisorTest, ACoordinatorThatSaysNothingIsGivenUp) {
  supervisor_.Begin(now_);
  Done();
  Pass(absl::Seconds(30) - absl::Nanoseconds(1));
  EXPECT_EQ(supervisor_.stage(), Stage::kRunning);
  Pass(absl::Nanoseconds(1));
  EXPECT_EQ(supervisor_.stage(), Stage::kFailing);
  EXPECT_THAT(supervisor_.failure(), HasSubstr("has not said its address"));
  EXPECT_THAT(Done(), ElementsAre("15 coordinator"));
}

TEST_F(SupervisorTest, TheFirstDeathIsMendedAtOnceAndReported) {
  Up();
  End("worker-1", Killed());
  ASSERT_EQ(supervisor_.unreported().size(), 1u);
  EXPECT_EQ(supervisor_.unreported()[0].name, "worker-1");
  EXPECT_EQ(supervisor_.unreported()[0].end.pid, 104);
  EXPECT_EQ(supervisor_.unreported()[0].at, now_);
  EXPECT_THAT(Done(), ElementsAre("continue worker-1"));
  EXPECT_EQ(said_,
            "worker-1 (pid 104) was killed by signal 9 after step 1; started "
            "again\n");
  EXPECT_EQ(supervisor_.stage(), Stage::kRunning);
  supervisor_.Reported();
  EXPECT_THAT(supervisor_.unreported(), IsEmpty());
}

TEST_F(SupervisorTest, LaterDeathsWaitTwiceAsLong) {
  Up();
  End("server-0", Killed());
  EXPECT_THAT(Done(), ElementsAre("continue server-0"));
  for (const int wait : {100, 200}) {
    End("server-0", Exited(1));
    EXPECT_THAT(Done(), IsEmpty());
    EXPECT_EQ(supervisor_.next_at(), now_ + absl::Milliseconds(wait));
    EXPECT_FALSE(supervisor_.over());
    Pass(absl::Milliseconds(wait) - absl::Nanoseconds(1));
    EXPECT_THAT(Done(), IsEmpty());
    Pass(absl::Nanoseconds(1));
    EXPECT_THAT(Done(), ElementsAre("continue server-0"));
  }
}

class ManyRestartsTest : public SupervisorTest {
 protected:
  ManyRestartsTest() : SupervisorTest(Many()) {}
  static SupervisorOptions Many() {
    SupervisorOptions options = Options();
    options.restarts_max = 1000;
    return options;
  }
};

TEST_F(ManyRestartsTest, NoPauseIsLongerThanFiveSeconds) {
  Up();
  for (int i = 0; i < 100; ++i) {
    End("worker-0", Killed());
    EXPECT_LE(supervisor_.next_at() - now_,
              i == 0 ? absl::InfiniteDuration() : absl::Seconds(5));
    Pass(absl::Seconds(5));
    EXPECT_THAT(Done(), ElementsAre("continue worker-0"));
  }
}

TEST_F(SupervisorTest, GivesUpOnAMemberThatDiesWithoutAStepInBetween) {
  Up();
  for (int i = 1; i < 4; ++i) {
    End("worker-0", Exited(1));
    Pass(absl::Seconds(5));
    EXPECT_THAT(Done(), ElementsAre("continue worker-0")) << i;
  }
  End("worker-0", Exited(3));
  EXPECT_EQ(supervisor_.stage(), Stage::kFailing);
  EXPECT_EQ(supervisor_.failure(),
            "worker-0 (pid 107) exited with code 3 after step 1, its death "
            "number 4 without a committed step in between "
            "(cluster.restarts_max)");
  EXPECT_THAT(supervisor_.dead(), ElementsAre("worker-0"));
  EXPECT_THAT(Done(), ElementsAre("abort"));
  Pass(absl::Seconds(5));
  EXPECT_THAT(Done(), IsEmpty());
}

TEST_F(SupervisorTest, ACommittedStepForgetsEarlierDeaths) {
  Up();
  for (uint64_t step = 1; step < 20; ++step) {
    Status(step);
    End("worker-0", Killed());
    EXPECT_THAT(Done(), ElementsAre("continue worker-0"));
  }
  EXPECT_EQ(supervisor_.stage(), Stage::kRunning);
  // Of a rolled back run too, whose step is lower than before.
  Status(10);
  End("worker-0", Killed());
  EXPECT_THAT(Done(), IsEmpty());  // It has waited for no step yet.
  Status(11);
  Pass(absl::Milliseconds(100));
  EXPECT_THAT(Done(), ElementsAre("continue worker-0"));
  End("worker-0", Killed());
  EXPECT_THAT(Done(), ElementsAre("continue worker-0"));
}

TEST_F(SupervisorTest, DeathsOfOneMemberAreNotThoseOfAnother) {
  Up();
  for (int i = 0; i < 3; ++i) {
    for (const char* name : {"worker-0", "worker-1", "server-0"}) {
      End(name, Killed());
    }
    Pass(absl::Seconds(1));
    Done();
  }
  EXPECT_EQ(supervisor_.stage(), Stage::kRunning);
}

TEST_F(SupervisorTest, ARefusedConfigurationEndsTheRunAtOnce) {
  Up();
  End("worker-0", Exited(78));
  EXPECT_EQ(supervisor_.stage(), Stage::kFailing);
  EXPECT_TRUE(supervisor_.bad_configuration());
  EXPECT_THAT(supervisor_.failure(), HasSubstr("exited with code 78"));
  EXPECT_THAT(Done(), ElementsAre("abort"));
}

TEST_F(SupervisorTest, TheCoordinatorIsContinuedAndToldOfItsOwnDeath) {
  Up();
  End("coordinator", Killed());
  EXPECT_FALSE(supervisor_.listening());
  EXPECT_THAT(Done(), ElementsAre("continue coordinator"));
  ASSERT_EQ(supervisor_.unreported().size(), 1u);
  EXPECT_EQ(supervisor_.unreported()[0].name, "coordinator");
  now_ += absl::Seconds(1);
  supervisor_.Listening(now_);
  EXPECT_THAT(Done(), IsEmpty());  // The members never went.
  EXPECT_TRUE(supervisor_.listening());
}

TEST_F(SupervisorTest, MembersAreStartedAgainWhileTheCoordinatorIsAway) {
  Up();
  End("coordinator", Killed());
  End("server-0", Killed());
  EXPECT_THAT(Done(), ElementsAre("continue coordinator", "continue server-0"));
}

TEST_F(SupervisorTest, AStaleAnnouncementIsNotHeard) {
  supervisor_.Begin(now_);
  Done();
  End("coordinator", Exited(0));
  supervisor_.Listening(now_);
  EXPECT_FALSE(supervisor_.listening());
  EXPECT_THAT(Done(), IsEmpty());
  EXPECT_TRUE(supervisor_.over());
  EXPECT_EQ(supervisor_.failure(), "");
}

class ResumeTest : public SupervisorTest {
 protected:
  ResumeTest() : SupervisorTest(Resuming()) {}
  static SupervisorOptions Resuming() {
    SupervisorOptions options = Options();
    options.resume = true;
    return options;
  }
};

TEST_F(ResumeTest, IsAskedForAgainUntilTheCoordinatorIsKnownToRun) {
  supervisor_.Begin(now_);
  Done();
  End("coordinator", Killed());
  EXPECT_THAT(Done(), ElementsAre("start coordinator"));
  supervisor_.Listening(now_);
  Done();
  End("coordinator", Killed());
  Pass(absl::Seconds(1));
  EXPECT_THAT(Done(), ElementsAre("start coordinator"));
  supervisor_.Listening(now_);
  Status(7);
  End("coordinator", Killed());
  EXPECT_THAT(Done(), ElementsAre("continue coordinator"));
}

TEST_F(SupervisorTest, ACoordinatorThatEndsByItselfHasFailedTheRun) {
  Up();
  End("worker-0", Exited(1));
  EXPECT_THAT(Done(), ElementsAre("continue worker-0"));
  End("coordinator", Exited(1));
  EXPECT_EQ(supervisor_.stage(), Stage::kFailing);
  // It speaks last: a member is why.
  EXPECT_THAT(supervisor_.dead(), ElementsAre("worker-0", "coordinator"));
  EXPECT_THAT(Done(), ElementsAre("15 server-0", "15 worker-0", "15 worker-1"));
  EXPECT_EQ(supervisor_.next_at(), now_ + absl::Seconds(2));
  Pass(absl::Seconds(2));
  EXPECT_THAT(Done(), ElementsAre("9 server-0", "9 worker-0", "9 worker-1"));
  EXPECT_EQ(supervisor_.stage(), Stage::kKilled);
}

TEST_F(SupervisorTest, AFailedRunIsNotMended) {
  Up();
  v1::StatusReply status;
  status.set_phase("failed");
  status.set_failure("server-0: disk lost");
  supervisor_.StatusSeen(status, now_);
  EXPECT_EQ(supervisor_.stage(), Stage::kFailing);
  EXPECT_EQ(supervisor_.failure(), "server-0: disk lost");
  EXPECT_THAT(Done(), IsEmpty());  // The coordinator tells everyone itself.
  End("server-0", Exited(1));
  End("worker-0", Killed());
  EXPECT_THAT(Done(), IsEmpty());
}

TEST_F(SupervisorTest, WhoIsWantedAnewIsStartedAndWhoIsNotIsLetGo) {
  Up();
  Status(2, "training", {"server-0", "worker-0", "worker-1", "worker-2"});
  EXPECT_THAT(Done(), ElementsAre("start worker-2"));
  Status(3, "training", {"server-0", "worker-1", "worker-2"});
  EXPECT_THAT(Done(), IsEmpty());
  End("worker-0", Exited(0));
  Status(4, "training", {"server-0", "worker-1", "worker-2"});
  EXPECT_THAT(Done(), IsEmpty());
  EXPECT_EQ(supervisor_.Alive().count("worker-0"), 0u);
  // A drained member that is killed on its way out is not missed either.
  Status(5, "training", {"server-0", "worker-2"});
  End("worker-1", Killed());
  EXPECT_THAT(Done(), IsEmpty());
  // Wanted once more, it is new.
  Status(6, "training", {"server-0", "worker-0", "worker-2"});
  EXPECT_THAT(Done(), ElementsAre("start worker-0"));
}

TEST_F(SupervisorTest, ACoordinatorThatNamesNobodyChangesNothing) {
  Up();
  Status(2, "training", {});
  End("worker-0", Killed());
  EXPECT_THAT(Done(), ElementsAre("continue worker-0"));
}

TEST_F(SupervisorTest, WhoLeavesInGoodOrderButIsWantedComesBack) {
  Up();
  End("worker-0", Exited(0));
  EXPECT_THAT(Done(), IsEmpty());
  EXPECT_THAT(supervisor_.unreported(), IsEmpty());
  Status(2);
  EXPECT_THAT(Done(), ElementsAre("continue worker-0"));
  EXPECT_THAT(said_, HasSubstr("has left, but is still wanted"));
}

TEST_F(SupervisorTest, WhoLeavesBecauseTheRunEndsDoesNot) {
  Up();
  End("worker-0", Exited(0));
  Status(30, "finishing");
  EXPECT_THAT(Done(), IsEmpty());
  Status(30, "done");
  EXPECT_THAT(Done(), IsEmpty());
}

TEST_F(SupervisorTest, AServerThatDiesInTheFinishIsMended) {
  Up();
  Status(30, "finishing");
  End("server-0", Killed());
  EXPECT_THAT(Done(), ElementsAre("continue server-0"));
  // What is done is done.
  Status(30, "done");
  End("server-0", Killed());
  EXPECT_THAT(Done(), IsEmpty());
}

TEST_F(SupervisorTest, AfterAGoodEndTheOthersFollow) {
  Up();
  End("coordinator", Exited(0));
  EXPECT_EQ(supervisor_.stage(), Stage::kEnding);
  for (const char* name : {"server-0", "worker-0"}) {
    End(name, Exited(0));
  }
  // A death now takes nothing back.
  EXPECT_FALSE(supervisor_.over());
  End("worker-1", Killed());
  EXPECT_THAT(Done(), IsEmpty());
  EXPECT_TRUE(supervisor_.over());
  EXPECT_EQ(supervisor_.failure(), "");
}

TEST_F(SupervisorTest, WhoDoesNotHearOfTheEndIsToldAndThenKilled) {
  Up();
  End("coordinator", Exited(0));
  for (const char* name : {"server-0", "worker-0"}) {
    End(name, Exited(0));
  }
  Pass(absl::Seconds(5));
  EXPECT_THAT(Done(), ElementsAre("15 worker-1"));
  Pass(absl::Seconds(2));
  EXPECT_THAT(Done(), ElementsAre("15 worker-1"));
  EXPECT_EQ(supervisor_.failure(), "");
  Pass(absl::Seconds(10));
  EXPECT_THAT(Done(), ElementsAre("9 worker-1"));
  EXPECT_EQ(supervisor_.failure(),
            "worker-1 did not end in time and was killed");
  End("worker-1", Killed());
  EXPECT_TRUE(supervisor_.over());
}

TEST_F(SupervisorTest, AnInterruptStopsTheRunThroughTheCoordinatorAlone) {
  Up();
  supervisor_.Interrupted(now_);
  EXPECT_TRUE(supervisor_.interrupted());
  EXPECT_THAT(Done(), ElementsAre("stop"));
  EXPECT_THAT(said_, HasSubstr("stopping after the step in flight"));
  // What the drain needs is still mended, and who left stays away.
  End("server-0", Killed());
  EXPECT_THAT(Done(), ElementsAre("continue server-0"));
  End("worker-0", Exited(0));
  Status(2);
  EXPECT_THAT(Done(), IsEmpty());
  for (const char* name : {"worker-1", "server-0", "coordinator"}) {
    End(name, Exited(0));
  }
  EXPECT_TRUE(supervisor_.over());
  EXPECT_EQ(supervisor_.failure(), "");
}

TEST_F(SupervisorTest, ACoordinatorThatDiesInTheDrainIsToldAgain) {
  Up();
  supervisor_.Interrupted(now_);
  Done();
  End("coordinator", Killed());
  EXPECT_THAT(Done(), ElementsAre("continue coordinator"));
  supervisor_.Listening(now_);
  EXPECT_THAT(Done(), ElementsAre("stop"));
}

TEST_F(SupervisorTest, AnInterruptWhileTheCoordinatorIsAwayWaitsForIt) {
  Up();
  End("coordinator", Killed());
  Done();
  supervisor_.Interrupted(now_);
  EXPECT_THAT(Done(), IsEmpty());
  supervisor_.Listening(now_);
  EXPECT_THAT(Done(), ElementsAre("stop"));
}

TEST_F(SupervisorTest, ACoordinatorThatDoesNotAnswerIsStoppedByASignal) {
  Up();
  supervisor_.Interrupted(now_);
  Done();
  supervisor_.StopRefused(now_);
  EXPECT_THAT(Done(), ElementsAre("15 coordinator"));
  // It may not have been ready to take it.
  End("coordinator", Killed(SIGTERM));
  EXPECT_EQ(supervisor_.stage(), Stage::kEnding);
}

TEST_F(SupervisorTest, AnInterruptBeforeAnyoneListensEndsAll) {
  supervisor_.Begin(now_);
  Done();
  supervisor_.Interrupted(now_);
  EXPECT_THAT(Done(), ElementsAre("15 coordinator"));
  End("coordinator", Killed(SIGTERM));
  EXPECT_TRUE(supervisor_.over());
  EXPECT_EQ(supervisor_.failure(), "");
}

TEST_F(SupervisorTest, AStopThatTakesTooLongEndsInAKill) {
  Up();
  supervisor_.Interrupted(now_);
  Done();
  Pass(absl::Seconds(60) - absl::Nanoseconds(1));
  EXPECT_THAT(Done(), IsEmpty());
  Pass(absl::Nanoseconds(1));
  EXPECT_THAT(Done(), ElementsAre("9 coordinator", "9 server-0", "9 worker-0",
                                  "9 worker-1"));
  EXPECT_THAT(supervisor_.failure(), HasSubstr("did not end in time"));
}

TEST_F(SupervisorTest, ASecondInterruptKillsAtOnceAndNobodyComesBack) {
  Up();
  supervisor_.Interrupted(now_);
  Done();
  supervisor_.Interrupted(now_);
  EXPECT_THAT(Done(), ElementsAre("9 coordinator", "9 server-0", "9 worker-0",
                                  "9 worker-1"));
  EXPECT_THAT(supervisor_.failure(), HasSubstr("ended at once"));
  for (const char* name : {"coordinator", "server-0", "worker-0", "worker-1"}) {
    End(name, Killed());
  }
  EXPECT_THAT(Done(), IsEmpty());
  EXPECT_TRUE(supervisor_.over());
}

TEST_F(SupervisorTest, WhatCannotBeStartedFirstEndsTheRun) {
  supervisor_.Begin(now_);
  supervisor_.TakeActions();
  supervisor_.StartFailed("coordinator", "no such binary", now_);
  EXPECT_EQ(supervisor_.failure(), "no such binary");
  EXPECT_TRUE(supervisor_.over());
}

TEST_F(SupervisorTest, WhatCannotBeStartedLaterIsTriedAgain) {
  Up();
  End("worker-0", Killed());
  supervisor_.TakeActions();
  supervisor_.StartFailed("worker-0", "no memory", now_);
  EXPECT_EQ(supervisor_.stage(), Stage::kRunning);
  Pass(absl::Milliseconds(100));
  EXPECT_THAT(Done(), ElementsAre("continue worker-0"));
  EXPECT_THAT(said_, HasSubstr("cannot be started: no memory"));
}

// A failure has to reach everyone whatever happened before.
TEST_F(SupervisorTest, AFailureIsBoundedInTime) {
  Up();
  End("worker-0", Exited(78));
  EXPECT_THAT(Done(), ElementsAre("abort"));
  supervisor_.StopRefused(now_);
  EXPECT_THAT(Done(),
              ElementsAre("15 coordinator", "15 server-0", "15 worker-1"));
  Pass(absl::Seconds(2));
  EXPECT_THAT(Done(), ElementsAre("9 coordinator", "9 server-0", "9 worker-1"));
  EXPECT_THAT(supervisor_.failure(), Not(HasSubstr("did not end")));
}

}  // namespace
}  // namespace ballast
