// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/replica_source.h"

#include <gtest/gtest.h>

#include <deque>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace ballast {
namespace {

using Kind = ReplicaSource::Kind;
using Send = ReplicaSource::Send;
constexpr uint64_t kGradient = 100;

// Opens the wanted base at `version` and sends everything that may go.
std::vector<Send> SendAll(ReplicaSource* source, uint64_t version,
                          uint64_t record_bytes = 250) {
  std::vector<Send> sent;
  for (Send send = source->Next(); send.kind != Kind::kNothing;
       send = source->Next()) {
    if (send.kind == Kind::kOpenBase) {
      source->OnBase(send.chunk, version, record_bytes);
      continue;
    }
    sent.push_back(send);
  }
  return sent;
}

ReplicaSource Following(uint64_t version) {
  ReplicaSource source(100);
  source.Order({5});
  source.OnHello(1000, {});
  const std::vector<Send> sent = SendAll(&source, version);
  source.OnAck(sent.back().sequence, 250);
  return source;
}

TEST(ReplicaSourceTest, ABaseGoesInPiecesThenItsGradientsInOrder) {
  ReplicaSource source(100);
  source.Order({5});
  EXPECT_EQ(source.Next().kind, Kind::kNothing);  // No stream yet.
  source.OnHello(1000, {});
  source.OnGradient(5, 8, kGradient);
  source.OnGradient(5, 9, kGradient);
  const std::vector<Send> sent = SendAll(&source, 8);
  ASSERT_EQ(sent.size(), 4u);  // Step 8 is in the base.
  uint64_t offset = 0;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(sent[i].kind, Kind::kPiece);
    EXPECT_EQ(sent[i].chunk, 5u);
    EXPECT_EQ(sent[i].step, 8u);
    EXPECT_EQ(sent[i].offset, offset);
    offset += sent[i].bytes;
    EXPECT_EQ(sent[i].sequence, static_cast<uint64_t>(i + 1));
  }
  EXPECT_EQ(offset, 250u);
  EXPECT_EQ(sent[3].kind, Kind::kGradient);
  EXPECT_EQ(sent[3].step, 9u);
}

TEST(ReplicaSourceTest, OnlyWhatIsAcknowledgedIsInSync) {
  ReplicaSource source(100);
  source.Order({5, 7});
  source.OnHello(10000, {});
  source.OnGradient(5, 9, kGradient);
  const std::vector<Send> sent = SendAll(&source, 8);
  ASSERT_EQ(sent.size(), 7u);  // Pieces of 5, its gradient, pieces of 7.
  source.OnAck(2, 200);
  EXPECT_TRUE(source.InSync(8).empty());  // A piece is missing.
  source.OnAck(3, 50);
  EXPECT_EQ(source.InSync(8), std::vector<uint32_t>{5});
  EXPECT_TRUE(source.InSync(9).empty());
  EXPECT_TRUE(source.IsClose(9));
  source.OnAck(4, 100);
  EXPECT_EQ(source.InSync(9), std::vector<uint32_t>{5});
  EXPECT_FALSE(source.AllInSync(9));
  EXPECT_FALSE(source.IsClose(9));  // 7 has no base there yet.
  source.OnAck(7, 250);
  EXPECT_EQ(source.InSync(8), (std::vector<uint32_t>{5, 7}));
  EXPECT_TRUE(source.AllInSync(8));
  EXPECT_FALSE(source.AllInSync(9));
  EXPECT_EQ(source.unacknowledged_bytes(), 0u);
}

TEST(ReplicaSourceTest, PayloadsOnTheirWayStayWithinTheCredit) {
  ReplicaSource source(100);
  source.Order({5});
  source.OnHello(140, {});
  std::vector<Send> sent = SendAll(&source, 8);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(source.unacknowledged_bytes(), 100u);
  source.OnAck(1, 100);
  sent = SendAll(&source, 8);
  ASSERT_EQ(sent.size(), 1u);
  source.OnAck(2, 10);  // Exactly enough for the last 50.
  sent = SendAll(&source, 8);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].bytes, 50u);
}

