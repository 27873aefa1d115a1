// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/fault_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

v1::Fault Fault(const std::string& member, double seconds,
                const std::string& kind = "killed") {
  v1::Fault fault;
  fault.set_member(member);
  fault.set_kind(kind);
  fault.set_step(12);
  fault.set_recovered_seconds(seconds);
  fault.set_detail("signal 9");
  return fault;
}

TEST(FaultTableTest, WithoutFaultsThereIsNone) {
  EXPECT_EQ(FaultTable({}), "");
  EXPECT_EQ(FaultList({}, 10), "");
}

TEST(FaultTableTest, SaysLeastMedianAndMostByRole) {
  EXPECT_EQ(FaultTable({Fault("worker-1", 0.5), Fault("coordinator", 1.25),
                        Fault("worker-10", 0.25), Fault("worker-0", 2)}),
            "faults       count  min s  median s  max s  from the notice to "
            "the next committed step\n"
            "coordinator      1   1.25      1.25   1.25\n"
            "worker           3   0.25      0.50   2.00\n");
}

TEST(FaultTableTest, TheMedianOfAnEvenNumberIsInTheMiddle) {
  EXPECT_THAT(FaultTable({Fault("server-0", 4), Fault("server-0", 1),
                          Fault("server-0", 2), Fault("server-0", 3)}),
              HasSubstr("   1.00      2.50   4.00"));
}

TEST(FaultTableTest, CountsWhatHasNotRecoveredApart) {
  EXPECT_THAT(FaultTable({Fault("server-0", -1), Fault("server-0", 0)}),
              HasSubstr("server      2   0.00      0.00   0.00  1 without a "
                        "step since"));
  EXPECT_THAT(FaultTable({Fault("server-0", -1)}),
              HasSubstr("server      1      -         -      -  1 without a "
                        "step since"));
}

TEST(FaultListTest, ShowsTheNewestAndCountsTheRest) {
  const std::vector<v1::Fault> faults = {Fault("worker-0", 1),
                                         Fault("server-1", 0.5, "stuck"),
                                         Fault("coordinator", -1)};
  const std::string all = FaultList(faults, 3);
  EXPECT_THAT(all, HasSubstr("worker-0"));
  EXPECT_THAT(all, HasSubstr("stuck"));
  EXPECT_THAT(all, HasSubstr("0.50 s later"));
  EXPECT_THAT(all, HasSubstr("not yet"));
  EXPECT_THAT(all, HasSubstr("signal 9"));
  EXPECT_THAT(all, Not(HasSubstr("before them")));
  const std::string two = FaultList(faults, 2);
  EXPECT_THAT(two, Not(HasSubstr("worker-0")));
  EXPECT_THAT(two, HasSubstr("and 1 before them"));
}

}  // namespace
}  // namespace ballast
