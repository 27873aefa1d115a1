// SPDX-License-Identifier: Apache-2.0
#include "worker/client/shard_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/worker/client/fake_shard.h"
#include "tests/worker/step/small_job.h"
#include "worker/step/executor.h"

namespace ballast {
namespace {

using testing::FakeShard;
using ::testing::HasSubstr;
using testing::SmallBatches;
using testing::SmallJob;
using testing::SmallValues;

constexpr uint64_t kChunkElems = 1024;
constexpr uint64_t kLife = testing::FakeShard::kLife;

class Quiet : public PassObserver {
 public:
  absl::Status OnUnit(PassPhase, uint32_t) override { return absl::OkStatus(); }
};

class ShardClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    job_ = SmallJob();
    // Large enough for tensors of several blocks, so of several chunks.
    job_.model.width = 128;
    job_.model.layers = 1;
    family_ = MakeModelFamily(job_).value();
    table_ = ChunkTable::Build(family_->layout(), kChunkElems).value();
    device_ =
        CpuDevice::Create(uint64_t{64} << 20, testing::OneThread()).value();
    host_ =
        Arena::Create({.name = "host", .bytes = uint64_t{64} << 20}).value();
    batches_ = SmallBatches(job_);
  }

  // Starts two servers; the options of the second may differ.
  void Start(FakeShard::Options options, FakeShard::Options second,
             uint64_t staging_bytes = 1 << 20,
             absl::Duration silence = absl::Seconds(20)) {
    v1::Placement placement;
    placement.set_placement_version(3);
    placement.set_layout(family_->layout().Encode());
    placement.set_chunk_elems(kChunkElems);
    for (FakeShard::Options* each : {&options, &second}) {
      each->table = &table_;
      each->values = SmallValues;
      shards_.push_back(std::make_unique<FakeShard>(*each));
      endpoints_.push_back(
          Endpoint::Start("127.0.0.1", 0, {shards_.back().get()}).value());
      v1::ServerEntry* const server = placement.add_servers();
      server->set_name(absl::StrCat("server-", shards_.size() - 1));
      server->set_address(endpoints_.back()->address());
      server->set_incarnation(kLife);
    }
    for (size_t chunk = 0; chunk < table_.chunks().size(); ++chunk) {
      placement.add_owner(static_cast<uint32_t>(chunk % 2));
    }
    client_ = ShardClient::Create({.name = "worker-0",
                                   .staging_bytes = staging_bytes,
                                   .silence_max = silence,
                                   .device = device_.get()})
                  .value();
    placement_ = placement;
    Place();
  }
  void Place() {
    client_->SetPlacement(std::make_shared<const PlacementMap>(
        PlacementMap::Create(placement_, family_->layout()).value()));
  }

  absl::Status Begin(std::vector<ShardClient::Target> targets) {
    return client_->Begin(++pass_, {.timeline = 1, .step = 7, .incarnation = 5},
                          std::move(targets));
  }
  // Everything to both.
  std::vector<ShardClient::Target> Whole() const {
    return {{{0, job_.batch.micro_batches}, {0, 1}}};
  }

  absl::Status Step(uint32_t prefetch) { return Step(prefetch, Whole()); }
  absl::Status Step(uint32_t prefetch,
                    std::vector<ShardClient::Target> targets) {
    absl::Status status = Compute(prefetch, std::move(targets));
    if (status.ok()) {
      status = client_->End();
    }
    client_->Drop();
    return status;
  }
  // A step up to its last push.
  absl::Status Compute(uint32_t prefetch,
                       std::vector<ShardClient::Target> targets) {
    StepExecutor executor(family_.get(), device_.get(), host_.get(),
                          {.prefetch = prefetch});
    const uint32_t total = job_.batch.micro_batches;
    if (const absl::Status status = Begin(std::move(targets)); !status.ok()) {
      return status;
    }
    Quiet quiet;
    const auto result =
        executor.Train({.version = 6, .total = total, .nodes = {{0, total}}},
                       batches_, client_.get(), client_.get(), &quiet);
    if (result.ok()) {
      losses_ = result->losses;
    }
    return result.status();
  }

