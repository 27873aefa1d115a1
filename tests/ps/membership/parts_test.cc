// SPDX-License-Identifier: Apache-2.0
// The small collectors of the core: evaluation, checkpoints, hash, metrics.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/bytes.h"
#include "ps/membership/checkpoint_book.h"
#include "ps/membership/evaluation_pass.h"
#include "ps/membership/hash_collector.h"
#include "ps/membership/placement.h"
#include "ps/membership/step_metrics.h"
#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::ballast::testing::SmallLayout;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

v1::EvalResult Losses(uint64_t step,
                      std::initializer_list<std::pair<uint32_t, double>> all) {
  v1::EvalResult result;
  result.set_step(step);
  for (const auto& [micro_batch, loss] : all) {
    v1::MicroBatchLoss* entry = result.add_losses();
    entry->set_micro_batch(micro_batch);
    entry->set_loss_sum(loss);
  }
  return result;
}

TEST(EvaluationPassTest, DealsAllMicroBatchesAsNodes) {
  EvaluationPass pass(7, 10);
  pass.Begin(3, {21, 22});
  EXPECT_THAT(pass.SpansOf(21), ElementsAre(Span{0, 2}, Span{2, 1}));
  EXPECT_THAT(pass.SpansOf(22), ElementsAre(Span{3, 1}, Span{4, 3}));
  EXPECT_THAT(pass.SpansOf(23), IsEmpty());
}

TEST(EvaluationPassTest, MoreWorkersThanMicroBatchesLeaveSomeIdle) {
  EvaluationPass pass(1, 10);
  pass.Begin(3, {21, 22});
  EXPECT_THAT(pass.SpansOf(21), ElementsAre(Span{0, 1}));
  EXPECT_THAT(pass.SpansOf(22), IsEmpty());
  EXPECT_FALSE(pass.Owes(22));
}

TEST(EvaluationPassTest, TheOrderOfResultsChangesNoBit) {
  const double large = 1e16;
  EvaluationPass one(3, 1);
  one.Begin(1, {1});
  one.AddResult(Losses(1, {{0, large}, {1, 1.0}, {2, 1.0}}));
  EvaluationPass two(3, 1);
  two.Begin(1, {1, 2});
  two.AddResult(Losses(1, {{2, 1.0}}));
  two.AddResult(Losses(1, {{1, 1.0}, {0, large}}));
  ASSERT_TRUE(one.Done());
  ASSERT_TRUE(two.Done());
  EXPECT_EQ(one.Loss(), two.Loss());
}

TEST(EvaluationPassTest, IsTheMeanOverTokens) {
  EvaluationPass pass(2, 8);
  pass.Begin(1, {1});
  pass.AddResult(Losses(1, {{0, 8.0}, {1, 24.0}}));
  EXPECT_DOUBLE_EQ(pass.Loss(), 2.0);
}

TEST(EvaluationPassTest, IgnoresOtherVersionsRepeatsAndStrangers) {
  EvaluationPass pass(2, 1);
  pass.AddResult(Losses(0, {{0, 1.0}}));  // Nothing is evaluated yet.
  pass.Begin(5, {1});
  pass.AddResult(Losses(4, {{0, 1.0}, {1, 1.0}}));
  pass.AddResult(Losses(5, {{2, 9.0}}));
  EXPECT_FALSE(pass.Done());
  pass.AddResult(Losses(5, {{0, 1.0}}));
  pass.AddResult(Losses(5, {{0, 7.0}}));
  EXPECT_TRUE(pass.Owes(1));
  pass.AddResult(Losses(5, {{1, 1.0}}));
  EXPECT_FALSE(pass.Owes(1));
  EXPECT_DOUBLE_EQ(pass.Loss(), 1.0);
}

TEST(EvaluationPassTest, WhatADeadWorkerOwesIsDealtToTheOthers) {
  EvaluationPass pass(4, 1);
  pass.Begin(5, {1, 2, 3});
  pass.AddResult(Losses(5, {{2, 1.0}, {3, 1.0}}));
  pass.Remove(3);  // It had done its share.
  EXPECT_FALSE(pass.has_left());
  pass.Remove(2);
  EXPECT_TRUE(pass.has_left());
  pass.DealLeft({1});
  EXPECT_THAT(pass.SpansOf(1), ElementsAre(Span{0, 1}, Span{1, 1}));
  pass.Remove(1);
  pass.End();
  EXPECT_FALSE(pass.has_left());  // Nothing is evaluated any more.
}

