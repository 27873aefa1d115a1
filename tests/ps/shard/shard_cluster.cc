// SPDX-License-Identifier: Apache-2.0
#include "tests/ps/shard/shard_cluster.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/exact_sum.h"
#include "common/initial_value.h"
#include "common/status_macros.h"
#include "kernels/update.h"
#include "offload/residency.h"
#include "ps/shard/shard_server.h"
#include "storage/checkpoint.h"

namespace ballast::testing {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(30);
constexpr uint64_t kPlacementVersion = 3;

TensorSpec Tensor(const std::string& name, std::vector<uint64_t> shape,
                  Init init, DType served) {
  TensorSpec tensor;
  tensor.name = name;
  tensor.shape = std::move(shape);
  tensor.init = init;
  tensor.init_std = 0.02;
  tensor.decay = tensor.shape.size() == 2;
  tensor.served = served;
  return tensor;
}

uint64_t SmallestMemory(const ChunkTable& table, const ClusterOptions& options,
                        OptimizerKind optimizer) {
  uint64_t smallest = 0;
  for (uint32_t server = 0; server < options.servers; ++server) {
    ResidencyRequest request;
    request.budget_bytes = uint64_t{1} << 40;
    request.workers = options.workers;
    request.copy_sources = std::max<uint32_t>(1, options.servers - 1);
    for (const Chunk& chunk : table.chunks()) {
      const TensorSpec& tensor = table.tensor_of(chunk.id);
      const RecordLayout layout = RecordLayout::For(tensor, chunk, optimizer);
      const ChunkFootprint bytes = {layout.total_bytes, layout.prefix_bytes,
                                    chunk.elem_count() * 4, tensor.use_count};
      if (bytes.record_bytes > request.largest.record_bytes) {
        request.largest = bytes;
      }
      if (chunk.id % options.servers == server) {
        request.chunks.push_back(bytes);
      }
    }
    // Against a budget that does not hold everything, too.
    request.budget_bytes = PlanResidency(request)->smallest_budget_bytes;
    smallest = std::max(smallest, request.budget_bytes);
  }
  return smallest;
}

}  // namespace

ModelLayout SmallLayout(DType served) {
  ModelLayout layout;
  TensorSpec table = Tensor("wte.weight", {96, 700}, Init::kNormal, served);
  table.by_rows = true;
  table.use_count = 2;
  layout.tensors = {table, Tensor("h.ln.weight", {300}, Init::kOnes, served),
                    Tensor("h.fc.weight", {300, 700}, Init::kNormal, served),
                    Tensor("h.fc.bias", {700}, Init::kZeros, served),
                    Tensor("h.out.weight", {700, 300}, Init::kNormal, served)};
  layout.units = {{"embedding", {{0, 0}}},
                  {"h", {{1, 0}, {2, 0}, {3, 0}, {4, 0}}},
                  {"head", {{0, 1}}}};
  return layout;
}

std::vector<float> NodeGradient(const TensorSpec& tensor, uint32_t index,
                                uint64_t step, uint32_t use, const Span& span) {
  std::vector<float> values(tensor.elem_count());
  if (span.count == 1) {
    std::minstd_rand random(static_cast<uint32_t>(
        1 + index * 10007 + step * 1009 + use * 101 + span.first));
    for (float& value : values) {
      value = static_cast<float>(random()) * 0x1p-30f - 1.0f;
    }
    return values;
  }
  values = NodeGradient(tensor, index, step, use, LeftChild(span));
  AccumulateCpu(NodeGradient(tensor, index, step, use, RightChild(span)),
                absl::MakeSpan(values));
  return values;
}

PlainTraining::PlainTraining(const Job& job, const ModelLayout& layout)
    : job_(job), layout_(layout) {
  for (const TensorSpec& tensor : layout.tensors) {
    param_.emplace_back(tensor.elem_count());
    FillInitial(tensor, job.run.seed, 0, absl::MakeSpan(param_.back()));
    slots_[0].emplace_back(tensor.elem_count());
    slots_[1].emplace_back(tensor.elem_count());
  }
}