  // By tensor name, assembled from what both servers got.
  std::map<std::string, std::vector<float>> Gradients() {
    std::map<std::string, std::vector<std::vector<float>>> uses;
    for (const auto& shard : shards_) {
      for (const FakeShard::Gradient& gradient : shard->gradients()) {
        EXPECT_EQ(gradient.step, 7u);
        const Chunk& chunk = table_.chunk(gradient.item.chunk);
        const TensorSpec& tensor = table_.tensor_of(gradient.item.chunk);
        auto& by_use = uses[tensor.name];
        by_use.resize(tensor.use_count,
                      std::vector<float>(tensor.elem_count()));
        std::copy(gradient.values.begin(), gradient.values.end(),
                  by_use[gradient.item.use].begin() +
                      static_cast<int64_t>(chunk.begin));
        if (gradient.item.has_loss) {
          EXPECT_EQ(gradient.item.chunk, table_.loss_chunk());
          EXPECT_EQ(gradient.item.loss, losses_[0]);
          ++losses_seen_;
        }
      }
    }
    std::map<std::string, std::vector<float>> sums;
    for (const auto& [name, by_use] : uses) {
      sums[name] = by_use[0];
      for (size_t use = 1; use < by_use.size(); ++use) {
        for (size_t i = 0; i < by_use[use].size(); ++i) {
          sums[name][i] += by_use[use][i];
        }
      }
    }
    return sums;
  }

  Job job_;
  std::unique_ptr<ModelFamily> family_;
  ChunkTable table_;
  std::unique_ptr<CpuDevice> device_;
  std::unique_ptr<Arena> host_;
  std::vector<MicroBatch> batches_;
  std::vector<std::unique_ptr<FakeShard>> shards_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  std::unique_ptr<ShardClient> client_;
  std::vector<double> losses_;
  int losses_seen_ = 0;
  v1::Placement placement_;
  uint64_t pass_ = 0;
};

TEST_F(ShardClientTest, StepOverTheWireHasTheBitsOfALocalOne) {
  const auto local =
      RunLocalStep(job_, testing::OneThread, batches_, SmallValues);
  ASSERT_TRUE(local.ok()) << local.status();
  // Room for one chunk at a time, here and there: every wait is waited.
  const uint64_t chunk_bytes = 65536 * sizeof(float);
  Start({.credit_bytes = chunk_bytes}, {.credit_bytes = chunk_bytes},
        chunk_bytes);
  for (const uint32_t prefetch : {0u, 2u}) {
    const absl::Status status = Step(prefetch);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(losses_[0], local->loss_sum);
    const auto gradients = Gradients();
    for (const auto& [name, values] : local->gradients) {
      EXPECT_EQ(gradients.at(name), values) << name;
    }
  }
  EXPECT_EQ(losses_seen_, 1 + 2);  // Gradients() looks at all steps again.
  uint64_t bytes = 0;
  for (const TensorSpec& tensor : family_->layout().tensors) {
    bytes += tensor.elem_count() * tensor.use_count * sizeof(float);
  }
  EXPECT_EQ(client_->pushed_bytes(), 2 * bytes);
}

TEST_F(ShardClientTest, ASilentServerEndsTheWaitByName) {
  Start({}, {.silent = true}, 1 << 20, absl::Milliseconds(300));
  const absl::Status status = Step(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("worker-0 waits for server-1: unit embedding, chunk 1 "
                        "of wpe.weight, for step 7 since 0 s"));
  EXPECT_EQ(device_->used_bytes(), 0u);
}

TEST_F(ShardClientTest, AnErrorOfAServerFailsThePassUnderItsName) {
  Start({.fetch_error = absl::NotFoundError("chunk 3 is not here")}, {});
  const absl::Status status = Step(0);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("server-0: chunk 3 is not here"));
}

TEST_F(ShardClientTest, AServerThatIsGoneFailsThePassByName) {
  Start({}, {});
  ASSERT_TRUE(Step(1).ok());
  endpoints_[1]->Stop(absl::ZeroDuration());
  const absl::Status status = Step(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("server-1"));
}

TEST_F(ShardClientTest, CancelEndsAWaitAndTheNextPassStartsAfresh) {
  Start({.silent = true}, {});
  std::thread canceller([this] {
    // Not before the step's thread waits.
    while (client_->waiting().what.empty()) {
      std::this_thread::yield();
    }
    client_->Cancel(1);
  });
  EXPECT_EQ(Step(1).code(), absl::StatusCode::kCancelled);
  canceller.join();
  client_->Drop();
  // The other server still answers.
  ASSERT_TRUE(Begin(Whole()).ok());
  const absl::Status status = client_->End();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ShardClientTest, ALateCancelDoesNotTouchTheNextPassButItsOwn) {
  Start({}, {});
  ASSERT_TRUE(Step(1).ok());
  ASSERT_TRUE(Begin(Whole()).ok());
  client_->Cancel(1);  // Of the pass before.
  EXPECT_TRUE(client_->End().ok());
  client_->Drop();
  client_->Cancel(3);  // Before it begins.
  EXPECT_EQ(Begin(Whole()).code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Step(1).ok());
}

