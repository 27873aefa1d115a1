// SPDX-License-Identifier: Apache-2.0
#include "tests/ps/shard/engine_cluster.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/hash.h"
#include "offload/residency.h"
#include "rpc/bulk_message.h"
#include "storage/record.h"
#include "tests/ps/shard/shard_cluster.h"

namespace ballast::testing {
namespace {

constexpr char kRunId[] = "00112233445566778899aabbccddeeff";

uint64_t SmallestMemory(const ChunkTable& table, uint32_t servers) {
  ResidencyRequest request;
  request.budget_bytes = uint64_t{1} << 40;
  request.copy_sources = std::max<uint32_t>(1, servers - 1);
  for (const Chunk& chunk : table.chunks()) {
    const TensorSpec& tensor = table.tensor_of(chunk.id);
    const RecordLayout layout =
        RecordLayout::For(tensor, chunk, OptimizerKind::kAdamW);
    request.chunks.push_back({layout.total_bytes, layout.prefix_bytes,
                              chunk.elem_count() * 4, tensor.use_count});
    if (layout.total_bytes > request.largest.record_bytes) {
      request.largest = request.chunks.back();
    }
  }
  return PlanResidency(request)->smallest_budget_bytes;
}

}  // namespace

class EngineCluster::Session final : public ShardSession {
 public:
  Session(EngineCluster* cluster, uint32_t server, v1::JoinReply admission)
      : cluster_(cluster), server_(server), admission_(std::move(admission)) {}
  const v1::JoinReply& admission() const override { return admission_; }
  void Post(v1::ReportRequest request) override {
    cluster_->Hear(server_, request);
  }
  void AskPlacement(
      std::function<void(absl::StatusOr<v1::Placement>)> done) override {
    done(cluster_->placement_);
  }

 private:
  EngineCluster* const cluster_;
  const uint32_t server_;
  const v1::JoinReply admission_;
};

class EngineCluster::Dialer final : public ReplicaDialer {
 public:
  Dialer(EngineCluster* cluster, uint32_t server)
      : cluster_(cluster), server_(server) {}
  ~Dialer() override {  // The process is gone, and so are its sockets.
    for (const auto& end : ends_) {
      end->Break();
    }
  }
  void Dial(const std::string& address, uint64_t id,
            BulkStreamHandler* handler) override {
    uint32_t to = 0;
    ASSERT_TRUE(absl::SimpleAtoi(address, &to));
    const auto ours = std::make_shared<StreamEnd>(
        cluster_->nodes_[server_].mailbox, handler, id);
    ends_.push_back(ours);
    if (!cluster_->IsAlive(to)) {
      ours->Break();
      return;
    }
    Node& node = cluster_->nodes_[to];
    const auto theirs = std::make_shared<StreamEnd>(
        node.mailbox, node.engine->replicate(), ++cluster_->streams_);
    node.dialer->ends_.push_back(theirs);
    StreamEnd::Join(ours, theirs);
    cluster_->ends_.push_back(ours);
  }

