// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/shard_query.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "storage/record.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

v1::Placement TwoServers() {
  ModelLayout layout;
  TensorSpec wide;
  wide.name = "wide";
  wide.shape = {3, kBlockElems};
  TensorSpec small;
  small.name = "small";
  small.shape = {5};
  layout.tensors = {wide, small};
  layout.units = {{"all", {{0, 0}, {1, 0}}}};
  v1::Placement placement;
  placement.set_layout(layout.Encode());
  placement.set_chunk_elems(kBlockElems);
  placement.set_optimizer("adamw");
  placement.add_servers()->set_name("server-0");
  placement.add_servers()->set_name("server-1");
  for (const uint32_t owner : {0, 1, 0, 1}) {
    placement.add_owner(owner);
  }
  return placement;
}

TEST(ParseSliceTest, ReadsBothEndsOrTheWholeTensor) {
  EXPECT_EQ(*ParseSlice("", 10), (ElementSlice{0, 10}));
  EXPECT_EQ(*ParseSlice("0:4", 10), (ElementSlice{0, 4}));
  EXPECT_EQ(*ParseSlice("3:", 10), (ElementSlice{3, 10}));
  EXPECT_EQ(*ParseSlice(":10", 10), (ElementSlice{0, 10}));
  EXPECT_EQ(*ParseSlice(":", 10), (ElementSlice{0, 10}));
}

TEST(ParseSliceTest, RefusesWhatIsNoSliceOfTheTensor) {
  for (const char* text : {"4", "a:b", "-1:3", "1:2:3", "1.0:2"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseSlice(text, 10).status())) << text;
  }
  for (const char* text : {"4:4", "5:4", "0:11", "10:"}) {
    EXPECT_TRUE(absl::IsOutOfRange(ParseSlice(text, 10).status())) << text;
  }
}

TEST(ShardMapTest, FindsTensorsAndOwners) {
  const auto map = ShardMap::FromPlacement(TwoServers());
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(*map->FindTensor("small"), 1u);
  EXPECT_EQ(map->owner(1).name(), "server-1");
  EXPECT_EQ(map->owner(2).name(), "server-0");
  const absl::Status missing = map->FindTensor("smal").status();
  EXPECT_TRUE(absl::IsNotFound(missing));
  EXPECT_THAT(std::string(missing.message()), HasSubstr("no tensor smal"));
}

TEST(ShardMapTest, RefusesAPlacementThatDoesNotFitItsLayout) {
  v1::Placement placement = TwoServers();
  placement.add_owner(0);
  EXPECT_TRUE(absl::IsDataLoss(ShardMap::FromPlacement(placement).status()));
  placement = TwoServers();
  placement.set_owner(3, 2);
  EXPECT_TRUE(absl::IsDataLoss(ShardMap::FromPlacement(placement).status()));
  placement = TwoServers();
  placement.set_layout("nonsense");
  EXPECT_FALSE(ShardMap::FromPlacement(placement).ok());
}

TEST(FieldNumberTest, KnowsTheFieldsOfEachOptimizer) {
  EXPECT_EQ(*FieldNumber("param", "adamw"), uint8_t(Field::kParam));
  EXPECT_EQ(*FieldNumber("exp_avg", "adamw"), uint8_t(Field::kSlot0));
  EXPECT_EQ(*FieldNumber("exp_avg_sq", "adamw"), uint8_t(Field::kSlot1));
  EXPECT_EQ(*FieldNumber("momentum_buffer", "sgd"), uint8_t(Field::kSlot0));
  for (const auto& [name, optimizer] :
       {std::pair{"momentum_buffer", "adamw"}, std::pair{"exp_avg_sq", "sgd"},
        std::pair{"served", "adamw"}, std::pair{"", "sgd"}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(FieldNumber(name, optimizer).status()))
        << name;
  }
}

}  // namespace
}  // namespace ballast