TEST_F(ShardClientTest, AServerThatEndsNoStreamKeepsNobody) {
  Start({.hold_end = true}, {});
  EXPECT_TRUE(Step(0).ok());
  EXPECT_TRUE(Step(0).ok());
}

TEST_F(ShardClientTest, WeightsOfAnotherLifeOfTheServerAreRefused) {
  Start({}, {.incarnation = kLife + 1});
  const absl::Status status = Step(0);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("server-1: weights of incarnation 10; the placement "
                        "names 9"));
}

TEST_F(ShardClientTest, AnAcknowledgementOfAnotherLifeCountsForNothing) {
  Start({}, {.ack_incarnation = kLife + 1});
  const absl::Status status = Step(0);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("server-1: an acknowledgement of incarnation 10"));
}

TEST_F(ShardClientTest, OnlyTheServersThatMissANodeGetIt) {
  Start({}, {});
  ASSERT_TRUE(Step(0, {{{0, job_.batch.micro_batches}, {1}}}).ok());
  EXPECT_TRUE(shards_[0]->gradients().empty());
  EXPECT_FALSE(shards_[1]->gradients().empty());
  const std::vector<ShardClient::Ack> acks = client_->Acks();
  ASSERT_EQ(acks.size(), 1u);
  EXPECT_EQ(acks[0].server, 1u);
  EXPECT_EQ(acks[0].incarnation, kLife);
}

TEST_F(ShardClientTest, AServerThatFailsDoesNotLoseTheAnswersOfTheOther) {
  const uint64_t room = uint64_t{16} << 20;
  Start({}, {.credit_bytes = room, .deaf = true}, room);
  ASSERT_TRUE(Compute(0, Whole()).ok());
  EXPECT_TRUE(client_->Acks().empty());  // More might have come.
  endpoints_[1]->Stop(absl::ZeroDuration());
  const absl::Status status = client_->End();
  client_->Drop();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  const std::vector<ShardClient::Ack> acks = client_->Acks();
  ASSERT_EQ(acks.size(), 1u);
  EXPECT_EQ(acks[0].server, 0u);
  EXPECT_EQ(acks[0].incarnation, kLife);
}

TEST_F(ShardClientTest, ALifeThatStaysKeepsItsConnection) {
  Start({}, {});
  ASSERT_TRUE(Step(0).ok());
  const uint64_t pushed = client_->pushed_bytes();
  endpoints_[1]->Stop(absl::ZeroDuration());
  placement_.mutable_servers(1)->set_incarnation(0);
  Place();
  EXPECT_EQ(client_->pushed_bytes(), pushed);
  EXPECT_EQ(Begin(Whole()).code(), absl::StatusCode::kUnavailable);
  // Its next life has another address.
  shards_[1] = std::make_unique<FakeShard>(
      FakeShard::Options{.table = &table_,
                         .values = SmallValues,
                         .incarnation = kLife + 1,
                         .ack_incarnation = kLife + 1});
  endpoints_[1] = Endpoint::Start("127.0.0.1", 0, {shards_[1].get()}).value();
  placement_.mutable_servers(1)->set_address(endpoints_[1]->address());
  placement_.mutable_servers(1)->set_incarnation(kLife + 1);
  Place();
  const absl::Status status = Step(0);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(client_->pushed_bytes(), 2 * pushed);
  EXPECT_EQ(shards_[0]->streams(), 4);  // Two a pass.
  client_->Reconnect();
  EXPECT_TRUE(Step(0).ok());
}

TEST(PlacementMapTest, RefusesAnotherModelAndAWrongCount) {
  const Job job = SmallJob();
  const ModelLayout layout = MakeModelFamily(job).value()->layout();
  v1::Placement placement;
  placement.set_layout(layout.Encode());
  placement.set_chunk_elems(kChunkElems);
  placement.add_owner(0);
  EXPECT_EQ(PlacementMap::Create(placement, layout).status().code(),
            absl::StatusCode::kInvalidArgument);
  Job other = job;
  other.model.layers += 1;
  EXPECT_EQ(
      PlacementMap::Create(placement, MakeModelFamily(other).value()->layout())
          .status()
          .code(),
      absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace ballast
