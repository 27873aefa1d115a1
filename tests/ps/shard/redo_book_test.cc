// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/redo_book.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace ballast {
namespace {

CheckpointEntry Base(uint32_t chunk, uint64_t timeline, uint64_t version) {
  CheckpointEntry entry;
  entry.chunk = chunk;
  entry.timeline = timeline;
  entry.version = version;
  entry.extent = {chunk * 4096, 4096};
  return entry;
}

VoteMark Mark(uint64_t timeline, uint64_t step,
              const std::vector<uint32_t>& chunks,
              const std::string& owner = "server-0") {
  VoteMark mark;
  mark.timeline = timeline;
  mark.step = step;
  mark.owner = owner;
  for (const uint32_t chunk : chunks) {
    mark.gradients.push_back({chunk, {timeline, step * 4096, 100}});
  }
  return mark;
}

uint64_t ReachOf(const RedoBook& book, uint32_t chunk) {
  return book.ReachOf(*book.Base(chunk)).step;
}

TEST(RedoBookTest, StepsCountInARowBehindTheBase) {
  RedoBook book;
  book.SetBase(Base(1, 1, 4));
  book.SetBase(Base(2, 1, 5));
  book.AddVote(Mark(1, 5, {2, 1}));
  EXPECT_EQ(ReachOf(book, 1), 5u);
  EXPECT_EQ(ReachOf(book, 2), 5u);
  book.AddVote(Mark(1, 7, {1, 2}));  // 6 is missing.
  EXPECT_EQ(ReachOf(book, 1), 5u);
  book.AddVote(Mark(1, 6, {1}));  // Of one chunk.
  EXPECT_EQ(ReachOf(book, 1), 7u);
  EXPECT_EQ(ReachOf(book, 2), 5u);
}

TEST(RedoBookTest, TheNewestTimelineCountsAndNothingOlderBehindIt) {
  RedoBook book;
  book.SetBase(Base(1, 1, 4));
  book.AddVote(Mark(1, 5, {1}));
  book.AddVote(Mark(1, 6, {1}));  // Abandoned: timeline 2 has a 5 of its own.
  book.AddVote(Mark(2, 5, {1}));
  const RedoBook::Reach reach = book.ReachOf(*book.Base(1));
  EXPECT_EQ(reach.step, 5u);
  EXPECT_EQ(reach.timeline, 2u);
  book.AddVote(Mark(2, 6, {1}));
  EXPECT_EQ(ReachOf(book, 1), 6u);
  // A base of the new timeline does not lead into the old one.
  book.SetBase(Base(2, 2, 4));
  book.AddVote(Mark(1, 5, {2}));
  EXPECT_EQ(ReachOf(book, 2), 4u);
}

TEST(RedoBookTest, AGradientIsFoundByTimelineAndStepAlone) {
  RedoBook book;
  book.AddVote(Mark(1, 5, {1}));
  ASSERT_NE(book.Gradient(1, 5, 1), nullptr);
  EXPECT_EQ(book.Gradient(1, 5, 1)->offset, 5u * 4096);
  EXPECT_EQ(book.Gradient(2, 5, 1), nullptr);
  EXPECT_EQ(book.Gradient(1, 6, 1), nullptr);
  EXPECT_EQ(book.Gradient(1, 5, 2), nullptr);
}

TEST(RedoBookTest, VotesOfOthersAreKeptApart) {
  RedoBook book;
  book.AddVote(Mark(1, 5, {1}));
  book.AddVote(Mark(1, 5, {2}, "server-1"));
  EXPECT_EQ(book.Vote(1, 5, "server-0")->gradients.size(), 1u);
  EXPECT_EQ(book.Vote(1, 5, "server-1")->gradients[0].first, 2u);
  EXPECT_EQ(book.Vote(1, 5, "server-2"), nullptr);
  EXPECT_NE(book.Gradient(1, 5, 2), nullptr);
}

TEST(RedoBookTest, DroppedStepsAreForgottenOfAllTimelines) {
  RedoBook book;
  book.AddVote(Mark(1, 5, {1}));
  book.AddVote(Mark(2, 5, {1}));
  book.AddVote(Mark(1, 6, {1}));
  book.DropThrough(5);
  EXPECT_EQ(book.Vote(1, 5, "server-0"), nullptr);
  EXPECT_EQ(book.Vote(2, 5, "server-0"), nullptr);
  EXPECT_NE(book.Vote(1, 6, "server-0"), nullptr);
}

TEST(RedoBookTest, AJoinNamesRangesOfEqualFigures) {
  RedoBook book;
  for (const uint32_t chunk : {0u, 1u, 2u, 5u}) {
    book.SetBase(Base(chunk, 1, 3));
  }
  book.SetBase(Base(4, 1, 4));
  book.AddVote(Mark(1, 4, {0, 1, 2, 4, 5}));
  v1::JoinRequest join;
  book.FillHeld(&join);
  ASSERT_EQ(join.held_size(), 2);
  EXPECT_EQ(join.held(0).version(), 3u);
  EXPECT_EQ(join.held(0).redoable(), 4u);
  ASSERT_EQ(join.held(0).chunks_size(), 2);
  EXPECT_EQ(join.held(0).chunks(0).first(), 0u);
  EXPECT_EQ(join.held(0).chunks(0).count(), 3u);
  EXPECT_EQ(join.held(0).chunks(1).first(), 5u);
  EXPECT_EQ(join.held(1).version(), 4u);
  EXPECT_EQ(join.held(1).chunks(0).first(), 4u);
}

}  // namespace
}  // namespace ballast