 private:
  EngineCluster* const cluster_;
  const uint32_t server_;
  std::vector<std::shared_ptr<StreamEnd>> ends_;
};

EngineCluster::EngineCluster(const EngineClusterOptions& options)
    : options_(options), layout_(SmallLayout(DType::kF32)) {
  table_ = std::make_unique<ChunkTable>(
      *ChunkTable::Build(layout_, options.chunk_elems));
  job_.run.name = "test";
  job_.run.steps = 100;
  job_.run.seed = 7;
  job_.batch.micro_batches = kMicroBatches;
  job_.server.chunk_elems = options.chunk_elems;
  job_.server.durability = options.durability;
  job_.server.log_limit = options.log_limit;
  job_.server.memory = options.memory == 0
                           ? SmallestMemory(*table_, options.servers)
                           : options.memory;
  placement_.set_placement_version(3);
  placement_.set_layout(layout_.Encode());
  placement_.set_chunk_elems(options.chunk_elems);
  placement_.set_optimizer("adamw");
  for (uint32_t i = 0; i < options.servers; ++i) {
    placement_.add_servers()->set_name(NameOf(i));
  }
  owner_ = options.owner;
  for (uint32_t i = 0; options.owner.empty() && i < table_->chunks().size();
       ++i) {
    owner_.push_back(i % options.servers);
  }
  wanted_ = owner_;
  *placement_.mutable_owner() = {owner_.begin(), owner_.end()};
  nodes_.resize(options.servers);
  for (uint32_t i = 0; i < options.servers; ++i) {
    nodes_[i].disk = std::make_unique<SimDisk>(options.seed * 100 + i);
    StartLife(i);
  }
}

EngineCluster::~EngineCluster() {
  for (uint32_t i = 0; i < nodes_.size(); ++i) {
    Kill(i, SimDisk::End::kKill);
  }
}

std::string EngineCluster::NameOf(uint32_t server) const {
  return absl::StrCat("server-", server);
}

bool EngineCluster::IsAlive(uint32_t server) const {
  return nodes_[server].engine != nullptr;
}

bool EngineCluster::AllAlive() const {
  return std::all_of(nodes_.begin(), nodes_.end(),
                     [](const Node& node) { return node.engine != nullptr; });
}

void EngineCluster::Kill(uint32_t server, SimDisk::End end) {
  Node& node = nodes_[server];
  if (!node.engine) {
    return;
  }
  node.disk->Stop();
  node.dialer.reset();
  node.engine.reset();
  node.session.reset();
  node.disk->Restart(end);
  node.version.reset();
  node.incarnation = 0;
  node.in_sync.clear();
}

void EngineCluster::StartLife(uint32_t server) {
  Node& node = nodes_[server];
  ASSERT_EQ(node.engine, nullptr);
  node.mailbox = std::make_shared<Mailbox>();
  node.dialer = std::make_unique<Dialer>(this, server);
  ShardEngine::Options options;
  options.job = job_;
  options.name = NameOf(server);
  options.data_dir = absl::StrCat("/data/", server);
  options.disk = node.disk.get();
  options.clock = MonotonicNow;
  options.blocking = [](std::function<void()> task) { task(); };
  options.dialer = node.dialer.get();
  node.engine = std::make_unique<ShardEngine>(options, node.mailbox);
  ASSERT_EQ(node.engine->Open(), absl::OkStatus());
  node.join.Clear();
  node.engine->FillJoin(&node.join);
  node.incarnation = ++incarnations_;
  v1::JoinReply admission;
  admission.set_incarnation(node.incarnation);
  admission.set_timeline(1);
  admission.set_run_id(kRunId);
  node.session = std::make_unique<Session>(this, server, admission);
  ASSERT_EQ(node.engine->Start(node.session.get()), absl::OkStatus());
  if (node.ever_loaded && options_.durability != Durability::kCheckpoint) {
    // What a coordinator judges (docs/PROTOCOL.md, section 6).
    std::map<uint32_t, uint64_t> redoable;
    for (const v1::HeldChunks& held : node.join.held()) {
      for (const v1::ChunkRange& range : held.chunks()) {
        for (uint32_t i = 0; i < range.count(); ++i) {
          EXPECT_LE(held.version(), committed());
          redoable[range.first() + i] = held.redoable();
        }
      }
    }
    for (uint32_t chunk = 0; chunk < owner_.size(); ++chunk) {
      if (owner_[chunk] == server) {
        ASSERT_TRUE(redoable.contains(chunk)) << NameOf(server) << " " << chunk;
        EXPECT_GE(redoable[chunk],
                  committed() + (node.voted > committed() ? 1 : 0))
            << NameOf(server) << " chunk " << chunk;
      }
    }
  }
  DirectAll();
}

void EngineCluster::Want(const std::vector<uint32_t>& chunks, uint32_t server) {
  for (const uint32_t chunk : chunks) {
    wanted_[chunk] = server;
  }
  DirectAll();
}

v1::ServerDirective EngineCluster::DirectiveOf(uint32_t server) const {
  const Node& node = nodes_[server];
  v1::ServerDirective directive;
  directive.set_timeline(1);
  directive.set_placement_version(placement_.placement_version());
  directive.add_workers(kFirstWorker);
  uint64_t after = node.version.value_or(0);
  if (!node.version) {
    directive.set_task(v1::SERVER_LOAD);
    directive.set_load_step(committed());
    directive.set_load_own(options_.durability != Durability::kCheckpoint);
    after = std::numeric_limits<uint64_t>::max();
    for (const v1::HeldChunks& held : node.join.held()) {
      after = std::min(after, held.version());
    }
  } else {
    directive.set_task(v1::SERVER_RUN);
    directive.set_collecting_step(committed() + 1);
  }
  for (const v1::Decision& decision : decisions_) {
    if (decision.step() > after) {
      *directive.add_decisions() = decision;
    }
  }
  const auto order =
      [this](uint32_t other, uint32_t chunk,
             google::protobuf::RepeatedPtrField<v1::ReplicaOrder>* orders) {
        if (!IsAlive(other) || !nodes_[other].version) {
          return;
        }
        v1::ReplicaOrder* found = nullptr;
        for (v1::ReplicaOrder& entry : *orders) {
          found = entry.server() == NameOf(other) ? &entry : found;
        }
        if (found == nullptr) {
          found = orders->Add();
          found->set_server(NameOf(other));
          found->set_address(absl::StrCat(other));
          found->set_incarnation(nodes_[other].incarnation);
          found->set_standing(standing_);
        }
        v1::ChunkRange* range = found->add_chunks();
        range->set_first(chunk);
        range->set_count(1);
      };
  for (uint32_t chunk = 0; chunk < owner_.size(); ++chunk) {
    const auto to =
        standing_ ? static_cast<uint32_t>((owner_[chunk] + 1) % nodes_.size())
                  : wanted_[chunk];
    if (owner_[chunk] == server && to != server) {
      order(to, chunk, directive.mutable_replicate());
    } else if (to == server && owner_[chunk] != server) {
      order(owner_[chunk], chunk, directive.mutable_receive());
    }
  }
  return directive;
}

void EngineCluster::DirectAll() {
  for (uint32_t i = 0; i < nodes_.size(); ++i) {
    if (IsAlive(i)) {
      v1::PollReply reply;
      reply.set_number(++nodes_[i].directive_number);
      *reply.mutable_server() = DirectiveOf(i);
      nodes_[i].engine->Deliver(reply);
    }
  }
}

void EngineCluster::Hear(uint32_t server, const v1::ReportRequest& report) {
  Node& node = nodes_[server];
  if (report.has_loaded()) {
    node.version = report.loaded().step();
    node.ever_loaded = true;
    DirectAll();
  } else if (report.has_vote() && report.vote().step() == committed() + 1) {
    node.voted = report.vote().step();
    node.in_sync = {report.vote().in_sync().begin(),
                    report.vote().in_sync().end()};
  } else if (report.has_confirm()) {
    node.version = std::max(node.version.value_or(0), report.confirm().step());
  } else if (report.has_state_digests()) {
    node.digests = report.state_digests();
  }
}

bool EngineCluster::StepAll() {
  bool busy = false;
  for (uint32_t i = 0; i < nodes_.size(); ++i) {
    if (disturb) {
      disturb();
    }
    if (!IsAlive(i)) {
      continue;
    }
    ++engine_steps;
    const bool worked = nodes_[i].engine->Step();
    busy |= worked || nodes_[i].disk->PumpOne();
    EXPECT_TRUE(nodes_[i].engine->failure().ok())
        << NameOf(i) << ": " << nodes_[i].engine->failure();
  }
  return busy;
}

// False: somebody died.
bool EngineCluster::RunUntil(const std::function<bool()>& done) {
  absl::Time idle_since = MonotonicNow();
  while (!done()) {
    if (!AllAlive()) {
      return false;
    }
    if (StepAll()) {
      idle_since = MonotonicNow();
    }
    if (MonotonicNow() - idle_since > absl::Seconds(20) ||
        ::testing::Test::HasFailure()) {
      ADD_FAILURE() << "nothing happens any more";
      return false;
    }
  }
  return true;
}

bool EngineCluster::PushTo(uint32_t server, uint64_t step) {
  const auto client = StreamClient::Open(
      nodes_[server].mailbox, nodes_[server].engine->push(), ++streams_);
  if (PushThrough(client.get(), server, step)) {
    return true;
  }
  client->Vanish();  // Or its credit would never come back.
  return false;
}

bool EngineCluster::PushThrough(StreamClient* client, uint32_t server,
                                uint64_t step) {
  uint64_t sent = 0;
  for (size_t c = table_->chunks().size(); c-- > 0;) {
    const Chunk& chunk = table_->chunks()[c];
    const TensorSpec& tensor = table_->tensor_of(chunk.id);
    for (uint32_t use = 0; owner_[c] == server && use < tensor.use_count;
         ++use) {
      const Span whole = {0, kMicroBatches};
      for (const Span& span : {LeftChild(whole), RightChild(whole)}) {
        auto values = std::make_shared<std::vector<float>>(
            NodeGradient(tensor, chunk.tensor, step, use, span));
        BulkHeader header;
        header.kind = BulkKind::kPush;
        header.timeline = 1;
        header.step = step;
        header.incarnation = kFirstWorker;
        header.placement_version = placement_.placement_version();
        header.sequence = ++sent;
        BulkItem item;
        item.chunk = chunk.id;
        item.use = use;
        item.span = span;
        item.elem_count = chunk.elem_count();
        item.payload_bytes = chunk.elem_count() * 4;
        item.has_loss =
            chunk.id == table_->loss_chunk() && use == table_->loss_use();
        item.loss = 0.5;
        header.items = {item};
        if (!RunUntil([&] { return client->hellos > 0; })) {
          return false;
        }
        client->Send(MakeBulkMessage(
            header,
            {{reinterpret_cast<const std::byte*>(values->data() + chunk.begin),
              item.payload_bytes, values}}));
        if (!RunUntil([&] {
              return client->answers >= sent || !client->error.ok();
            })) {
          return false;
        }
        EXPECT_EQ(client->error, absl::OkStatus());
      }
    }
  }
  client->HalfClose();
  return RunUntil([&] { return client->over; });
}

bool EngineCluster::Push(uint64_t step) {
  for (uint32_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].voted < step && !PushTo(i, step)) {
      return false;
    }
  }
  return true;
}