TEST(ReplicaSourceTest, AGradientThatIsGoneBeginsTheCopyAgain) {
  ReplicaSource source = Following(8);
  source.OnGradient(5, 9, kGradient);
  source.OnDropped(8);  // Nothing that it needs.
  EXPECT_EQ(source.InSync(8), std::vector<uint32_t>{5});
  source.OnDropped(9);
  EXPECT_TRUE(source.InSync(8).empty());
  const std::vector<Send> sent = SendAll(&source, 9);
  ASSERT_FALSE(sent.empty());
  EXPECT_EQ(sent[0].kind, Kind::kPiece);
  EXPECT_EQ(sent[0].step, 9u);
}

TEST(ReplicaSourceTest, AnAckOfARefusedOrForgottenCopyDoesNotCount) {
  ReplicaSource source(100);
  source.Order({5});
  source.OnHello(1000, {});
  const std::vector<Send> first = SendAll(&source, 8);
  source.OnRefused(first[0].sequence);
  const std::vector<Send> second = SendAll(&source, 9);
  ASSERT_EQ(second.size(), 3u);
  source.OnAck(first.back().sequence, 250);
  EXPECT_TRUE(source.InSync(0).empty());
  source.OnRefused(second[0].sequence + 100);  // Nothing that was sent.
  source.OnAck(second.back().sequence, 250);
  EXPECT_EQ(source.InSync(9), std::vector<uint32_t>{5});

  source.Order({});
  source.Order({5});
  EXPECT_TRUE(source.InSync(0).empty());
  const std::vector<Send> third = SendAll(&source, 9);
  source.Order({});
  source.Order({5});
  source.OnAck(third.back().sequence, 250);
  EXPECT_TRUE(source.InSync(0).empty());
}

// Basis: a copy waited for ever for the gradient of a vote that an earlier life
// had given, of which nobody told.
TEST(ReplicaSourceTest, ACopyThatNobodyTellsOfItsGradientBeginsAgain) {
  ReplicaSource source = Following(8);
  source.OnComplete(8);
  EXPECT_EQ(source.InSync(8), std::vector<uint32_t>{5});
  source.OnGradient(5, 9, kGradient);
  source.OnComplete(9);  // It is on its way.
  EXPECT_EQ(source.InSync(8), std::vector<uint32_t>{5});
  source.OnGradient(5, 11, kGradient);
  EXPECT_EQ(SendAll(&source, 9).size(), 1u);
  source.OnComplete(10);
  EXPECT_TRUE(source.InSync(8).empty());
}

TEST(ReplicaSourceTest, AWithdrawnGradientGivesItsCreditBack) {
  ReplicaSource source = Following(8);
  source.OnGradient(5, 9, kGradient);
  const std::vector<Send> sent = SendAll(&source, 8);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(source.unacknowledged_bytes(), kGradient);
  source.Withdraw(sent[0].sequence);
  EXPECT_EQ(source.unacknowledged_bytes(), 0u);
  EXPECT_TRUE(source.InSync(8).empty());
  const std::vector<Send> again = SendAll(&source, 9, 1000);
  ASSERT_EQ(again.size(), 10u);  // The whole credit of 1000 is there.
  EXPECT_GT(again[0].sequence, sent[0].sequence);
}

TEST(ReplicaSourceTest, ABrokenStreamGoesOnFromWhatTheTargetHas) {
  ReplicaSource source = Following(8);
  source.OnGradient(5, 9, kGradient);
  source.OnGradient(5, 10, kGradient);
  EXPECT_EQ(SendAll(&source, 8).size(), 2u);
  source.OnReset();
  EXPECT_EQ(source.Next().kind, Kind::kNothing);
  source.OnHello(1000, {{5, 9}, {6, 1}});
  EXPECT_EQ(source.InSync(9), std::vector<uint32_t>{5});
  const std::vector<Send> sent = SendAll(&source, 8);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].kind, Kind::kGradient);
  EXPECT_EQ(sent[0].step, 10u);
  EXPECT_EQ(sent[0].sequence, 1u);
}