class CheckpointBookTest : public ::testing::Test {
 protected:
  static v1::Decision DecisionOf(uint64_t step) {
    v1::Decision decision;
    decision.set_timeline(2);
    decision.set_step(step);
    decision.set_optimizer_step(step - 1);
    decision.set_samples_consumed(step * 16);
    return decision;
  }
  // A part with every chunk whose id has the remainder `server` by 2.
  v1::CheckpointSaved PartOf(uint32_t server, uint64_t step) const {
    v1::CheckpointSaved part;
    part.set_timeline(2);
    part.set_step(step);
    part.set_data_dir(server == 0 ? "/a" : "/b");
    for (const Chunk& chunk : table_.chunks()) {
      if (chunk.id % 2 == server) {
        v1::SavedRecord* record = part.add_records();
        record->set_chunk(chunk.id);
        record->set_timeline(1);
        record->set_version(step);
        record->set_extent_offset(4096 * chunk.id);
        record->set_extent_bytes(8192);
      }
    }
    return part;
  }
  // Chunk i belongs to server i % 2.
  std::vector<uint32_t> ByTwo() const {
    std::vector<uint32_t> owners;
    for (const Chunk& chunk : table_.chunks()) {
      owners.push_back(chunk.id % 2);
    }
    return owners;
  }
  const ChunkTable table_ = *ChunkTable::Build(SmallLayout(), kBlockElems);
  CheckpointBook book_{2, {}};
};

TEST_F(CheckpointBookTest, IsCompleteWhenEveryServerHasSaved) {
  book_.Expect(DecisionOf(4), ByTwo());
  ASSERT_TRUE(book_.AddPart(PartOf(0, 4)).ok());
  EXPECT_FALSE(book_.Owes(0, {2, 4}));
  EXPECT_TRUE(book_.Owes(1, {2, 4}));
  EXPECT_THAT(book_.OwedBy(1), ElementsAre(StepKey{2, 4}));
  EXPECT_FALSE(book_.TakeComplete(table_).has_value());
  ASSERT_TRUE(book_.AddPart(PartOf(1, 4)).ok());
  const auto manifest = book_.TakeComplete(table_);
  ASSERT_TRUE(manifest.has_value());
  EXPECT_EQ(manifest->step, 4u);
  EXPECT_EQ(manifest->timeline, 2u);
  EXPECT_EQ(manifest->optimizer_step, 3u);
  EXPECT_EQ(manifest->samples_consumed, 64u);
  EXPECT_THAT(manifest->directories, ElementsAre("/a", "/b"));
  ASSERT_EQ(manifest->records.size(), table_.chunks().size());
  const ManifestRecord& second = manifest->records[1];
  EXPECT_EQ(second.directory, 1u);
  EXPECT_EQ(second.extent, (Extent{4096, 8192}));
  EXPECT_EQ(second.begin, table_.chunk(1).begin);
  EXPECT_EQ(second.end, table_.chunk(1).end);
  // It is handed out once.
  EXPECT_FALSE(book_.TakeComplete(table_).has_value());
}

TEST_F(CheckpointBookTest, RepeatedAndUnaskedPartsChangeNothing) {
  book_.Expect(DecisionOf(4), ByTwo());
  ASSERT_TRUE(book_.AddPart(PartOf(0, 4)).ok());
  ASSERT_TRUE(book_.AddPart(v1::CheckpointSaved()).ok());
  ASSERT_TRUE(book_.AddPart(PartOf(0, 6)).ok());
  v1::CheckpointSaved again = PartOf(0, 4);
  again.set_data_dir("/elsewhere");
  ASSERT_TRUE(book_.AddPart(again).ok());
  EXPECT_FALSE(book_.TakeComplete(table_).has_value());
  ASSERT_TRUE(book_.AddPart(PartOf(1, 4)).ok());
  const auto manifest = book_.TakeComplete(table_);
  ASSERT_TRUE(manifest.has_value());
  EXPECT_EQ(manifest->records[0].directory, 0u);
  EXPECT_EQ(manifest->directories[0], "/a");
}