std::vector<float> PlainTraining::Gradient(uint32_t tensor,
                                           uint64_t step) const {
  const TensorSpec& spec = layout_.tensors[tensor];
  std::vector<float> gradient =
      NodeGradient(spec, tensor, step, 0, {0, kMicroBatches});
  for (uint32_t use = 1; use < spec.use_count; ++use) {
    AccumulateCpu(NodeGradient(spec, tensor, step, use, {0, kMicroBatches}),
                  absl::MakeSpan(gradient));
  }
  return gradient;
}

std::string PlainTraining::SumSquares(uint64_t step) const {
  ExactSum squares;
  for (uint32_t t = 0; t < layout_.tensors.size(); ++t) {
    const std::vector<float> gradient = Gradient(t, step);
    const uint64_t block = layout_.tensors[t].block_elems();
    for (uint64_t begin = 0; begin < gradient.size(); begin += block) {
      squares.Add(
          BlockStatsCpu(absl::MakeConstSpan(gradient).subspan(begin, block))
              .sum_squares);
    }
  }
  return squares.Encode();
}

void PlainTraining::Step(const v1::Decision& decision) {
  AdamWScalars adamw;
  adamw.grad_scale = decision.grad_scale();
  adamw.learning_rate = decision.learning_rate();
  adamw.beta1 = static_cast<float>(job_.optimizer.beta1);
  adamw.beta2 = static_cast<float>(job_.optimizer.beta2);
  adamw.epsilon = static_cast<float>(job_.optimizer.epsilon);
  adamw.bias1 = decision.bias1();
  adamw.bias2 = decision.bias2();
  SgdScalars sgd;
  sgd.grad_scale = decision.grad_scale();
  sgd.learning_rate = decision.learning_rate();
  sgd.momentum = static_cast<float>(job_.optimizer.momentum);
  for (uint32_t t = 0; t < layout_.tensors.size(); ++t) {
    adamw.weight_decay = sgd.weight_decay = static_cast<float>(
        layout_.tensors[t].decay ? job_.optimizer.weight_decay : 0.0);
    const std::vector<float> gradient = Gradient(t, decision.step());
    const auto param = absl::MakeSpan(param_[t]);
    const auto slot = absl::MakeSpan(slots_[0][t]);
    if (job_.optimizer.kind == OptimizerKind::kSgd) {
      SgdCpu(sgd, gradient, param, slot, {});
    } else {
      AdamWCpu(adamw, gradient, param, slot, absl::MakeSpan(slots_[1][t]), {});
    }
  }
}