TEST(ReplicaSourceTest, ACopyThatTheGradientsCannotReachBeginsAgain) {
  ReplicaSource source = Following(8);
  source.OnReset();
  source.OnDropped(9);
  source.OnGradient(5, 10, kGradient);
  source.OnHello(1000, {{5, 8}});  // 9 is missing.
  std::vector<Send> sent = SendAll(&source, 9);
  ASSERT_FALSE(sent.empty());
  EXPECT_EQ(sent[0].kind, Kind::kPiece);

  ReplicaSource other = Following(8);
  other.OnReset();
  other.OnDropped(9);
  other.OnHello(1000, {{5, 8}});  // None at hand, and 9 was.
  sent = SendAll(&other, 9);
  ASSERT_FALSE(sent.empty());
  EXPECT_EQ(sent[0].kind, Kind::kPiece);
}

TEST(ReplicaSourceTest, AMarkGoesBehindEveryGradientOfItsStep) {
  ReplicaSource source(100);
  source.Order({5, 7});
  source.OnHello(10000, {});
  std::vector<Send> sent = SendAll(&source, 8);
  source.OnAck(sent.back().sequence, 500);
  source.OnGradient(5, 9, kGradient);
  source.OnVote(9, 30);
  sent = SendAll(&source, 8);
  ASSERT_EQ(sent.size(), 1u);  // That of 7 is missing.
  source.OnGradient(7, 9, kGradient);
  sent = SendAll(&source, 8);
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[0].kind, Kind::kGradient);
  EXPECT_EQ(sent[1].kind, Kind::kMark);
  EXPECT_EQ(sent[1].step, 9u);
  EXPECT_FALSE(source.MarkSynced(9));
  source.OnAck(sent[0].sequence, 200);
  EXPECT_FALSE(source.MarkSynced(9));
  source.OnReset();  // It is sent again on the next stream.
  source.OnHello(10000, {{5, 9}, {7, 9}});
  sent = SendAll(&source, 8);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].kind, Kind::kMark);
  source.OnAck(sent[0].sequence, 30);
  EXPECT_TRUE(source.MarkSynced(9));
  EXPECT_TRUE(SendAll(&source, 8).empty());  // Once.
}

// A target that takes messages in order, syncs them some time later and may
// lose its stream at any moment; it refuses what it cannot use. What the source
// calls in sync must be synced there, whatever happens.
class ModelTarget {
 public:
  void Take(const Send& send, ReplicaSource* source) {
    pending_.push_back(send);
    if (send.kind == Kind::kPiece) {
      Assembly& assembly = assemblies_[send.chunk];
      if (send.offset == 0) {
        assembly = {send.step, 0};
      }
      ASSERT_EQ(assembly.bytes, send.offset);
      ASSERT_EQ(assembly.version, send.step);
      assembly.bytes += send.bytes;
    } else if (send.kind == Kind::kGradient) {
      const auto found = received_.find(send.chunk);
      const auto assembly = assemblies_.find(send.chunk);
      const uint64_t reached = std::max(
          found == received_.end() ? 0 : found->second,
          assembly == assemblies_.end() ? 0 : assembly->second.version);
      if (send.step > reached + 1) {
        source->OnRefused(send.sequence);
        pending_.back().bytes = ~uint64_t{0};
        return;
      }
    }
    if (send.kind == Kind::kGradient) {
      received_[send.chunk] = std::max(received_[send.chunk], send.step);
    }
  }
  // Syncs the first `count` of what it took and acknowledges them.
  void Sync(size_t count, ReplicaSource* source) {
    uint64_t sequence = 0;
    uint64_t credit = 0;
    for (; count > 0 && !pending_.empty(); --count) {
      const Send send = pending_.front();
      pending_.pop_front();
      sequence = send.sequence;
      credit += send.bytes == ~uint64_t{0} ? kGradient : send.bytes;
      if (send.kind == Kind::kPiece) {
        if (send.offset + send.bytes == kRecord) {
          synced_[send.chunk] = std::max(synced_[send.chunk], send.step);
          received_[send.chunk] = std::max(received_[send.chunk], send.step);
        }
      } else if (send.bytes != ~uint64_t{0}) {
        synced_[send.chunk] = std::max(synced_[send.chunk], send.step);
      }
    }
    if (sequence > 0) {
      source->OnAck(sequence, credit);
    }
  }
  void Break() {
    pending_.clear();
    assemblies_.clear();
    received_ = synced_;
  }
  void Die() {
    Break();
    synced_.clear();
    received_.clear();
  }
  const std::map<uint32_t, uint64_t>& synced() const { return synced_; }
  static constexpr uint64_t kRecord = 250;

