// SPDX-License-Identifier: Apache-2.0
#include "rpc/coordinator_addresses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace ballast {
namespace {

using ::testing::HasSubstr;

CoordinatorAddresses Parsed(absl::string_view list) {
  return CoordinatorAddresses::Parse(list).value();
}

TEST(CoordinatorAddressesTest, OneAddressIsAskedAgainAndAgain) {
  CoordinatorAddresses addresses = Parsed("127.0.0.1:7400");
  EXPECT_EQ(addresses.current(), "127.0.0.1:7400");
  addresses.Failed("127.0.0.1:7400", absl::UnavailableError("refused"));
  EXPECT_EQ(addresses.current(), "127.0.0.1:7400");
}

TEST(CoordinatorAddressesTest, SeveralAreAskedInTurn) {
  CoordinatorAddresses addresses = Parsed("a:1,b:2,c:3");
  const absl::Status refused = absl::UnavailableError("refused");
  for (const char* next : {"b:2", "c:3", "a:1"}) {
    addresses.Failed(addresses.current(), refused);
    EXPECT_EQ(addresses.current(), next);
  }
  EXPECT_EQ(addresses.list(), "a:1,b:2,c:3");
}

TEST(CoordinatorAddressesTest, TwoCallersThatFailAtOnceMoveOnOnce) {
  CoordinatorAddresses addresses = Parsed("a:1,b:2,c:3");
  addresses.Failed("a:1", absl::UnavailableError("refused"));
  addresses.Failed("a:1", absl::UnavailableError("refused"));
  EXPECT_EQ(addresses.current(), "b:2");
}

TEST(CoordinatorAddressesTest, AStandbyNamesTheLeaderEvenAnUnknownOne) {
  CoordinatorAddresses addresses = Parsed("a:1,b:2,c:3");
  addresses.Failed("a:1", absl::UnavailableError("standby; leader is c:3"));
  EXPECT_EQ(addresses.current(), "c:3");
  addresses.Failed("c:3",
                   absl::UnavailableError("standby; leader is 10.0.0.9:7400"));
  EXPECT_EQ(addresses.current(), "10.0.0.9:7400");
  addresses.Failed("10.0.0.9:7400", absl::UnavailableError("refused"));
  EXPECT_EQ(addresses.current(), "a:1");
}

TEST(CoordinatorAddressesTest, AStandbyThatKnowsNoLeaderIsPassedBy) {
  CoordinatorAddresses addresses = Parsed("a:1,b:2");
  for (const char* message :
       {"standby; leader is unknown", "standby; leader is ",
        "standby; leader is a:1", "standby; leader is a:99999"}) {
    const std::string before = addresses.current();
    addresses.Failed("a:1", absl::UnavailableError(message));
    EXPECT_EQ(addresses.current(), "b:2") << message;
    addresses.Failed("b:2", absl::UnavailableError("refused"));
    EXPECT_EQ(addresses.current(), before);
  }
}

TEST(CoordinatorAddressesTest, WhatIsNoAddressIsRefusedByName) {
  for (const char* list :
       {"", "host", ":7400", "host:", "host:0", "host:65536", "a:1,,b:2"}) {
    const auto addresses = CoordinatorAddresses::Parse(list);
    EXPECT_EQ(addresses.status().code(), absl::StatusCode::kInvalidArgument)
        << list;
  }
  EXPECT_THAT(
      std::string(CoordinatorAddresses::Parse("a:1,b").status().message()),
      HasSubstr("'b'; want host:port"));
}

}  // namespace
}  // namespace ballast