TEST_F(CheckpointBookTest, AServerThatOwnsNothingOwesNothing) {
  book_.Expect(DecisionOf(4), ByTwo());
  EXPECT_FALSE(book_.Owes(2, {2, 4}));
  EXPECT_THAT(book_.OwedBy(2), IsEmpty());
}

TEST_F(CheckpointBookTest, WhoeverSavedAChunkEndsTheWaitForIt) {
  // Chunks have moved since: both parts come from one server, in two pieces.
  book_.Expect(DecisionOf(4), ByTwo());
  v1::CheckpointSaved all = PartOf(0, 4);
  all.MergeFrom(PartOf(1, 4));
  all.set_data_dir("/a");
  ASSERT_TRUE(book_.AddPart(all).ok());
  const auto manifest = book_.TakeComplete(table_);
  ASSERT_TRUE(manifest.has_value());
  EXPECT_THAT(manifest->directories, ElementsAre("/a"));
}

TEST_F(CheckpointBookTest, AMissingRecordIsWaitedFor) {
  book_.Expect(DecisionOf(4), ByTwo());
  v1::CheckpointSaved missing = PartOf(1, 4);
  missing.mutable_records()->RemoveLast();
  ASSERT_TRUE(book_.AddPart(PartOf(0, 4)).ok());
  ASSERT_TRUE(book_.AddPart(missing).ok());
  EXPECT_TRUE(book_.Owes(1, {2, 4}));
  EXPECT_FALSE(book_.TakeComplete(table_).has_value());
}

TEST_F(CheckpointBookTest, RefusesAnUnknownAndAFutureRecord) {
  v1::CheckpointSaved unknown = PartOf(1, 4);
  unknown.mutable_records(0)->set_chunk(1000);
  v1::CheckpointSaved future = PartOf(1, 4);
  future.mutable_records(0)->set_version(5);
  v1::CheckpointSaved branch = PartOf(1, 4);
  branch.mutable_records(0)->set_timeline(3);
  for (const v1::CheckpointSaved& bad : {unknown, future, branch}) {
    CheckpointBook book(2, {});
    book.Expect(DecisionOf(4), ByTwo());
    const absl::Status status = book.AddPart(bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("chunk"));
    EXPECT_TRUE(book.Owes(1, {2, 4}));
  }
}

TEST_F(CheckpointBookTest, ANewerOneThatStandsEndsTheWaitForOlderOnes) {
  book_.Expect(DecisionOf(4), ByTwo());
  book_.Expect(DecisionOf(6), ByTwo());
  book_.Expect(DecisionOf(8), ByTwo());
  book_.Logged({2, 6}, "six");
  EXPECT_THAT(book_.Expected(), ElementsAre(StepKey{2, 8}));
  book_.Abandon({2, 8});
  EXPECT_THAT(book_.Expected(), IsEmpty());
  EXPECT_THAT(book_.Kept(), ElementsAre(StepKey{2, 6}));
}

TEST_F(CheckpointBookTest, DropsOlderOnesOnlyWhenANewerIsLogged) {
  CheckpointBook book(2, {{{1, 2}, "two"}, {{1, 4}, "four"}});
  book.Expect(DecisionOf(6), ByTwo());
  EXPECT_THAT(book.Kept(),
              ElementsAre(StepKey{1, 2}, StepKey{1, 4}, StepKey{2, 6}));
  EXPECT_THAT(book.Expected(), ElementsAre(StepKey{2, 6}));
  EXPECT_THAT(book.Logged({2, 6}, "six"), ElementsAre(StepKey{1, 2}));
  EXPECT_THAT(book.Kept(), ElementsAre(StepKey{1, 4}, StepKey{2, 6}));
  EXPECT_THAT(book.Expected(), IsEmpty());
  EXPECT_EQ(book.standing().rbegin()->second, "six");
}