 private:
  struct Assembly {
    uint64_t version = 0;
    uint64_t bytes = 0;
  };
  std::deque<Send> pending_;
  std::map<uint32_t, Assembly> assemblies_;
  std::map<uint32_t, uint64_t> received_;  // Through this step.
  std::map<uint32_t, uint64_t> synced_;
};

TEST(ReplicaSourceTest, WhatItCallsInSyncIsSyncedWhateverHappens) {
  const unsigned seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  const std::set<uint32_t> all = {1, 2, 3};
  for (int round = 0; round < 300; ++round) {
    ReplicaSource source(100);
    ModelTarget target;
    source.Order(all);
    uint64_t version = 5;
    std::set<uint32_t> complete;  // Of version + 1.
    source.OnHello(400, {});
    uint32_t in_sync = 0;
    for (int event = 0; event < 400; ++event) {
      switch (random() % 8) {
        case 0: {  // A gradient is complete.
          const auto chunk = static_cast<uint32_t>(1 + random() % 3);
          if (complete.insert(chunk).second) {
            source.OnGradient(chunk, version + 1, kGradient);
          }
          break;
        }
        case 1:  // The step is decided, and an old gradient given up.
          if (complete.size() == 3) {
            ++version;
            complete.clear();
            if (random() % 2 == 0) {
              source.OnDropped(version - random() % 2);
            }
          }
          break;
        case 2:
          if (random() % 10 == 0) {
            target.Break();
            source.OnReset();
            source.OnHello(400, target.synced());
          } else if (random() % 20 == 0) {
            target.Die();
            source.OnReset();
            source.OnHello(400, {});
          }
          break;
        case 3:
        case 4:
          target.Sync(random() % 4, &source);
          break;
        default: {
          const Send send = source.Next();
          if (send.kind == Kind::kOpenBase) {
            source.OnBase(send.chunk, version, ModelTarget::kRecord);
          } else if (send.kind != Kind::kNothing) {
            target.Take(send, &source);
          }
        }
      }
      for (const uint32_t chunk : source.InSync(version)) {
        ASSERT_TRUE(target.synced().contains(chunk)) << "seed " << seed;
        ASSERT_GE(target.synced().at(chunk), version) << "seed " << seed;
        ++in_sync;
      }
      ASSERT_LE(source.unacknowledged_bytes(), 400u);
    }
    // Left alone, it gets there.
    for (int i = 0; i < 200 && !source.AllInSync(version); ++i) {
      const Send send = source.Next();
      if (send.kind == Kind::kOpenBase) {
        source.OnBase(send.chunk, version, ModelTarget::kRecord);
      } else if (send.kind != Kind::kNothing) {
        target.Take(send, &source);
      } else {
        target.Sync(100, &source);
      }
    }
    ASSERT_TRUE(source.AllInSync(version)) << "seed " << seed << " " << in_sync;
  }
}

}  // namespace
}  // namespace ballast
