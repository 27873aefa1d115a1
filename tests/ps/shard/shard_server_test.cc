// SPDX-License-Identifier: Apache-2.0
// Real servers over loopback, from the first version to checkpoints.

#include "ps/shard/shard_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <future>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/checkpoint.h"
#include "tests/ps/shard/shard_cluster.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint8_t kParam = static_cast<uint8_t>(Field::kParam);
constexpr uint8_t kSlot0 = static_cast<uint8_t>(Field::kSlot0);
constexpr uint8_t kSlot1 = static_cast<uint8_t>(Field::kSlot1);

class ShardServerTest : public ::testing::Test {
 protected:
  ShardServerTest() {
    const ::testing::TestInfo* info =
        ::testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::path(::testing::TempDir()) /
            absl::StrCat("shard_server_", getpid(), "_", info->name());
    std::filesystem::remove_all(root_);
  }
  ~ShardServerTest() override { std::filesystem::remove_all(root_); }

  ClusterOptions Options(const std::string& folder = "a") const {
    ClusterOptions options;
    options.data_root = (root_ / folder).string();
    return options;
  }

  std::filesystem::path root_;
};

void ExpectSame(const Tensors& is, const Tensors& want,
                const std::string& what) {
  ASSERT_EQ(is.size(), want.size());
  for (size_t t = 0; t < is.size(); ++t) {
    ASSERT_EQ(is[t].size(), want[t].size());
    EXPECT_EQ(std::memcmp(is[t].data(), want[t].data(), is[t].size() * 4), 0)
        << what << " of tensor " << t;
  }
}

Tensors Rounded(Tensors tensors) {
  for (std::vector<float>& tensor : tensors) {
    for (float& value : tensor) {
      value = FromBF16(ToBF16(value));
    }
  }
  return tensors;
}

// Two steps, checked against the plain training bit by bit.
void TrainTwoSteps(ShardCluster* cluster, DType served) {
  PlainTraining plain(cluster->job(), SmallLayout(served));
  cluster->Load(0, "");
  std::vector<v1::Decision> decisions;
  for (uint64_t step = 1; step <= 2; ++step) {
    cluster->Collect(step, decisions);
    cluster->PushAll(step);
    const v1::Vote vote = cluster->WaitForVotes(step);
    EXPECT_TRUE(vote.has_loss());
    EXPECT_EQ(vote.loss_sum(), kMicroBatches * 0.5);
    EXPECT_EQ(vote.sum_squares(), plain.SumSquares(step));
    // Asked again, it answers the same.
    cluster->Collect(step, decisions);
    EXPECT_EQ(cluster->WaitForVotes(step).sum_squares(), vote.sum_squares());
    // The next version is waited for from before it is decided.
    auto fetched = std::async(std::launch::async, [cluster, step] {
      return cluster->Fetch(step, kServedField);
    });
    decisions = {cluster->Decide(vote, /*checkpoint=*/false)};
    cluster->Collect(step + 1, decisions);
    plain.Step(decisions.back());
    const auto served_now = fetched.get();
    ASSERT_TRUE(served_now.ok()) << served_now.status();
    ExpectSame(*served_now,
               served == DType::kF32 ? plain.param() : Rounded(plain.param()),
               "served");
    cluster->WaitForConfirms(step);
  }
  std::vector<std::pair<uint8_t, Tensors>> fields = {{kParam, plain.param()},
                                                     {kSlot0, plain.slot(0)}};
  if (cluster->job().optimizer.kind == OptimizerKind::kAdamW) {
    fields.push_back({kSlot1, plain.slot(1)});
  }
  for (const auto& [field, want] : fields) {
    const auto is = cluster->Fetch(2, field);
    ASSERT_TRUE(is.ok()) << is.status();
    ExpectSame(*is, want, absl::StrCat("field ", int{field}));
  }
}

TEST_F(ShardServerTest, AmpleMemoryTrainsLikeThePlainLoop) {
  ShardCluster cluster(Options());
  TrainTwoSteps(&cluster, DType::kF32);
  const v1::MemberStats stats = cluster.Leave(0);
  EXPECT_LE(stats.memory_peak_bytes(), stats.memory_budget_bytes());
  EXPECT_EQ(stats.chunks_streamed(), 0u);
  EXPECT_EQ(stats.spilled_bytes_written(), 0u);
}

