// SPDX-License-Identifier: Apache-2.0
// Chunks that move between engines in the middle of training, with bits as if
// they had stayed, whoever dies meanwhile.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/ps/shard/engine_cluster.h"

namespace ballast::testing {
namespace {

// By chunk, of a run in which nothing moves and nobody dies.
std::map<uint32_t, std::string> Undisturbed(uint64_t step) {
  EngineClusterOptions options;
  options.servers = 1;
  EngineCluster cluster(options);
  cluster.TrainThrough(step);
  return cluster.State();
}

std::vector<uint32_t> ChunksOf(const EngineCluster& cluster, uint32_t server) {
  std::vector<uint32_t> chunks;
  for (uint32_t i = 0; i < cluster.owner().size(); ++i) {
    if (cluster.owner()[i] == server) {
      chunks.push_back(i);
    }
  }
  return chunks;
}

TEST(EngineMovesTest, AServerIsEmptiedAndANewOneFilledWithTheSameBits) {
  const auto want = Undisturbed(8);
  for (const Durability durability :
       {Durability::kStep, Durability::kCheckpoint}) {
    for (const uint64_t memory : {uint64_t{64} << 20, uint64_t{0}}) {
      SCOPED_TRACE(absl::StrCat("memory ", memory, " durability ",
                                static_cast<int>(durability)));
      EngineClusterOptions options;
      options.servers = 3;
      options.durability = durability;
      options.memory = memory;
      options.owner.clear();
      EngineCluster probe(options);
      for (uint32_t i = 0; i < probe.table().chunks().size(); ++i) {
        options.owner.push_back(i % 2);  // The third begins empty.
      }
      EngineCluster cluster(options);
      cluster.TrainThrough(2);
      cluster.Want(ChunksOf(cluster, 0), 2);
      cluster.TrainThrough(8);
      EXPECT_TRUE(cluster.IsMoved());
      EXPECT_TRUE(ChunksOf(cluster, 0).empty());
      EXPECT_FALSE(ChunksOf(cluster, 2).empty());
      EXPECT_EQ(cluster.State(), want);
    }
  }
}

// Everything of server 0 goes to server 1 in a run of 9 steps, or more if that
// takes longer, while `disturb` does what it likes.
struct Outcome {
  std::map<uint32_t, std::string> state;
  uint64_t engine_steps = 0;
  uint64_t steps = 0;
  bool moved = false;
};
Outcome MoveAll(const EngineClusterOptions& options,
                const std::function<void(EngineCluster*)>& disturb) {
  EngineCluster cluster(options);
  cluster.TrainThrough(2);
  const std::vector<uint32_t> all = ChunksOf(cluster, 0);
  cluster.engine_steps = 0;
  cluster.disturb = [&] { disturb(&cluster); };
  cluster.Want(all, 1);
  for (uint64_t step = 3; step <= 9 || !cluster.IsMoved(); ++step) {
    cluster.TrainThrough(std::min<uint64_t>(step, 40));
    if (::testing::Test::HasFailure() || step > 40) {
      break;
    }
  }
  Outcome outcome;
  outcome.engine_steps = cluster.engine_steps;
  cluster.disturb = nullptr;
  outcome.moved = cluster.IsMoved();
  outcome.steps = cluster.committed();
  EXPECT_EQ(cluster.moves_made(), all.size());  // Each once.
  outcome.state = cluster.State();
  return outcome;
}

EngineClusterOptions TwoServers(uint64_t seed) {
  EngineClusterOptions options;
  options.memory = seed % 2 == 0 ? 0 : 64 << 20;
  options.seed = seed;
  return options;
}

class DisturbedMovesTest : public ::testing::Test {
 protected:
  void ExpectSameBits(const Outcome& outcome) {
    EXPECT_TRUE(outcome.moved);
    auto& want = want_[outcome.steps];
    if (want.empty()) {
      want = Undisturbed(outcome.steps);
    }
    EXPECT_EQ(outcome.state, want) << "after step " << outcome.steps;
  }
  std::map<uint64_t, std::map<uint32_t, std::string>> want_;  // By step.
};

TEST_F(DisturbedMovesTest, StreamsThatBreakAgainAndAgainDelayAndChangeNothing) {
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::minstd_rand random(static_cast<uint32_t>(seed));
    uint32_t broken = 0;
    ExpectSameBits(MoveAll(TwoServers(seed), [&](EngineCluster* cluster) {
      if (broken < 30 && random() % 100 == 0) {
        ++broken;
        cluster->BreakCopies();
      }
    }));
    EXPECT_GT(broken, 5u);
  }
}

// Powers one side off at a moment, many moments in many runs.
TEST_F(DisturbedMovesTest, EitherSideMayLoseItsPowerAtAnyMoment) {
  const uint64_t whole =
      MoveAll(TwoServers(1), [](EngineCluster*) {}).engine_steps;
  ASSERT_GT(whole, 100u);
  constexpr uint64_t kRuns = 12;
  for (uint64_t run = 0; run < kRuns; ++run) {
    SCOPED_TRACE(absl::StrCat("run ", run));
    std::minstd_rand random(static_cast<uint32_t>(run + 1));
    // The first moves are made in the first third.
    uint64_t next = whole * run / kRuns / 2 + random() % 20;
    uint64_t deaths = 0;
    ExpectSameBits(MoveAll(TwoServers(run), [&](EngineCluster* cluster) {
      if (deaths < 3 && cluster->engine_steps >= next) {
        const auto victim = static_cast<uint32_t>((run + deaths) % 2);
        cluster->Kill(victim, random() % 3 == 0 ? SimDisk::End::kKill
                                                : SimDisk::End::kPower);
        ++deaths;
        next = cluster->engine_steps + 1 + random() % (whole / 4);
      }
    }));
    EXPECT_GT(deaths, 0u);
    if (HasFailure()) {
      return;
    }
  }
}

TEST_F(DisturbedMovesTest, BothSidesMayLoseTheirPowerAtOnce) {
  const uint64_t whole =
      MoveAll(TwoServers(1), [](EngineCluster*) {}).engine_steps;
  for (uint64_t run = 0; run < 5; ++run) {
    SCOPED_TRACE(absl::StrCat("run ", run));
    const uint64_t at = whole * (run + 1) / 20;
    bool died = false;
    ExpectSameBits(MoveAll(TwoServers(run), [&](EngineCluster* cluster) {
      if (!died && cluster->engine_steps >= at) {
        died = true;
        cluster->Kill(0, SimDisk::End::kPower);
        cluster->Kill(1, SimDisk::End::kPower);
      }
    }));
    EXPECT_TRUE(died);
    if (HasFailure()) {
      return;
    }
  }
}

BulkHeader Copy(BulkKind kind, uint64_t sequence) {
  BulkHeader header;
  header.kind = kind;
  header.timeline = 1;
  header.step = 1;
  header.incarnation = 77;
  header.sequence = sequence;
  return header;
}

grpc::ByteBuffer WithPayload(BulkHeader header, uint64_t bytes) {
  auto payload = std::make_shared<std::vector<std::byte>>(bytes);
  const std::byte* data = payload->data();
  header.items.resize(1);
  header.items[0].chunk = 1;
  header.items[0].use = kBulkAllUses;
  header.items[0].elem_count = bytes / 4;
  header.items[0].payload_bytes = bytes;
  if (header.kind == BulkKind::kReplicaBase) {
    header.items[0].elem_count = 1 << 20;
  }
  return MakeBulkMessage(header, {{data, bytes, payload}});
}

TEST(EngineMovesTest, WhatNobodyOrderedIsRefusedInWordsAndHarmsNothing) {
  EngineCluster cluster(EngineClusterOptions{});
  cluster.TrainThrough(1);
  const auto client = cluster.OpenCopies(0);
  ASSERT_TRUE(cluster.Await([&] { return client->answers == 1; }));  // Hello.
  BulkHeader old = Copy(BulkKind::kReplicaBase, 1);
  old.timeline = 0;
  client->Send(WithPayload(old, 4096));
  ASSERT_TRUE(cluster.Await([&] { return !client->error.ok(); }));
  EXPECT_EQ(client->error.code(), absl::StatusCode::kAborted);
  for (const BulkKind kind :
       {BulkKind::kReplicaBase, BulkKind::kReplicaGradient}) {
    client->error = absl::OkStatus();
    client->Send(
        WithPayload(Copy(kind, kind == BulkKind::kReplicaBase ? 2 : 3), 4096));
    ASSERT_TRUE(cluster.Await([&] { return !client->error.ok(); }));
    EXPECT_EQ(client->error.code(), absl::StatusCode::kOutOfRange)
        << client->error;
    EXPECT_NE(client->error.message().find("not ordered"), std::string::npos)
        << client->error;
  }
  // The same number again, another kind of message, more than the credit.
  client->Send(WithPayload(Copy(BulkKind::kReplicaBase, 3), 4096));
  EXPECT_TRUE(cluster.Await([&] { return client->over; }));
  const auto pusher = cluster.OpenCopies(0);
  ASSERT_TRUE(cluster.Await([&] { return pusher->answers == 1; }));
  pusher->Send(WithPayload(Copy(BulkKind::kPush, 1), 4096));
  EXPECT_TRUE(cluster.Await([&] { return pusher->over; }));
  const auto greedy = cluster.OpenCopies(0);
  ASSERT_TRUE(cluster.Await([&] { return greedy->answers == 1; }));
  greedy->Send(WithPayload(Copy(BulkKind::kReplicaGradient, 1), 16 << 20));
  EXPECT_TRUE(cluster.Await([&] { return greedy->over; }));
  cluster.TrainThrough(3);
  EXPECT_EQ(cluster.State(), Undisturbed(3));
}

TEST(EngineMovesTest, AFetchByTheNewPlacementWaitsAndOneByTheOldIsTold) {
  EngineCluster cluster(EngineClusterOptions{});
  cluster.TrainThrough(1);
  const uint32_t chunk = ChunksOf(cluster, 0).front();
  const uint64_t before = cluster.placement_version();
  EXPECT_EQ(cluster.Fetch(0, chunk, 1, before), absl::OkStatus());
  cluster.Want({chunk}, 1);
  uint64_t step = 1;
  while (!cluster.IsMoved() && step < 20) {
    cluster.TrainThrough(++step);
  }
  ASSERT_TRUE(cluster.IsMoved());
  EXPECT_EQ(cluster.placement_version(), before + 1);
  EXPECT_EQ(cluster.Fetch(1, chunk, step, before + 1), absl::OkStatus());
  const absl::Status old = cluster.Fetch(0, chunk, step, before);
  EXPECT_EQ(old.code(), absl::StatusCode::kAborted) << old;
  EXPECT_EQ(cluster.Fetch(0, chunk, step, before + 1).code(),
            absl::StatusCode::kNotFound);
  // Of a decision that this server has not heard of: it waits.
  const uint64_t next = step + 1;
  ASSERT_TRUE(cluster.Push(next));
  cluster.TrainThrough(next);
  EXPECT_EQ(cluster.State(), Undisturbed(next));
}

}  // namespace
}  // namespace ballast::testing