class HashCollectorTest : public ::testing::Test {
 protected:
  // The hash when the state is cut into chunks of `chunk_elems`, reported in
  // two messages.
  static std::string HashOf(uint64_t chunk_elems, uint64_t salt = 0) {
    const ChunkTable table = *ChunkTable::Build(SmallLayout(), chunk_elems);
    HashCollector collector;
    collector.Begin(7, &table, 3);
    for (const uint32_t half : {0u, 1u}) {
      v1::StateDigests report;
      report.set_step(7);
      for (const Chunk& chunk : table.chunks()) {
        if (chunk.id % 2 == half) {
          *report.add_chunks() = DigestsOf(table, chunk, salt);
        }
      }
      EXPECT_FALSE(collector.Done());
      EXPECT_TRUE(collector.Add(report).ok());
    }
    EXPECT_TRUE(collector.Done());
    return collector.Hash();
  }
  static v1::ChunkDigests DigestsOf(const ChunkTable& table, const Chunk& chunk,
                                    uint64_t salt) {
    const uint64_t block = table.tensor_of(chunk.id).block_elems();
    ByteWriter writer;
    for (uint64_t field = 0; field < 3; ++field) {
      for (uint64_t at = chunk.begin; at < chunk.end; at += block) {
        writer.Put(uint64_t{chunk.tensor} * 100 + field);
        writer.Put(at / block + salt);
      }
    }
    v1::ChunkDigests digests;
    digests.set_chunk(chunk.id);
    digests.set_digests(writer.Take());
    return digests;
  }
};

TEST_F(HashCollectorTest, DoesNotDependOnTheSizeOfChunks) {
  const std::string hash = HashOf(kBlockElems);
  EXPECT_EQ(hash.size(), 32u);
  EXPECT_EQ(HashOf(2 * kBlockElems), hash);
  EXPECT_EQ(HashOf(1 << 20), hash);
  EXPECT_NE(HashOf(kBlockElems, 1), hash);
}