TEST_F(ShardServerTest, TheSmallestMemoryTrainsLikeThePlainLoop) {
  ClusterOptions options = Options();
  options.memory = 0;
  options.servers = 2;
  ShardCluster cluster(options);
  TrainTwoSteps(&cluster, DType::kF32);
  const v1::MemberStats stats = cluster.Leave(0);
  EXPECT_LE(stats.memory_peak_bytes(), stats.memory_budget_bytes());
  EXPECT_GT(stats.chunks_streamed(), 0u);
  EXPECT_GT(stats.spilled_bytes_written(), 0u);
  EXPECT_GT(stats.spilled_bytes_read(), 0u);
}

TEST_F(ShardServerTest, SmallChunksAndABF16CopyChangeNoBit) {
  ClusterOptions options = Options();
  options.memory = 0;
  options.chunk_elems = 1;  // One block each.
  options.servers = 3;
  options.served = DType::kBF16;
  ShardCluster cluster(options);
  TrainTwoSteps(&cluster, DType::kBF16);
}

TEST_F(ShardServerTest, SgdTrainsLikeThePlainLoop) {
  ClusterOptions options = Options();
  options.memory = 0;
  options.optimizer = OptimizerKind::kSgd;
  ShardCluster cluster(options);
  TrainTwoSteps(&cluster, DType::kF32);
}

TEST_F(ShardServerTest, AnythingBetweenScarceAndAmpleChangesNoBit) {
  for (const uint64_t memory : {uint64_t{5} << 20, uint64_t{7} << 20}) {
    ClusterOptions options = Options(absl::StrCat(memory));
    options.chunk_elems = 1 << 16;
    options.memory = memory;
    ShardCluster cluster(options);
    TrainTwoSteps(&cluster, DType::kF32);
  }
}

TEST_F(ShardServerTest, TheStateHashDependsOnNeitherTiersNorChunksNorServers) {
  std::vector<Hash128> hashes;
  for (const bool scarce : {false, true}) {
    ClusterOptions options = Options(scarce ? "scarce" : "ample");
    options.memory = scarce ? 0 : 64 << 20;
    options.servers = scarce ? 3 : 1;
    options.chunk_elems = scarce ? 1 << 16 : 1 << 20;
    ShardCluster cluster(options);
    cluster.Load(0, "");
    cluster.Collect(1, {});
    hashes.push_back(cluster.StateHashOf(0));
    cluster.PushAll(1);
    cluster.Collect(
        2, {cluster.Decide(cluster.WaitForVotes(1), /*checkpoint=*/false)});
    cluster.WaitForConfirms(1);
    hashes.push_back(cluster.StateHashOf(1));
  }
  EXPECT_EQ(hashes[0], hashes[2]);
  EXPECT_EQ(hashes[1], hashes[3]);
  EXPECT_NE(hashes[0], hashes[1]);
}

TEST_F(ShardServerTest, ASkippedStepBumpsTheVersionAndNothingElse) {
  ClusterOptions options = Options();
  options.memory = 0;
  ShardCluster cluster(options);
  PlainTraining plain(cluster.job(), SmallLayout(DType::kF32));
  cluster.Load(0, "");
  cluster.Collect(1, {});
  cluster.PushAll(1);
  v1::Decision skip = cluster.Decide(cluster.WaitForVotes(1), false);
  skip.set_skip(true);
  cluster.Collect(2, {skip});
  cluster.WaitForConfirms(1);
  const auto is = cluster.Fetch(1, kServedField);
  ASSERT_TRUE(is.ok()) << is.status();
  ExpectSame(*is, plain.param(), "param");
  cluster.PushAll(2);
  cluster.Collect(3, {cluster.Decide(cluster.WaitForVotes(2), false)});
  cluster.WaitForConfirms(2);
}

// Nothing changes in a skipped step, so two checkpoints consist of the same
// records, and the second is asked for before the first is written.
TEST_F(ShardServerTest, ACheckpointOfASkippedStepSharesTheRecordsBeforeIt) {
  ShardCluster cluster(Options());
  cluster.Load(0, "");
  cluster.Collect(1, {});
  cluster.PushAll(1);
  const v1::Decision update = cluster.Decide(cluster.WaitForVotes(1), true);
  v1::Decision skip = update;
  skip.set_step(2);
  skip.set_skip(true);
  cluster.Collect(3, {update, skip});
  const v1::CheckpointSaved first = cluster.WaitForCheckpoints(1).front();
  const v1::CheckpointSaved second = cluster.WaitForCheckpoints(2).front();
  ASSERT_EQ(first.records_size(),
            static_cast<int>(cluster.table().chunks().size()));
  ASSERT_EQ(second.records_size(), first.records_size());
  for (int i = 0; i < first.records_size(); ++i) {
    EXPECT_EQ(second.records(i).SerializeAsString(),
              first.records(i).SerializeAsString());
    EXPECT_EQ(second.records(i).version(), 1u);
  }
}

