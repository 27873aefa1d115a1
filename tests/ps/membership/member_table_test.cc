// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/member_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::ballast::testing::CoreHarness;
using ::ballast::testing::SmallLayout;
using ::testing::HasSubstr;

constexpr absl::Time kStart = absl::UnixEpoch();

class MemberTableTest : public ::testing::Test {
 protected:
  MemberTableTest() : table_(Limits(), 100, 7) {}
  static MemberTable::Limits Limits() {
    MemberTable::Limits limits;
    limits.max_workers = 2;
    limits.lease = absl::Seconds(5);
    limits.numerics = testing::SmallNumerics();
    return limits;
  }
  v1::JoinRequest Server(int index) const {
    return requests_.JoinOf(v1::ROLE_SERVER, index);
  }
  v1::JoinRequest Worker(int index) const {
    return requests_.JoinOf(v1::ROLE_WORKER, index);
  }
  absl::Status Refusal(const v1::JoinRequest& request) {
    return Try(request, kStart).status();
  }
  absl::StatusOr<uint64_t> Try(const v1::JoinRequest& request, absl::Time now) {
    const auto known = table_.FindLife(request, now);
    if (!known.ok()) {
      return known.status();
    }
    if (*known != nullptr) {
      return (*known)->incarnation;
    }
    const absl::Status may = table_.Check(request, now);
    return may.ok() ? absl::StatusOr<uint64_t>(
                          table_.Admit(request, now)->incarnation)
                    : may;
  }
  uint64_t Admit(const v1::JoinRequest& request) {
    const auto member = Try(request, kStart);
    EXPECT_TRUE(member.ok()) << member.status();
    return member.value_or(0);
  }
  CoreHarness requests_;
  MemberTable table_;
};

TEST_F(MemberTableTest, AJoinIsIdempotentForOneLife) {
  const uint64_t first = Admit(Server(0));
  EXPECT_GT(first, 100u);
  const uint64_t generation = table_.generation();
  EXPECT_EQ(Admit(Server(0)), first);
  EXPECT_EQ(generation, 8u);  // Counts on.
  EXPECT_EQ(table_.generation(), generation);
}

TEST_F(MemberTableTest, ANameIsAwaitedUntilItsOwnerIsKnownToLive) {
  const uint64_t owner = Admit(Server(0));
  v1::JoinRequest other = Server(0);
  other.set_life_id(5);
  other.set_address("127.0.0.1:1");
  absl::Status status = Refusal(other);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("server-0 (pid 42"));
  // A dead one's last call may still be on its way.
  const absl::Time just_before = kStart + absl::Milliseconds(999);
  ASSERT_TRUE(table_.Heartbeat(owner, nullptr, just_before).ok());
  EXPECT_EQ(Try(other, just_before).status().code(),
            absl::StatusCode::kUnavailable);
  const absl::Time then = kStart + absl::Seconds(1);
  ASSERT_TRUE(table_.Heartbeat(owner, nullptr, then).ok());
  status = Try(other, then).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("which lives"));
}

TEST_F(MemberTableTest, ANewLifeTakesOverFromOneThatIsGone) {
  const uint64_t first = Admit(Server(0));
  table_.Leave(first);
  v1::JoinRequest other = Server(0);
  other.set_life_id(5);
  EXPECT_GT(Admit(other), first);
}

TEST_F(MemberTableTest, ALifeThatIsOverCannotJoinAgain) {
  table_.Leave(Admit(Server(0)));
  EXPECT_EQ(Refusal(Server(0)).code(), absl::StatusCode::kAborted);
}

TEST_F(MemberTableTest, WorkersAreTakenUpToTheMost) {
  Admit(Worker(0));
  Admit(Worker(1));
  const absl::Status status = Refusal(Worker(2));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cluster.max_workers"));
}

TEST_F(MemberTableTest, ARestoredLifeIsInWithAFreshLease) {
  const absl::Time later = kStart + absl::Seconds(100);
  table_.Restore(17, Worker(0), later);
  EXPECT_EQ(table_.FindName("worker-0")->incarnation, 17u);
  EXPECT_TRUE(table_.TakeExpired(later + absl::Seconds(4)).empty());
  EXPECT_EQ(table_.TakeExpired(later + absl::Seconds(5)).size(), 1u);
}

TEST_F(MemberTableTest, RenewalOfAllCountsForTheLivingOnly) {
  const uint64_t dead = Admit(Worker(0));
  const uint64_t lives = Admit(Worker(1));
  table_.Leave(dead);
  table_.RenewAll(kStart + absl::Seconds(9));
  EXPECT_TRUE(table_.TakeExpired(kStart + absl::Seconds(13)).empty());
  EXPECT_THAT(table_.TakeExpired(kStart + absl::Seconds(14)),
              ::testing::ElementsAre(lives));
}

TEST_F(MemberTableTest, OnlyTheNewestLivesThatAreGoneAreRemembered) {
  std::vector<uint64_t> lives;
  for (uint64_t i = 0; i <= MemberTable::kGoneMax; ++i) {
    v1::JoinRequest request = Worker(0);
    request.set_life_id(100 + i);
    lives.push_back(Admit(request));
    table_.Leave(lives.back());
  }
  EXPECT_EQ(table_.All().size(), MemberTable::kGoneMax);
  EXPECT_EQ(table_.Find(lives.front()), nullptr);
  EXPECT_NE(table_.Find(lives.back()), nullptr);
}