void EngineCluster::Decide(uint64_t step) {
  v1::Decision decision;
  decision.set_timeline(1);
  decision.set_step(step);
  decision.set_grad_scale(0.125f / static_cast<float>(step));
  decision.set_learning_rate(1e-2f);
  decision.set_bias1(0.1f);
  decision.set_bias2(0.05f);
  decision.set_skip(step % 5 == 0);
  for (uint32_t from = 0; from < nodes_.size(); ++from) {
    for (const v1::ReplicaOrder& synced : nodes_[from].in_sync) {
      for (uint32_t to = 0; to < nodes_.size(); ++to) {
        // Of the life that lives now: another may not have it.
        if (synced.server() != NameOf(to) || synced.standing() ||
            synced.incarnation() != nodes_[to].incarnation) {
          continue;
        }
        v1::ChunkMove move;
        move.set_from(from);
        move.set_to(to);
        for (const v1::ChunkRange& range : synced.chunks()) {
          for (uint32_t i = 0; i < range.count(); ++i) {
            const uint32_t chunk = range.first() + i;
            if (owner_[chunk] == from && wanted_[chunk] == to) {
              v1::ChunkRange* one = move.add_chunks();
              one->set_first(chunk);
              one->set_count(1);
              owner_[chunk] = to;
              ++moves_made_;
            }
          }
        }
        if (move.chunks_size() > 0) {
          *decision.add_moves() = move;
        }
      }
    }
  }
  if (decision.moves_size() > 0) {
    placement_.set_placement_version(placement_.placement_version() + 1);
    *placement_.mutable_owner() = {owner_.begin(), owner_.end()};
    decision.set_placement_version(placement_.placement_version());
  }
  decisions_.push_back(decision);
  DirectAll();
}