// Writes the manifest that a coordinator would write.
std::string WriteManifestOf(const ShardCluster& cluster, DType served,
                            const std::vector<v1::CheckpointSaved>& saved,
                            const std::string& folder) {
  CheckpointManifest manifest;
  manifest.run = {0x0011223344556677, 0x8899aabbccddeeff};
  manifest.run_name = "test";
  manifest.timeline = 1;
  manifest.step = saved.front().step();
  manifest.layout = SmallLayout(served);
  for (const v1::CheckpointSaved& part : saved) {
    for (const v1::SavedRecord& record : part.records()) {
      const Chunk& chunk = cluster.table().chunk(record.chunk());
      manifest.records.push_back(
          {chunk.tensor,
           chunk.begin,
           chunk.end,
           record.version(),
           record.timeline(),
           static_cast<uint32_t>(manifest.directories.size()),
           {record.extent_offset(), record.extent_bytes()}});
    }
    manifest.directories.push_back(part.data_dir());
  }
  std::filesystem::create_directories(folder);
  const absl::Status status = WriteManifest(folder, manifest);
  EXPECT_TRUE(status.ok()) << status;
  return folder;
}

TEST_F(ShardServerTest, ACheckpointLoadsIntoTheSameAndIntoOtherServers) {
  for (const uint64_t memory : {uint64_t{64} << 20, uint64_t{0}}) {
    ClusterOptions options = Options(absl::StrCat("from-", memory));
    options.servers = 2;
    options.memory = memory;
    options.served = DType::kBF16;
    Hash128 want;
    std::string manifest;
    {
      ShardCluster cluster(options);
      cluster.Load(0, "");
      cluster.Collect(1, {});
      cluster.PushAll(1);
      cluster.Collect(2, {cluster.Decide(cluster.WaitForVotes(1), true)});
      cluster.WaitForConfirms(1);
      manifest =
          WriteManifestOf(cluster, DType::kBF16, cluster.WaitForCheckpoints(1),
                          options.data_root + "/checkpoints");
      want = cluster.StateHashOf(1);
      // What comes after does not touch it.
      cluster.PushAll(2);
      cluster.Collect(3, {cluster.Decide(cluster.WaitForVotes(2), false)});
      cluster.WaitForConfirms(2);
    }
    {
      ShardCluster same(options);
      same.Load(1, manifest);
      same.Collect(2, {});
      EXPECT_EQ(same.StateHashOf(1), want);
      const v1::MemberStats stats = same.Leave(0);
      EXPECT_EQ(stats.spilled_bytes_written(), 0u) << "records were copied";
    }
    ClusterOptions other = Options(absl::StrCat("to-", memory));
    other.servers = 3;
    other.chunk_elems = 1 << 16;
    other.memory = memory;
    other.served = DType::kBF16;
    ShardCluster others(other);
    others.Load(1, manifest);
    others.Collect(2, {});
    EXPECT_EQ(others.StateHashOf(1), want);
  }
}

class BadInputTest : public ShardServerTest {
 protected:
  void Start(uint64_t memory = 64 << 20) {
    ClusterOptions options = Options();
    options.memory = memory;
    cluster_ = std::make_unique<ShardCluster>(options);
    cluster_->Load(0, "");
    cluster_->Collect(1, {});
  }
  // The answer to a message of a fresh stream.
  BulkMessage Ask(const char* method, const grpc::ByteBuffer& message) {
    const auto stream = cluster_->Open(0, method);
    if (method == kPushMethod) {
      EXPECT_TRUE(stream->Read().ok());
    }
    EXPECT_TRUE(stream->Write(message).ok());
    const auto reply = stream->Read();
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? *BulkMessage::Parse(*reply) : BulkMessage();
  }
  BulkHeader FetchOf(uint32_t chunk, uint64_t version) {
    BulkHeader header = cluster_->Header(BulkKind::kFetchRequest, version);
    header.incarnation = kFirstWorker;
    header.sequence = 17;
    BulkItem item;
    item.chunk = chunk;
    item.field = kServedField;
    header.items = {item};
    return header;
  }