TEST_F(MemberTableTest, RefusesAJoinThatIsNotWhole) {
  v1::JoinRequest request = Server(0);
  request.clear_life_id();
  EXPECT_EQ(Refusal(request).code(), absl::StatusCode::kInvalidArgument);
  request = Server(0);
  request.clear_name();
  EXPECT_EQ(Refusal(request).code(), absl::StatusCode::kInvalidArgument);
  request = Server(0);
  request.clear_role();
  EXPECT_EQ(Refusal(request).code(), absl::StatusCode::kInvalidArgument);
  request = Server(0);
  request.clear_address();
  EXPECT_EQ(Refusal(request).code(), absl::StatusCode::kInvalidArgument);
  request = Worker(0);
  request.set_layout("damaged");
  EXPECT_EQ(Refusal(request).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(table_.All().empty());
}

TEST_F(MemberTableTest, TwoServersCannotHaveOneAddress) {
  Admit(Server(0));
  v1::JoinRequest request = Server(1);
  request.set_address(Server(0).address());
  EXPECT_EQ(Refusal(request).code(), absl::StatusCode::kFailedPrecondition);
  // A worker's address is its own affair.
  v1::JoinRequest worker = Worker(0);
  worker.set_address(Server(0).address());
  Admit(worker);
}

TEST_F(MemberTableTest, NamesTheFieldsThatDifferWithBothValues) {
  v1::JoinRequest request = Worker(0);
  request.mutable_numerics(0)->set_value("64");
  const absl::Status status = Refusal(request);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(),
            "worker-0 is configured differently: model.width is 64; the run "
            "has 128");
}

TEST_F(MemberTableTest, AMissingFieldDiffers) {
  v1::JoinRequest request = Worker(0);
  request.mutable_numerics()->RemoveLast();
  EXPECT_THAT(std::string(Refusal(request).message()),
              HasSubstr("optimizer.lr is not set; the run has 0.001"));
}

TEST_F(MemberTableTest, WhatTheJobDoesNotSayMustAgreeWithinARole) {
  v1::JoinRequest first = Worker(0);
  v1::ConfigField* isa = first.add_numerics();
  isa->set_key("cpu.isa");
  isa->set_value("avx2");
  Admit(first);
  v1::JoinRequest second = Worker(1);
  *second.add_numerics() = *isa;
  second.mutable_numerics(2)->set_value("avx512");
  EXPECT_THAT(std::string(Refusal(second).message()),
              HasSubstr("cpu.isa is avx512; worker-0 has avx2"));
  Admit(Server(0));  // Another role need not have the field.
  second.mutable_numerics(2)->set_value("avx2");
  Admit(second);
}

TEST_F(MemberTableTest, NamesTheFirstTensorThatDiffers) {
  Admit(Worker(0));
  ModelLayout other = SmallLayout();
  other.tensors[1].shape = {512, 256};
  v1::JoinRequest request = Worker(1);
  request.set_layout(other.Encode());
  const absl::Status status = Refusal(request);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("worker-1 has another model: tensor 1 of the model is "
                        "h.0.weight [512, 256]"));
}

TEST_F(MemberTableTest, AModelWithMoreTensorsOrOtherUnitsDiffers) {
  EXPECT_TRUE(CheckLayout(SmallLayout(2), SmallLayout(2)).ok());
  EXPECT_THAT(
      std::string(CheckLayout(SmallLayout(2), SmallLayout(3)).message()),
      HasSubstr("tensor 5 of the model is h.2.weight"));
  ModelLayout other = SmallLayout(2);
  std::swap(other.units[1], other.units[2]);
  EXPECT_THAT(std::string(CheckLayout(SmallLayout(2), other).message()),
              HasSubstr("unit 1 of the model is h.1; the run has h.0"));
}

TEST_F(MemberTableTest, MembersAreInTheOrderOfTheirNumbers) {
  for (const int index : {10, 2, 0}) {
    Admit(Server(index));
  }
  std::vector<std::string> names;
  for (const Member* member : table_.Active(v1::ROLE_SERVER)) {
    names.push_back(member->name());
  }
  EXPECT_THAT(names,
              ::testing::ElementsAre("server-0", "server-2", "server-10"));
}

TEST_F(MemberTableTest, AHeartbeatRenewsTheLease) {
  const uint64_t member = Admit(Server(0));
  const absl::Time later = kStart + absl::Seconds(4);
  ASSERT_TRUE(table_.Heartbeat(member, nullptr, later).ok());
  EXPECT_TRUE(table_.TakeExpired(kStart + absl::Seconds(8)).empty());
  EXPECT_THAT(table_.TakeExpired(later + absl::Seconds(5)),
              ::testing::ElementsAre(member));
}

TEST_F(MemberTableTest, AStrangersOrDeadLifesHeartbeatIsFenced) {
  EXPECT_EQ(table_.Heartbeat(5, nullptr, kStart).status().code(),
            absl::StatusCode::kAborted);
  const uint64_t member = Admit(Server(0));
  table_.Leave(member);
  table_.Leave(member);
  EXPECT_EQ(table_.Heartbeat(member, nullptr, kStart).status().code(),
            absl::StatusCode::kAborted);
}

TEST_F(MemberTableTest, OnlyWorkDoneShowsProgress) {
  const uint64_t member = Admit(Worker(0));
  v1::MemberStats stats;
  stats.set_phase("waits");
  stats.set_waits_ms(10);
  EXPECT_FALSE(*table_.Heartbeat(member, &stats, kStart));
  stats.set_fetched_bytes(1);
  EXPECT_TRUE(*table_.Heartbeat(member, &stats, kStart));
  stats.set_units_done(1);
  EXPECT_TRUE(*table_.Heartbeat(member, &stats, kStart));
  stats.set_loaded_chunks(1);
  EXPECT_TRUE(*table_.Heartbeat(member, &stats, kStart));
  EXPECT_FALSE(*table_.Heartbeat(member, &stats, kStart));
  EXPECT_EQ(table_.Find(member)->stats.fetched_bytes(), 1u);
}

}  // namespace
}  // namespace ballast
