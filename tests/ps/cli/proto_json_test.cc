// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/proto_json.h"

#include <gtest/gtest.h>

#include <cmath>

#include "proto/ballast.pb.h"

namespace ballast {
namespace {

TEST(ProtoJsonTest, KeepsLargeIntegersAsNumbers) {
  v1::StatusReply status;
  status.set_step(uint64_t{1} << 53);
  const auto json = MessageToJson(status);
  EXPECT_EQ(json["step"].dump(), "9007199254740992");
}

TEST(ProtoJsonTest, NamesEveryFieldAlsoWhenItIsEmpty) {
  const auto json = MessageToJson(v1::StatusReply());
  for (const char* key : {"run_name", "phase", "step", "steps", "last",
                          "members", "validation_loss", "failure"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_TRUE(json["members"].is_array());
  EXPECT_EQ(json["last"]["grad_norm_clipped"], 0.0);
}

TEST(ProtoJsonTest, WhatIsNoNumberInJsonIsNull) {
  v1::StatusReply status;
  status.set_validation_loss(NAN);
  status.mutable_last()->set_loss(INFINITY);
  const auto json = MessageToJson(status);
  EXPECT_TRUE(json["validation_loss"].is_null());
  EXPECT_TRUE(json["last"]["loss"].is_null());
}

TEST(ProtoJsonTest, RepeatsMessagesNamesEnumsAndDropsBytes) {
  v1::StatusReply status;
  status.add_members()->set_role(v1::ROLE_SERVER);
  status.add_members()->mutable_stats()->set_waits_for("server-1");
  const auto json = MessageToJson(status);
  ASSERT_EQ(json["members"].size(), 2u);
  EXPECT_EQ(json["members"][0]["role"], "ROLE_SERVER");
  EXPECT_EQ(json["members"][1]["stats"]["waits_for"], "server-1");
  EXPECT_FALSE(MessageToJson(v1::Placement()).contains("layout"));
}

}  // namespace
}  // namespace ballast