  std::unique_ptr<ShardCluster> cluster_;
};

TEST_F(BadInputTest, MalformedMessagesAreRefusedAndTheServerGoesOn) {
  Start();
  std::string header = EncodeBulkHeader(FetchOf(0, 0));
  std::vector<std::string> messages = {"", "x", header.substr(0, 79),
                                       header.substr(0, 100), header + "tail"};
  std::string absurd = header;
  std::memset(absurd.data() + 8, 0xff, 40);
  messages.push_back(absurd);
  for (const std::string& bytes : messages) {
    for (const char* method : {kFetchMethod, kPushMethod}) {
      const grpc::Slice slice(bytes);
      const BulkMessage reply = Ask(method, grpc::ByteBuffer(&slice, 1));
      EXPECT_EQ(reply.error().code(), absl::StatusCode::kInvalidArgument);
    }
  }
  EXPECT_TRUE(cluster_->Fetch(0, kServedField).ok());
}

TEST_F(BadInputTest, AMessageAboveTheWholeBudgetIsNotGathered) {
  Start(/*memory=*/0);
  const auto stream = cluster_->Open(0, kPushMethod);
  EXPECT_TRUE(stream->Read().ok());
  const uint64_t bytes =
      cluster_->job().server.memory + kBulkItemsMax * kBulkItemBytes + 4096;
  const grpc::Slice slice(std::string(bytes, 'x'));
  stream->Write(grpc::ByteBuffer(&slice, 1)).IgnoreError();
  EXPECT_EQ(stream->Read().status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(cluster_->Fetch(0, kServedField).ok());
}

TEST_F(BadInputTest, APushStreamTakesGradientsOnly) {
  Start();
  BulkHeader push = cluster_->Header(BulkKind::kPush, 1);
  push.incarnation = kFirstWorker;
  for (const BulkHeader& header : {FetchOf(0, 0), push}) {
    EXPECT_EQ(Ask(kPushMethod, MakeBulkMessage(header)).error().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(BadInputTest, RequestsWaitWithinABound) {
  Start();
  const auto stream = cluster_->Open(0, kFetchMethod);
  BulkHeader header = FetchOf(0, /*version=*/1);  // Not made yet.
  header.items.resize(kBulkItemsMax, header.items[0]);
  ASSERT_TRUE(stream->Write(MakeBulkMessage(header)).ok());
  header.items.resize(1);
  header.sequence = 18;
  ASSERT_TRUE(stream->Write(MakeBulkMessage(header)).ok());
  const auto reply = stream->Read();
  ASSERT_TRUE(reply.ok()) << reply.status();
  const auto refused = BulkMessage::Parse(*reply);
  EXPECT_EQ(refused->error().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused->header().sequence, 18u);
  stream->Cancel();
}

TEST_F(BadInputTest, UnknownChunksFieldsAndVersionsAreNamed) {
  Start();
  const BulkMessage unknown =
      Ask(kFetchMethod, MakeBulkMessage(FetchOf(999, 0)));
  EXPECT_EQ(unknown.error().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(unknown.header().sequence, 17u);
  const BulkMessage far = Ask(kFetchMethod, MakeBulkMessage(FetchOf(0, 5)));
  EXPECT_EQ(far.error().code(), absl::StatusCode::kAborted);
  BulkHeader slice = FetchOf(1, 0);
  slice.items[0].elem_begin = 200;
  slice.items[0].elem_count = 101;  // Of 300.
  EXPECT_EQ(Ask(kFetchMethod, MakeBulkMessage(slice)).error().code(),
            absl::StatusCode::kInvalidArgument);
  slice.items[0].elem_count = 100;
  EXPECT_EQ(Ask(kFetchMethod, MakeBulkMessage(slice)).header().kind,
            BulkKind::kFetchReply);
  BulkHeader old = FetchOf(0, 0);
  old.timeline = 0;
  EXPECT_EQ(Ask(kFetchMethod, MakeBulkMessage(old)).error().code(),
            absl::StatusCode::kAborted);
}

TEST_F(BadInputTest, AGradientOfAnotherLengthNamesTensorAndBothSizes) {
  Start();
  BulkHeader header = cluster_->Header(BulkKind::kPush, 1);
  header.incarnation = kFirstWorker;
  BulkItem item;
  item.chunk = 1;
  item.span = {0, 4};
  item.elem_count = 299;
  item.payload_bytes = 299 * 4;
  header.items = {item};
  const std::vector<std::byte> bytes(300 * 4);
  const auto payload = [&bytes](const BulkItem& of) {
    return BulkPayload{bytes.data(), of.payload_bytes, nullptr};
  };
  const absl::Status status =
      Ask(kPushMethod, MakeBulkMessage(header, {payload(item)})).error();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("h.ln.weight"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("1196 bytes"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("1200 bytes"));
  header.items[0].elem_count = 300;
  header.items[0].payload_bytes = 1200;
  header.items[0].span = {1, 2};  // No node.
  EXPECT_EQ(
      Ask(kPushMethod, MakeBulkMessage(header, {payload(header.items[0])}))
          .error()
          .code(),
      absl::StatusCode::kInvalidArgument);
  header.items[0].span = {0, 4};
  header.incarnation = 1;  // Fenced: older than every worker.
  EXPECT_EQ(
      Ask(kPushMethod, MakeBulkMessage(header, {payload(header.items[0])}))
          .error()
          .code(),
      absl::StatusCode::kAborted);
}

// One worker asks for everything many times and reads nothing; others train.
TEST_F(BadInputTest, ASlowReaderStopsNobodyElse) {
  Start(/*memory=*/0);
  const auto slow = cluster_->Open(0, kFetchMethod);
  BulkHeader header = cluster_->Header(BulkKind::kFetchRequest, 0);
  header.incarnation = kFirstWorker;
  for (int round = 0; round < 20; ++round) {
    for (const Chunk& chunk : cluster_->table().chunks()) {
      BulkItem item;
      item.chunk = chunk.id;
      item.field = kServedField;
      header.items.push_back(item);
    }
  }
  ASSERT_TRUE(slow->Write(MakeBulkMessage(header)).ok());
  EXPECT_TRUE(cluster_->Fetch(0, kServedField).ok());
  cluster_->PushAll(1);
  cluster_->Collect(2, {cluster_->Decide(cluster_->WaitForVotes(1), false)});
  cluster_->WaitForConfirms(1);
  EXPECT_TRUE(cluster_->Fetch(1, kServedField).ok());
  slow->Cancel();
}

// One server whose only directive is to load; how that ended.
class LoadTest : public ShardServerTest {
 protected:
  absl::Status Load(uint64_t memory, const std::string& manifest);

  v1::ReportRequest fatal_;
};

absl::Status LoadTest::Load(uint64_t memory, const std::string& manifest) {
  FakeCoordinator coordinator;
  const ModelLayout layout = SmallLayout(DType::kF32);
  v1::Placement placement;
  placement.set_placement_version(1);
  placement.set_layout(layout.Encode());
  placement.set_chunk_elems(1 << 20);
  placement.set_optimizer("adamw");
  for (size_t i = 0; i < ChunkTable::Build(layout, 1 << 20)->chunks().size();
       ++i) {
    placement.add_owner(0);
  }
  placement.add_servers()->set_name("server-0");
  coordinator.SetPlacement(placement);
  ShardServerOptions options;
  options.job.server.memory = memory;
  options.job.batch.micro_batches = 1;
  options.coordinator = coordinator.address();
  options.name = "server-0";
  options.data_dir = (root_ / "small").string();
  options.host = "127.0.0.1";
  v1::ServerDirective directive;
  directive.set_task(v1::SERVER_LOAD);
  directive.set_timeline(1);
  directive.set_load_manifest(manifest);
  coordinator.Direct("server-0", directive);
  const absl::Status status = RunShardServer(options);
  fatal_ = coordinator.WaitForReport(
      "server-0", [](const v1::ReportRequest& r) { return r.has_fatal(); });
  EXPECT_TRUE(fatal_.has_fatal());
  return status;
}

TEST_F(LoadTest, ABudgetTooSmallIsBadConfigurationAndNamesTheSmallest) {
  const absl::Status status = Load(1 << 20, "");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("want at least"));
}

// Otherwise a long load would look like a server that does nothing.
TEST_F(LoadTest, AServerTellsItsFiguresBeforeItHasLoaded) {
  const absl::Status status = Load(64 << 20, (root_ / "none").string());
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_GT(fatal_.stats().memory_used_bytes(), 0u);
  EXPECT_LE(fatal_.stats().memory_peak_bytes(), uint64_t{64} << 20);
}

}  // namespace
}  // namespace ballast::testing
