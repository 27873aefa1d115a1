// SPDX-License-Identifier: Apache-2.0
#include "common/span.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <set>
#include <vector>

namespace ballast {
namespace {

using ::testing::ElementsAre;

constexpr uint32_t kTotalMax = 20;

// Every node of the tree below `node`, written from the definition.
void Collect(const Span& node, std::set<Span>* nodes) {
  nodes->insert(node);
  if (node.count == 1) {
    return;
  }
  uint32_t left = 1;
  while (left * 2 < node.count) {
    left *= 2;
  }
  Collect({node.first, left}, nodes);
  Collect({node.first + left, node.count - left}, nodes);
}

std::set<Span> Nodes(uint32_t total) {
  std::set<Span> nodes;
  Collect({0, total}, &nodes);
  return nodes;
}

TEST(SpanTest, SplitsAtTheLargestPowerOfTwoBelowTheLength) {
  EXPECT_EQ(LeftChild({0, 2}), (Span{0, 1}));
  EXPECT_EQ(LeftChild({0, 7}), (Span{0, 4}));
  EXPECT_EQ(LeftChild({0, 8}), (Span{0, 4}));
  EXPECT_EQ(LeftChild({0, 9}), (Span{0, 8}));
  EXPECT_EQ(RightChild({8, 7}), (Span{12, 3}));
  EXPECT_EQ(RightChild({0, 9}), (Span{8, 1}));
}

TEST(SpanTest, EveryTwoNodesAreNestedOrDisjoint) {
  for (uint32_t total = 1; total <= kTotalMax; ++total) {
    const std::set<Span> nodes = Nodes(total);
    ASSERT_EQ(nodes.size(), 2 * total - 1);
    for (const Span& a : nodes) {
      for (const Span& b : nodes) {
        const bool disjoint = a.end() <= b.first || b.end() <= a.first;
        EXPECT_TRUE(disjoint || a.Contains(b) || b.Contains(a));
      }
    }
  }
}

TEST(SpanTest, IsNodeHoldsForTheNodesAndNothingElse) {
  for (uint32_t total = 1; total <= kTotalMax; ++total) {
    const std::set<Span> nodes = Nodes(total);
    for (uint32_t first = 0; first <= total + 1; ++first) {
      for (uint32_t count = 0; count <= total + 1; ++count) {
        const Span span = {first, count};
        EXPECT_EQ(IsNode(span, total), nodes.count(span) == 1)
            << first << "+" << count << " of " << total;
      }
    }
  }
}

TEST(SpanTest, IsNodeRefusesSpansWhoseEndWrapsAround) {
  EXPECT_FALSE(IsNode({4, 0xfffffffeu}, 8));
  EXPECT_FALSE(IsNode({0xffffffffu, 1}, 8));
  EXPECT_FALSE(IsNode({0xffffffffu, 2}, 8));
  EXPECT_FALSE(IsNode({0, 1}, 0));
}

TEST(SpanTest, TheParentOfBothChildrenIsTheNode) {
  for (uint32_t total = 1; total <= kTotalMax; ++total) {
    EXPECT_EQ(Parent({0, total}, total), std::nullopt);
    for (const Span& node : Nodes(total)) {
      if (node.count > 1) {
        EXPECT_EQ(Parent(LeftChild(node), total), node);
        EXPECT_EQ(Parent(RightChild(node), total), node);
      }
    }
  }
}

// No shorter list of nodes can have the same union: every node of a minimal
// cover is maximal, that is, its parent is not inside the range.
TEST(SpanTest, CoverIsAscendingCompleteAndMinimal) {
  for (uint32_t total = 1; total <= kTotalMax; ++total) {
    for (uint32_t first = 0; first < total; ++first) {
      for (uint32_t count = 1; first + count <= total; ++count) {
        const Span range = {first, count};
        uint32_t next = first;
        for (const Span& node : Cover(range, total)) {
          EXPECT_EQ(node.first, next);
          EXPECT_TRUE(IsNode(node, total));
          const std::optional<Span> parent = Parent(node, total);
          EXPECT_TRUE(!parent || !range.Contains(*parent));
          next = node.end();
        }
        EXPECT_EQ(next, range.end());
      }
    }
  }
}

TEST(SpanTest, CoverOfAnEmptyRangeIsEmpty) {
  for (uint32_t first = 0; first <= 8; ++first) {
    EXPECT_TRUE(Cover({first, 0}, 8).empty()) << first;
  }
  EXPECT_TRUE(Cover({0, 1}, 0).empty());
}

TEST(SpanTest, ARunOfThreeInEightIsTwoNodes) {
  EXPECT_THAT(Cover({0, 3}, 8), ElementsAre(Span{0, 2}, Span{2, 1}));
  EXPECT_THAT(Cover({5, 3}, 8), ElementsAre(Span{5, 1}, Span{6, 2}));
}

TEST(SpanTest, DealGivesEveryMicroBatchOnceInRangesThatDifferByOne) {
  for (uint32_t total = 1; total <= kTotalMax; ++total) {
    for (uint32_t workers = 1; workers <= total; ++workers) {
      const std::vector<Span> ranges = DealSpans(total, workers);
      ASSERT_EQ(ranges.size(), workers);
      uint32_t next = 0;
      for (const Span& range : ranges) {
        EXPECT_EQ(range.first, next);
        EXPECT_GE(range.count, total / workers);
        EXPECT_LE(range.count, total / workers + 1);
        next = range.end();
      }
      EXPECT_EQ(next, total);
    }
  }
}

TEST(SpanDeathTest, DealRefusesMoreWorkersThanMicroBatches) {
  EXPECT_DEATH(DealSpans(3, 4), "check failed");
  EXPECT_DEATH(DealSpans(3, 0), "check failed");
}

}  // namespace
}  // namespace ballast