TEST_F(HashCollectorTest, RefusesAWrongLengthAndAnUnknownChunk) {
  const ChunkTable table = *ChunkTable::Build(SmallLayout(), kBlockElems);
  HashCollector collector;
  collector.Begin(7, &table, 3);
  v1::StateDigests report;
  report.set_step(7);
  *report.add_chunks() = DigestsOf(table, table.chunk(0), 0);
  report.mutable_chunks(0)->mutable_digests()->pop_back();
  EXPECT_EQ(collector.Add(report).code(), absl::StatusCode::kInvalidArgument);
  report.mutable_chunks(0)->set_chunk(1000);
  EXPECT_EQ(collector.Add(report).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(collector.HasChunk(0));
}

TEST_F(HashCollectorTest, IgnoresOtherVersionsAndRepeats) {
  const ChunkTable table = *ChunkTable::Build(SmallLayout(0), 1 << 20);
  HashCollector collector;
  v1::StateDigests report;
  report.set_step(6);
  *report.add_chunks() = DigestsOf(table, table.chunk(0), 0);
  EXPECT_TRUE(collector.Add(report).ok());
  EXPECT_FALSE(collector.Done());
  collector.Begin(7, &table, 3);
  EXPECT_TRUE(collector.Add(report).ok());
  EXPECT_FALSE(collector.Done());
  report.set_step(7);
  EXPECT_TRUE(collector.Add(report).ok());
  EXPECT_TRUE(collector.Add(report).ok());
  EXPECT_TRUE(collector.Done());
}

class MetricsCollectorTest : public ::testing::Test {
 protected:
  void Decide(uint64_t step, bool wants_hash = false) {
    v1::Decision decision;
    decision.set_step(step);
    metrics_.Decided(decision, absl::Seconds(2), {1, 2}, {8}, wants_hash, now_);
  }
  void Done(uint64_t worker, uint64_t step) {
    v1::WorkerDone done;
    done.set_step(step);
    done.set_pushed_bytes(10 * worker);
    done.set_forward_seconds(static_cast<double>(worker));
    done.set_minor_faults(worker);
    metrics_.WorkerDone(worker, done);
  }
  void Confirm(uint64_t step, uint64_t faults) {
    v1::Confirm confirm;
    confirm.set_step(step);
    confirm.set_update_seconds(0.5);
    metrics_.Confirmed(8, confirm, faults);
  }
  std::vector<uint64_t> Ready() {
    std::vector<uint64_t> steps;
    for (const StepMetrics& line : metrics_.TakeReady(now_)) {
      steps.push_back(line.decision.step());
      last_ = line;
    }
    return steps;
  }
  absl::Time now_ = absl::UnixEpoch();
  MetricsCollector metrics_;
  StepMetrics last_;
};

TEST_F(MetricsCollectorTest, ALineWaitsForWorkersAndServers) {
  Done(1, 1);
  Decide(1);
  Done(2, 1);
  EXPECT_THAT(Ready(), IsEmpty());
  Confirm(1, 100);
  EXPECT_THAT(Ready(), ElementsAre(1));
  EXPECT_EQ(last_.pushed_bytes, 30u);
  EXPECT_EQ(last_.forward_seconds, 2.0);
  EXPECT_EQ(last_.update_seconds, 0.5);
  EXPECT_EQ(last_.step_seconds, 2.0);
  EXPECT_EQ(last_.worker_faults, 3u);
  EXPECT_EQ(last_.server_faults, 0u);  // The first count is the base.
}

TEST_F(MetricsCollectorTest, ServerFaultsAreThoseSinceTheLastConfirm) {
  for (const uint64_t step : {1u, 2u}) {
    Decide(step);
    Done(1, step);
    Done(2, step);
    Confirm(step, 100 + 7 * step);
    EXPECT_THAT(Ready(), ElementsAre(step));
  }
  EXPECT_EQ(last_.server_faults, 7u);
}

TEST_F(MetricsCollectorTest, ReportsCountOnce) {
  Done(1, 1);
  Done(1, 1);
  Decide(1);
  Done(2, 1);
  Confirm(1, 0);
  Confirm(1, 50);
  EXPECT_THAT(Ready(), ElementsAre(1));
  EXPECT_EQ(last_.pushed_bytes, 30u);
  Done(1, 1);  // Late: the line is out.
  EXPECT_THAT(Ready(), IsEmpty());
}

TEST_F(MetricsCollectorTest, PatienceEndsAtItsBound) {
  Decide(1);
  now_ += MetricsCollector::kPatience - absl::Nanoseconds(1);
  EXPECT_THAT(Ready(), IsEmpty());
  now_ += absl::Nanoseconds(1);
  EXPECT_THAT(Ready(), ElementsAre(1));
}

TEST_F(MetricsCollectorTest, AHashIsAlwaysWaitedFor) {
  Decide(1, /*wants_hash=*/true);
  now_ += 2 * MetricsCollector::kPatience;
  EXPECT_THAT(Ready(), IsEmpty());
  metrics_.Hashed(1, "abc");
  EXPECT_THAT(Ready(), ElementsAre(1));
  EXPECT_EQ(last_.state_hash, "abc");
}

TEST_F(MetricsCollectorTest, ALaterReportEndsTheWaitForALostOne) {
  Decide(1);
  Confirm(1, 0);
  Done(1, 1);
  EXPECT_THAT(Ready(), IsEmpty());
  Done(2, 2);
  EXPECT_THAT(Ready(), ElementsAre(1));
  EXPECT_FALSE(last_.whole);
  EXPECT_EQ(last_.pushed_bytes, 10u);
}

TEST_F(MetricsCollectorTest, LinesComeInOrderWithoutGaps) {
  Decide(1);
  Decide(2);
  Done(1, 1);
  Done(1, 2);
  Done(2, 2);
  Confirm(1, 0);
  EXPECT_THAT(Ready(), ElementsAre(1));
  EXPECT_THAT(Ready(), IsEmpty());
  Confirm(2, 0);
  EXPECT_THAT(Ready(), ElementsAre(2));
  EXPECT_TRUE(last_.whole);
  EXPECT_EQ(metrics_.next_step(), 3u);
}

TEST_F(MetricsCollectorTest, NoLineWaitsForAMemberThatIsGone) {
  Decide(1);
  Confirm(1, 0);
  Done(1, 1);
  EXPECT_THAT(Ready(), IsEmpty());
  metrics_.Forget(2);
  EXPECT_THAT(Ready(), ElementsAre(1));
}

TEST_F(MetricsCollectorTest, GoingBackForgetsLinesBeyond) {
  Decide(1);
  Decide(2);
  metrics_.Restart(2);
  EXPECT_EQ(metrics_.next_step(), 2u);
  EXPECT_THAT(metrics_.TakeAll(), IsEmpty());
  Decide(2);
  EXPECT_EQ(metrics_.TakeAll().size(), 1u);
}

TEST_F(MetricsCollectorTest, TheEndTakesWhatIsCommittedOnly) {
  Decide(1);
  Done(1, 2);
  std::vector<StepMetrics> lines = metrics_.TakeAll();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].decision.step(), 1u);
}

}  // namespace
}  // namespace ballast
