// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/scale.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void AddMember(v1::StatusReply* status, const std::string& name,
               const std::string& state, const std::string& owes = "") {
  v1::MemberStatus* member = status->add_members();
  member->set_name(name);
  member->set_state(state);
  member->set_owes(owes);
}

TEST(MemberNameTest, TakesTheNameOrItsNumber) {
  EXPECT_EQ(*MemberName(v1::ROLE_WORKER, "worker-12"), "worker-12");
  EXPECT_EQ(*MemberName(v1::ROLE_WORKER, "0"), "worker-0");
  EXPECT_EQ(*MemberName(v1::ROLE_SERVER, "3"), "server-3");
}

TEST(MemberNameTest, RefusesWhatNamesNoneOfTheRole) {
  for (const char* id : {"", "worker-", "server-1", "-1", "+1", " 1", "one",
                         "worker-1x", "4294967296"}) {
    const absl::Status status = MemberName(v1::ROLE_WORKER, id).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << id;
    EXPECT_THAT(std::string(status.message()), HasSubstr("want worker-1"));
  }
}

TEST(NotInYetTest, NamesWhoIsMissingAndWhatHeDoes) {
  v1::StatusReply status;
  AddMember(&status, "worker-0", "active");
  AddMember(&status, "server-2", "loading", "version 7");
  EXPECT_THAT(NotInYet(status, {"worker-0"}), IsEmpty());
  EXPECT_THAT(NotInYet(status, {"worker-0", "worker-1", "server-2"}),
              ElementsAre("worker-1 has not joined",
                          "server-2 is loading (version 7)"));
}

TEST(NotInYetTest, AnEarlierLifeDoesNotCount) {
  v1::StatusReply status;
  AddMember(&status, "worker-1", "gone");
  EXPECT_THAT(NotInYet(status, {"worker-1"}),
              ElementsAre("worker-1 has not joined"));
  AddMember(&status, "worker-1", "active");
  EXPECT_THAT(NotInYet(status, {"worker-1"}), IsEmpty());
}

TEST(WithoutChunksTest, NamesServersThatOwnNothing) {
  v1::Placement placement;
  for (const char* name : {"server-0", "server-1", "server-2"}) {
    placement.add_servers()->set_name(name);
  }
  for (const uint32_t owner : {0, 2, 0, 7}) {  // 7: of no server.
    placement.add_owner(owner);
  }
  EXPECT_THAT(WithoutChunks(placement, {"server-0", "server-2"}), IsEmpty());
  EXPECT_THAT(WithoutChunks(placement, {"server-1", "server-2", "server-3"}),
              ElementsAre("server-1 holds no chunk yet",
                          "server-3 holds no chunk yet"));
}

TEST(NotOutYetTest, IsOverWhenTheMemberIsGoneAndUnwanted) {
  v1::StatusReply status;
  status.add_wanted("worker-0");
  AddMember(&status, "worker-0", "active");
  AddMember(&status, "worker-1", "draining", "gradients of step 3");
  EXPECT_THAT(NotOutYet(status, {"worker-1"}),
              ElementsAre("worker-1 is draining (gradients of step 3)"));
  status.mutable_members(1)->set_state("gone");
  EXPECT_THAT(NotOutYet(status, {"worker-1"}), IsEmpty());
}

// A draining server that died still has chunks that must move.
TEST(NotOutYetTest, WhoIsAwayButWantedIsNotOut) {
  v1::StatusReply status;
  status.add_wanted("server-1");
  EXPECT_THAT(NotOutYet(status, {"server-1"}),
              ElementsAre("server-1 is away, and its part is needed"));
}

}  // namespace
}  // namespace ballast