void EngineCluster::TrainThrough(uint64_t step) {
  int lives = 0;
  while (!::testing::Test::HasFailure()) {
    for (uint32_t i = 0; i < nodes_.size(); ++i) {
      if (!IsAlive(i)) {
        ASSERT_LT(++lives, 200);
        StartLife(i);
      }
    }
    const auto all_at = [this](uint64_t version) {
      return std::all_of(nodes_.begin(), nodes_.end(),
                         [version](const Node& node) {
                           return node.version && *node.version >= version;
                         });
    };
    if (!RunUntil([&] { return all_at(committed()); })) {
      continue;
    }
    if (committed() >= step) {
      return;
    }
    const uint64_t next = committed() + 1;
    if (Push(next) && RunUntil([&] {
          return std::all_of(
              nodes_.begin(), nodes_.end(),
              [next](const Node& node) { return node.voted >= next; });
        })) {
      Decide(next);
    }
  }
}

void EngineCluster::BreakCopies() {
  for (const auto& weak : ends_) {
    if (const auto end = weak.lock()) {
      end->Break();
    }
  }
  ends_.clear();
}

std::map<uint32_t, std::string> EngineCluster::State() {
  std::map<uint32_t, std::string> state;
  for (uint32_t i = 0; i < nodes_.size(); ++i) {
    nodes_[i].digests.reset();
    v1::ServerDirective directive = DirectiveOf(i);
    directive.set_state_hash_wanted(true);
    directive.set_state_hash_step(committed());
    v1::PollReply reply;
    reply.set_number(++nodes_[i].directive_number);
    *reply.mutable_server() = directive;
    nodes_[i].engine->Deliver(reply);
    EXPECT_TRUE(RunUntil([&] { return nodes_[i].digests.has_value(); }));
    if (!nodes_[i].digests) {
      break;
    }
    for (const v1::ChunkDigests& chunk : nodes_[i].digests->chunks()) {
      EXPECT_EQ(owner_[chunk.chunk()], i);
      EXPECT_TRUE(
          state.emplace(chunk.chunk(), HashHex(HashBytes(chunk.digests())))
              .second)
          << "chunk " << chunk.chunk() << " is at two servers";
    }
  }
  return state;
}

std::shared_ptr<StreamClient> EngineCluster::OpenCopies(uint32_t server) {
  return StreamClient::Open(nodes_[server].mailbox,
                            nodes_[server].engine->replicate(), ++streams_);
}

absl::Status EngineCluster::Fetch(uint32_t server, uint32_t chunk,
                                  uint64_t version,
                                  uint64_t placement_version) {
  Node& node = nodes_[server];
  const auto client =
      StreamClient::Open(node.mailbox, node.engine->fetch(), ++streams_);
  BulkHeader header;
  header.kind = BulkKind::kFetchRequest;
  header.timeline = 1;
  header.step = version;
  header.incarnation = kFirstWorker;
  header.placement_version = placement_version;
  header.sequence = 1;
  header.items.resize(1);
  header.items[0].chunk = chunk;
  header.items[0].field = kServedField;
  client->Send(MakeBulkMessage(header));
  if (!RunUntil([&] { return client->answers > 0 || !client->error.ok(); })) {
    return absl::UnavailableError("somebody died");
  }
  client->HalfClose();
  EXPECT_TRUE(RunUntil([&] { return client->over; }));
  return client->error;
}

}  // namespace ballast::testing
