// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/span_book.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

SpanKey Key(uint32_t first, uint32_t count, uint32_t use = 0) {
  return {use, {first, count}};
}

TEST(SpanBookTest, ASpanInsideOneThatIsThereIsKnown) {
  SpanBook book(8, 1);
  book.Insert(Key(0, 4), std::nullopt);
  EXPECT_TRUE(book.IsKnown(Key(0, 4)));
  EXPECT_TRUE(book.IsKnown(Key(2, 2)));
  EXPECT_TRUE(book.IsKnown(Key(3, 1)));
  EXPECT_FALSE(book.IsKnown(Key(4, 1)));
  EXPECT_FALSE(book.IsKnown(Key(0, 8)));
}

TEST(SpanBookTest, ASpanThatContainsOthersReplacesThem) {
  SpanBook book(8, 1);
  book.Insert(Key(1, 1), std::nullopt);
  book.Insert(Key(2, 2), std::nullopt);
  book.Insert(Key(5, 1), std::nullopt);
  EXPECT_THAT(book.Insert(Key(0, 4), std::nullopt),
              ElementsAre(Key(1, 1), Key(2, 2)));
  EXPECT_THAT(book.Nodes(), ElementsAre(Key(0, 4), Key(5, 1)));
}

TEST(SpanBookTest, OnlySiblingsAreAdded) {
  SpanBook book(8, 1);
  book.Insert(Key(1, 1), std::nullopt);
  book.Insert(Key(2, 1), std::nullopt);  // Neighbours, of two parents.
  EXPECT_FALSE(book.NextMerge().has_value());
  book.Insert(Key(3, 1), std::nullopt);
  const auto merge = book.NextMerge();
  ASSERT_TRUE(merge.has_value());
  EXPECT_EQ(merge->left, Key(2, 1));
  EXPECT_EQ(merge->right, Key(3, 1));
  EXPECT_EQ(merge->sum, Key(2, 2));
}

TEST(SpanBookTest, UsesAreAddedInTheOrderOfTheirNumbers) {
  SpanBook book(2, 3);
  book.Insert(Key(0, 2, 2), std::nullopt);
  book.Insert(Key(0, 2, 1), std::nullopt);
  EXPECT_FALSE(book.NextMerge().has_value());
  book.Insert(Key(0, 2, 0), std::nullopt);
  auto merge = book.NextMerge();
  ASSERT_TRUE(merge.has_value());
  EXPECT_EQ(merge->right, Key(0, 2, 1));
  book.Merged(*merge);
  EXPECT_FALSE(book.IsComplete());
  EXPECT_TRUE(book.IsKnown(Key(1, 1, 1)));
  EXPECT_FALSE(book.Contains(Key(0, 2, 1)));
  merge = book.NextMerge();
  ASSERT_TRUE(merge.has_value());
  EXPECT_EQ(merge->right, Key(0, 2, 2));
  book.Merged(*merge);
  EXPECT_TRUE(book.IsComplete());
  EXPECT_THAT(book.Nodes(), ElementsAre(book.RootKey()));
}

TEST(SpanBookTest, AWholeSpanOfTheOnlyUseIsComplete) {
  SpanBook book(5, 1);
  EXPECT_FALSE(book.IsComplete());
  EXPECT_THAT(book.Insert(Key(0, 5), 2.5), IsEmpty());
  EXPECT_TRUE(book.IsComplete());
  EXPECT_EQ(book.Loss(), 2.5);
}

TEST(SpanBookTest, TheLossOfOneUseSurvivesTheOthers) {
  SpanBook book(1, 2);
  book.Insert(Key(0, 1, 1), 7.0);
  book.Insert(Key(0, 1, 0), std::nullopt);
  EXPECT_FALSE(book.Loss().has_value());
  book.Merged(*book.NextMerge());
  EXPECT_EQ(book.Loss(), 7.0);
}

std::string LeafSum(const Span& node, uint32_t use) {
  if (node.count == 1) {
    return absl::StrCat(use, ":", node.first);
  }
  return absl::StrCat("(", LeafSum(LeftChild(node), use), "+",
                      LeafSum(RightChild(node), use), ")");
}

void Nodes(const Span& node, std::vector<Span>* out) {
  out->push_back(node);
  if (node.count > 1) {
    Nodes(LeftChild(node), out);
    Nodes(RightChild(node), out);
  }
}

// Every node of the tree in any order, twice: the formula of the sum is the
// tree's, whatever replaced or contained whatever.
TEST(SpanBookTest, AnyOrderOfAnySpansGivesOneFormula) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 300; ++round) {
    const auto total = static_cast<uint32_t>(1 + random() % 9);
    const auto uses = static_cast<uint32_t>(1 + random() % 3);
    std::vector<Span> spans;
    Nodes({0, total}, &spans);
    std::vector<SpanKey> arrivals;
    for (uint32_t use = 0; use < uses; ++use) {
      for (const Span& span : spans) {
        arrivals.insert(arrivals.end(), 2, SpanKey{use, span});
      }
    }
    std::shuffle(arrivals.begin(), arrivals.end(), random);
    SpanBook book(total, uses);
    std::map<SpanKey, std::string> formulas;
    for (const SpanKey& key : arrivals) {
      if (book.IsKnown(key)) {
        continue;
      }
      for (const SpanKey& replaced : book.Insert(key, std::nullopt)) {
        EXPECT_EQ(formulas.erase(replaced), 1u);
      }
      formulas[key] = LeafSum(key.span, key.use);
      while (const auto merge = book.NextMerge()) {
        std::string sum = absl::StrCat("(", formulas.at(merge->left), "+",
                                       formulas.at(merge->right), ")");
        book.Merged(*merge);
        formulas.erase(merge->left);
        formulas.erase(merge->right);
        formulas[merge->sum] = std::move(sum);
      }
    }
    std::string want = LeafSum({0, total}, 0);
    for (uint32_t use = 1; use < uses; ++use) {
      want = absl::StrCat("(", want, "+", LeafSum({0, total}, use), ")");
    }
    ASSERT_TRUE(book.IsComplete());
    EXPECT_EQ(formulas.at(book.RootKey()), want);
  }
}

}  // namespace
}  // namespace ballast