ShardCluster::ShardCluster(const ClusterOptions& options)
    : options_(options), layout_(SmallLayout(options.served)) {
  table_ = std::make_unique<ChunkTable>(
      *ChunkTable::Build(layout_, options.chunk_elems));
  job_.run.name = "test";
  job_.run.dir = options.data_root;
  job_.run.steps = 10;
  job_.run.seed = 7;
  job_.batch.micro_batches = kMicroBatches;
  job_.worker.count = options.workers;
  job_.optimizer.kind = options.optimizer;
  job_.server.count = options.servers;
  job_.server.durability = Durability::kCheckpoint;
  job_.server.chunk_elems = options.chunk_elems;
  job_.cluster.progress_timeout = absl::Seconds(20);
  job_.server.memory = options.memory == 0 ? SmallestMemory(*table_, options,
                                                            job_.optimizer.kind)
                                           : options.memory;
  v1::Placement placement;
  placement.set_placement_version(kPlacementVersion);
  placement.set_layout(layout_.Encode());
  placement.set_chunk_elems(options.chunk_elems);
  placement.set_timeline(1);
  placement.set_optimizer(options.optimizer == OptimizerKind::kAdamW ? "adamw"
                                                                     : "sgd");
  for (const Chunk& chunk : table_->chunks()) {
    placement.add_owner(OwnerOf(chunk.id));
  }
  for (uint32_t i = 0; i < options.servers; ++i) {
    placement.add_servers()->set_name(absl::StrCat("server-", i));
  }
  coordinator_.SetPlacement(placement);
  left_.assign(options.servers, false);
  for (uint32_t i = 0; i < options.servers; ++i) {
    ShardServerOptions server;
    server.job = job_;
    server.coordinator = coordinator_.address();
    server.name = absl::StrCat("server-", i);
    server.data_dir = data_dir(i);
    server.host = "127.0.0.1";
    threads_.emplace_back([server] {
      const absl::Status status = RunShardServer(server);
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  for (uint32_t i = 0; i < options.servers; ++i) {
    addresses_.push_back(coordinator_.WaitForJoin(absl::StrCat("server-", i)));
  }
}

ShardCluster::~ShardCluster() {
  for (uint32_t i = 0; i < options_.servers; ++i) {
    if (!left_[i]) {
      Leave(i);
    }
  }
}

std::string ShardCluster::data_dir(uint32_t server) const {
  return absl::StrCat(options_.data_root, "/server-", server);
}

v1::MemberStats ShardCluster::Leave(uint32_t server) {
  const std::string name = absl::StrCat("server-", server);
  v1::ServerDirective directive;
  directive.set_task(v1::SERVER_EXIT);
  directive.set_timeline(1);
  coordinator_.Direct(name, directive);
  const auto report = coordinator_.WaitForReport(
      name, [](const v1::ReportRequest& r) { return r.has_leaving(); });
  threads_[server].join();
  left_[server] = true;
  return report.stats();
}

void ShardCluster::Load(uint64_t step, const std::string& manifest) {
  v1::ServerDirective directive;
  directive.set_task(v1::SERVER_LOAD);
  directive.set_timeline(1);
  directive.set_placement_version(kPlacementVersion);
  directive.set_load_step(step);
  directive.set_load_manifest(manifest);
  for (uint32_t i = 0; i < servers(); ++i) {
    coordinator_.Direct(absl::StrCat("server-", i), directive);
  }
  for (uint32_t i = 0; i < servers(); ++i) {
    const auto report = coordinator_.WaitForReport(
        absl::StrCat("server-", i), [](const v1::ReportRequest& r) {
          return r.has_loaded() || r.has_fatal();
        });
    ASSERT_TRUE(report.has_loaded()) << report.ShortDebugString();
    EXPECT_EQ(report.loaded().step(), step);
  }
}

void ShardCluster::RunDirective(const std::string& name,
                                v1::ServerDirective* directive) {
  directive->set_task(v1::SERVER_RUN);
  directive->set_timeline(1);
  directive->set_placement_version(kPlacementVersion);
  directive->clear_workers();
  for (uint32_t w = 0; w < options_.workers; ++w) {
    directive->add_workers(kFirstWorker + w);
  }
  coordinator_.Direct(name, *directive);
}

void ShardCluster::Collect(uint64_t step,
                           const std::vector<v1::Decision>& decisions) {
  v1::ServerDirective directive;
  directive.set_collecting_step(step);
  *directive.mutable_decisions() = {decisions.begin(), decisions.end()};
  for (uint32_t i = 0; i < servers(); ++i) {
    RunDirective(absl::StrCat("server-", i), &directive);
  }
  last_ = directive;
}

std::unique_ptr<RawStream> ShardCluster::Open(uint32_t server,
                                              const char* method) {
  return RawStream::Open(MakeChannel(addresses_[server]), method, kTimeout);
}

BulkHeader ShardCluster::Header(BulkKind kind, uint64_t step) const {
  BulkHeader header;
  header.kind = kind;
  header.timeline = 1;
  header.step = step;
  header.placement_version = kPlacementVersion;
  return header;
}

// Backward order, one message at a time; some spans twice, inside others.
void ShardCluster::PushWorker(uint32_t worker, uint64_t step) {
  const std::vector<Span> ranges = DealSpans(kMicroBatches, options_.workers);
  std::vector<Span> spans = Cover(ranges[worker], kMicroBatches);
  spans.push_back(spans.front());
  spans.push_back({ranges[worker].first, 1});
  std::vector<std::unique_ptr<RawStream>> streams;
  for (uint32_t server = 0; server < servers(); ++server) {
    streams.push_back(Open(server, kPushMethod));
    const auto hello = streams.back()->Read();
    ASSERT_TRUE(hello.ok()) << hello.status();
    EXPECT_EQ(BulkMessage::Parse(*hello)->header().kind, BulkKind::kHello);
  }
  for (size_t id = table_->chunks().size(); id-- > 0;) {
    const Chunk& chunk = table_->chunks()[id];
    const TensorSpec& tensor = table_->tensor_of(chunk.id);
    RawStream* stream = streams[OwnerOf(chunk.id)].get();
    for (uint32_t use = tensor.use_count; use-- > 0;) {
      for (const Span& span : spans) {
        const std::vector<float> values =
            NodeGradient(tensor, chunk.tensor, step, use, span);
        BulkHeader header = Header(BulkKind::kPush, step);
        header.incarnation = kFirstWorker + worker;
        header.sequence = id + 1;
        BulkItem item;
        item.chunk = chunk.id;
        item.use = use;
        item.span = span;
        item.elem_count = chunk.elem_count();
        item.payload_bytes = chunk.elem_count() * 4;
        item.has_loss =
            chunk.id == table_->loss_chunk() && use == table_->loss_use();
        item.loss = span.count * 0.5;
        header.items = {item};
        ASSERT_TRUE(
            stream
                ->Write(MakeBulkMessage(
                    header, {{reinterpret_cast<const std::byte*>(values.data() +
                                                                 chunk.begin),
                              item.payload_bytes,
                              std::make_shared<std::vector<float>>(values)}}))
                .ok());
        const auto reply = stream->Read();
        ASSERT_TRUE(reply.ok()) << reply.status();
        const auto ack = BulkMessage::Parse(*reply);
        ASSERT_EQ(ack->header().kind, BulkKind::kPushAck) << ack->error();
        EXPECT_EQ(ack->header().credit_bytes, item.payload_bytes);
        EXPECT_EQ(ack->header().items.at(0).span, span);
      }
    }
  }
}

void ShardCluster::PushAll(uint64_t step) {
  std::vector<std::thread> workers;
  for (uint32_t worker = 0; worker < options_.workers; ++worker) {
    workers.emplace_back([this, worker, step] { PushWorker(worker, step); });
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
}

v1::Vote ShardCluster::WaitForVotes(uint64_t step) {
  ExactSum squares;
  v1::Vote total;
  total.set_step(step);
  for (uint32_t i = 0; i < servers(); ++i) {
    const auto report = coordinator_.WaitForReport(
        absl::StrCat("server-", i), [step](const v1::ReportRequest& r) {
          return (r.has_vote() && r.vote().step() == step) || r.has_fatal();
        });
    EXPECT_TRUE(report.has_vote()) << report.ShortDebugString();
    const auto part = ExactSum::Decode(report.vote().sum_squares());
    EXPECT_TRUE(part.ok());
    if (part.ok()) {
      squares.Add(*part);
    }
    if (report.vote().has_loss()) {
      total.set_has_loss(true);
      total.set_loss_sum(report.vote().loss_sum());
    }
  }
  total.set_sum_squares(squares.Encode());
  return total;
}

v1::Decision ShardCluster::Decide(const v1::Vote& vote, bool checkpoint) {
  v1::Decision decision;
  decision.set_timeline(1);
  decision.set_step(vote.step());
  decision.set_grad_scale(0.125f);
  decision.set_learning_rate(1e-2f);
  decision.set_bias1(0.1f);
  decision.set_bias2(0.05f);
  decision.set_checkpoint(checkpoint);
  return decision;
}

void ShardCluster::WaitForConfirms(uint64_t step) {
  for (uint32_t i = 0; i < servers(); ++i) {
    const auto report = coordinator_.WaitForReport(
        absl::StrCat("server-", i), [step](const v1::ReportRequest& r) {
          return (r.has_confirm() && r.confirm().step() == step) ||
                 r.has_fatal();
        });
    EXPECT_TRUE(report.has_confirm()) << report.ShortDebugString();
  }
}

std::vector<v1::CheckpointSaved> ShardCluster::WaitForCheckpoints(
    uint64_t step) {
  std::vector<v1::CheckpointSaved> saved;
  for (uint32_t i = 0; i < servers(); ++i) {
    const auto report = coordinator_.WaitForReport(
        absl::StrCat("server-", i), [step](const v1::ReportRequest& r) {
          return r.has_checkpoint_saved() &&
                 r.checkpoint_saved().step() == step;
        });
    EXPECT_TRUE(report.has_checkpoint_saved());
    saved.push_back(report.checkpoint_saved());
  }
  return saved;
}

Hash128 ShardCluster::StateHashOf(uint64_t step) {
  v1::ServerDirective directive = last_;
  directive.set_state_hash_wanted(true);
  directive.set_state_hash_step(step);
  std::map<uint32_t, std::string> by_chunk;
  for (uint32_t i = 0; i < servers(); ++i) {
    const std::string name = absl::StrCat("server-", i);
    RunDirective(name, &directive);
    const auto report = coordinator_.WaitForReport(
        name, [](const v1::ReportRequest& r) { return r.has_state_digests(); });
    for (const v1::ChunkDigests& chunk : report.state_digests().chunks()) {
      by_chunk[chunk.chunk()] = chunk.digests();
    }
  }
  std::vector<BlockDigests> digests(layout_.tensors.size());
  for (int field = 0; field < 3; ++field) {
    for (const auto& [id, bytes] : by_chunk) {
      const Chunk& chunk = table_->chunk(id);
      const uint64_t block = table_->tensor_of(id).block_elems();
      const uint64_t blocks = (chunk.elem_count() + block - 1) / block;
      EXPECT_EQ(bytes.size(), 3 * blocks * 16);
      ByteReader reader(absl::string_view(bytes).substr(
          static_cast<uint64_t>(field) * blocks * 16));
      for (uint64_t b = 0; b < blocks; ++b) {
        const auto high = reader.Get<uint64_t>();
        const auto low = reader.Get<uint64_t>();
        digests[chunk.tensor].push_back({high, low});
      }
    }
  }
  return StateHash(layout_, digests);
}

absl::StatusOr<Tensors> ShardCluster::Fetch(uint64_t version, uint8_t field) {
  Tensors out;
  for (const TensorSpec& tensor : layout_.tensors) {
    out.emplace_back(tensor.elem_count());
  }
  for (uint32_t server = 0; server < servers(); ++server) {
    const std::unique_ptr<RawStream> stream = Open(server, kFetchMethod);
    BulkHeader header = Header(BulkKind::kFetchRequest, version);
    header.incarnation = field == kServedField ? kFirstWorker : 0;
    for (const Chunk& chunk : table_->chunks()) {
      if (OwnerOf(chunk.id) == server) {
        BulkItem item;
        item.chunk = chunk.id;
        item.field = field;
        header.items.push_back(item);
      }
    }
    BALLAST_RETURN_IF_ERROR(stream->Write(MakeBulkMessage(header)));
    for (size_t seen = 0; seen < header.items.size();) {
      BALLAST_ASSIGN_OR_RETURN(const auto buffer, stream->Read());
      BALLAST_ASSIGN_OR_RETURN(const auto reply, BulkMessage::Parse(buffer));
      if (reply.header().kind == BulkKind::kError) {
        return reply.error();
      }
      EXPECT_EQ(reply.header().step, version);
      for (size_t i = 0; i < reply.header().items.size(); ++i, ++seen) {
        const BulkItem& item = reply.header().items[i];
        const Chunk& chunk = table_->chunk(item.chunk);
        EXPECT_EQ(item.elem_count, chunk.elem_count());
        float* to = out[chunk.tensor].data() + chunk.begin;
        if (item.dtype == DType::kF32) {
          reply.CopyPayload(i, reinterpret_cast<std::byte*>(to));
          continue;
        }
        std::vector<uint16_t> bits(item.elem_count);
        reply.CopyPayload(i, reinterpret_cast<std::byte*>(bits.data()));
        std::transform(bits.begin(), bits.end(), to, FromBF16);
      }
    }
  }
  return out;
}

}  // namespace ballast::testing
