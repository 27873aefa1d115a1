// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/text_table.h"

#include <gtest/gtest.h>

#include <limits>

namespace ballast {
namespace {

TEST(TextTableTest, AlignsColumnsAndLeavesNoTrailingSpaces) {
  EXPECT_EQ(FormatTable({{"name", "bytes", "x"}, {"a", "12345"}, {"bb", "1"}},
                        {false, true}),
            "name  bytes  x\n"
            "a     12345\n"
            "bb        1\n");
  EXPECT_EQ(FormatTable({}), "");
}

TEST(TextTableTest, GroupsDigitsByThree) {
  EXPECT_EQ(WithCommas(0), "0");
  EXPECT_EQ(WithCommas(999), "999");
  EXPECT_EQ(WithCommas(1000), "1,000");
  EXPECT_EQ(WithCommas(1608960), "1,608,960");
  EXPECT_EQ(WithCommas(std::numeric_limits<uint64_t>::max()),
            "18,446,744,073,709,551,615");
}

TEST(TextTableTest, ShowsTwoUnitsOfTime) {
  EXPECT_EQ(FormatSpan(absl::Seconds(-3)), "0s");
  EXPECT_EQ(FormatSpan(absl::Seconds(59)), "59s");
  EXPECT_EQ(FormatSpan(absl::Seconds(60)), "1m00s");
  EXPECT_EQ(FormatSpan(absl::Seconds(3599)), "59m59s");
  EXPECT_EQ(FormatSpan(absl::Seconds(3720)), "1h02m");
}

TEST(TextTableTest, ARatioOverNothingIsNoNumber) {
  EXPECT_EQ(FormatRatio(9, 2), "4.50x");
  EXPECT_EQ(FormatRatio(9, 0), "-");
}

}  // namespace
}  // namespace ballast
