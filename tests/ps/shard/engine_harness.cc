// SPDX-License-Identifier: Apache-2.0
#include "tests/ps/shard/engine_harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "common/clock.h"
#include "offload/residency.h"
#include "rpc/bulk_message.h"
#include "tests/ps/shard/shard_cluster.h"

namespace ballast::testing {
namespace {

constexpr uint64_t kPlacementVersion = 3;

// As small as it can be with a table used twice, of two chunks, and a tensor of
// less than a page.
ModelLayout TinyLayout() {
  ModelLayout layout = SmallLayout(DType::kF32);
  layout.tensors.resize(3);
  layout.tensors[2].shape = {300, 40};
  layout.units[1].tensors.resize(2);
  return layout;
}

uint64_t SmallestMemory(const ChunkTable& table) {
  ResidencyRequest request;
  request.budget_bytes = uint64_t{1} << 40;
  request.copy_sources = 1;
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
  request.budget_bytes = PlanResidency(request)->smallest_budget_bytes;
  return request.budget_bytes;
}

}  // namespace

class EngineHarness::Session final : public ShardSession {
 public:
  Session(EngineHarness* harness, v1::JoinReply admission)
      : harness_(harness), admission_(std::move(admission)) {}
  const v1::JoinReply& admission() const override { return admission_; }
  void Post(v1::ReportRequest request) override { harness_->Hear(request); }
  void AskPlacement(
      std::function<void(absl::StatusOr<v1::Placement>)> done) override {
    done(harness_->placement_);
  }

 private:
  EngineHarness* const harness_;
  const v1::JoinReply admission_;
};

// Keeps what the server writes; its end is told like gRPC tells it.
class EngineHarness::Stream final : public BulkStream {
 public:
  Stream(std::shared_ptr<Mailbox> mailbox, BulkStreamHandler* handler,
         uint64_t id)
      : mailbox_(std::move(mailbox)), handler_(handler), id_(id) {}
  void Read() override {}
  void Write(const grpc::ByteBuffer& message) override {
    const auto parsed = BulkMessage::Parse(message);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    if (parsed->header().kind == BulkKind::kError) {
      errors.push_back(parsed->error());
    } else if (parsed->header().kind == BulkKind::kPushAck) {
      ++acks;
    } else {
      ++hellos;
    }
    mailbox_->Post([h = handler_, id = id_] { h->OnWritten(id); });
  }
  void Finish(const absl::Status& status) override {
    end = status;
    mailbox_->Post([h = handler_, id = id_] { h->OnGone(id); });
  }
  void Cancel() override { Finish(absl::CancelledError("cancelled")); }

  uint64_t acks = 0;
  uint64_t hellos = 0;
  std::vector<absl::Status> errors;
  std::optional<absl::Status> end;

 private:
  const std::shared_ptr<Mailbox> mailbox_;
  BulkStreamHandler* const handler_;
  const uint64_t id_;
};

EngineHarness::EngineHarness(const HarnessOptions& options)
    : options_(options),
      layout_(options.tiny ? TinyLayout() : SmallLayout(DType::kF32)) {
  table_ = std::make_unique<ChunkTable>(
      *ChunkTable::Build(layout_, options.chunk_elems));
  job_.run.name = "test";
  job_.run.steps = 100;
  job_.run.seed = 7;
  job_.batch.micro_batches = kMicroBatches;
  job_.server.chunk_elems = options.chunk_elems;
  job_.server.durability = options.durability;
  job_.server.log_limit = options.log_limit;
  job_.server.memory =
      options.memory == 0 ? SmallestMemory(*table_) : options.memory;
  placement_.set_placement_version(kPlacementVersion);
  placement_.set_layout(layout_.Encode());
  placement_.set_chunk_elems(options.chunk_elems);
  placement_.set_optimizer("adamw");
  placement_.add_servers()->set_name("server-0");
  for (size_t i = 0; i < table_->chunks().size(); ++i) {
    placement_.add_owner(0);
  }
}

EngineHarness::~EngineHarness() { Kill(); }

void EngineHarness::Kill() {
  engine_.reset();
  session_.reset();
  reports_.clear();
  version_.reset();
}

absl::Status EngineHarness::StartLife() {
  Kill();
  mailbox_ = std::make_shared<Mailbox>();
  ShardEngine::Options options;
  options.job = job_;
  options.name = "server-0";
  options.data_dir = options_.dir;
  options.disk = options_.disk;
  options.clock = [this] { return MonotonicNow() + clock_ahead; };
  options.blocking = [](std::function<void()> task) { task(); };
  engine_ = std::make_unique<ShardEngine>(options, mailbox_);
  absl::Status status = engine_->Open();
  if (!status.ok()) {
    return status;
  }
  join_.Clear();
  engine_->FillJoin(&join_);
  v1::JoinReply admission;
  admission.set_incarnation(++incarnation_);
  admission.set_timeline(timeline_);
  admission.set_run_id(options_.run);
  session_ = std::make_unique<Session>(this, admission);
  status = engine_->Start(session_.get());
  if (!status.ok()) {
    return status;
  }
  if (ever_loaded_ && options_.durability != Durability::kCheckpoint) {
    // What a coordinator judges (docs/PROTOCOL.md, section 6).
    std::vector<bool> covered(table_->chunks().size());
    for (const v1::HeldChunks& held : join_.held()) {
      EXPECT_LE(held.version(), committed());
      EXPECT_GE(held.redoable(),
                committed() + (voted(committed() + 1) ? 1 : 0));
      for (const v1::ChunkRange& range : held.chunks()) {
        for (uint32_t i = 0; i < range.count(); ++i) {
          covered[range.first() + i] = true;
        }
      }
    }
    EXPECT_EQ(std::count(covered.begin(), covered.end(), false), 0);
  }
  Direct();
  return absl::OkStatus();
}

v1::ServerDirective EngineHarness::MakeDirective() const {
  v1::ServerDirective directive;
  directive.set_timeline(timeline_);
  directive.set_placement_version(kPlacementVersion);
  for (int i = 0; i < workers_; ++i) {
    directive.add_workers(kFirstWorker + static_cast<uint64_t>(i));
  }
  uint64_t after = version_.value_or(0);
  if (!version_) {
    directive.set_task(v1::SERVER_LOAD);
    directive.set_load_step(committed());
    directive.set_load_own(options_.durability != Durability::kCheckpoint);
    after = join_.held().empty() ? 0 : std::numeric_limits<uint64_t>::max();
    for (const v1::HeldChunks& held : join_.held()) {
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
  return directive;
}

void EngineHarness::Deliver(const v1::ServerDirective& directive) {
  v1::PollReply reply;
  reply.set_number(++number_);
  *reply.mutable_server() = directive;
  engine_->Deliver(reply);
}

void EngineHarness::Direct() { Deliver(MakeDirective()); }

void EngineHarness::Hear(const v1::ReportRequest& report) {
  if (report.timeline() != timeline_) {
    return;  // As a real coordinator.
  }
  reports_.push_back(report);
  if (report.has_loaded()) {
    version_ = report.loaded().step();
    ever_loaded_ = true;
    Direct();
  } else if (report.has_vote()) {
    ++votes_heard;
    const auto [place, is_new] = votes_.insert(
        {{timeline_, report.vote().step()}, report.vote().SerializeAsString()});
    EXPECT_EQ(place->second, report.vote().SerializeAsString())
        << "another vote for step " << report.vote().step();
  } else if (report.has_confirm()) {
    version_ = std::max(version_.value_or(0), report.confirm().step());
  }
}

bool EngineHarness::RunUntil(const std::function<bool()>& done,
                             absl::Duration patience) {
  absl::Time idle_since = MonotonicNow();
  while (!done()) {
    if (steps_left == 0 || engine_ == nullptr || engine_->over() ||
        MonotonicNow() - idle_since > patience) {
      return false;
    }
    --steps_left;
    if (engine_->Step()) {
      idle_since = MonotonicNow();
      continue;
    }
    if (options_.pump) {
      options_.pump();
    } else {
      mailbox_->Wait(absl::Milliseconds(2));
    }
  }
  return true;
}

bool EngineHarness::WaitLoaded() {
  return RunUntil([this] { return version_.has_value(); });
}

bool EngineHarness::HoldsVote() const {
  const uint64_t step = committed() + 1;
  return std::all_of(join_.held().begin(), join_.held().end(),
                     [step](const v1::HeldChunks& held) {
                       return held.redoable() >= step;
                     }) &&
         !join_.held().empty();
}

// Micro-batches in an order in which most wait for a sibling.
bool EngineHarness::Push(uint64_t step) {
  const uint64_t id = next_stream_++;
  auto stream = std::make_shared<Stream>(mailbox_, engine_->push(), id);
  mailbox_->Post([this, id, stream] { engine_->push()->OnOpen(id, stream); });
  uint64_t sent = 0;
  for (size_t c = table_->chunks().size(); c-- > 0;) {
    const Chunk& chunk = table_->chunks()[c];
    const TensorSpec& tensor = table_->tensor_of(chunk.id);
    for (uint32_t use = 0; use < tensor.use_count; ++use) {
      for (const uint32_t first : {1u, 3u, 5u, 0u, 4u, 2u}) {
        const Span span = {first, 1};
        auto values = std::make_shared<std::vector<float>>(
            NodeGradient(tensor, chunk.tensor, step, use, span));
        BulkHeader header;
        header.kind = BulkKind::kPush;
        header.timeline = timeline_;
        header.step = step;
        header.incarnation = kFirstWorker;
        header.placement_version = kPlacementVersion;
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
        // One at a time: a worker with little credit.
        if (!RunUntil([&] { return stream->hellos > 0; })) {
          stream->Cancel();
          return false;
        }
        auto message =
            std::make_shared<absl::StatusOr<BulkMessage>>(BulkMessage::Parse(
                MakeBulkMessage(header, {{reinterpret_cast<const std::byte*>(
                                              values->data() + chunk.begin),
                                          item.payload_bytes, values}})));
        mailbox_->Post([this, id, message] {
          engine_->push()->OnMessage(id, std::move(*message));
        });
        if (!RunUntil([&] {
              return stream->acks >= sent || !stream->errors.empty();
            })) {
          stream->Cancel();
          return false;
        }
        EXPECT_TRUE(stream->errors.empty()) << stream->errors.front();
      }
    }
  }
  mailbox_->Post([this, id] { engine_->push()->OnHalfClose(id); });
  return RunUntil([&] { return stream->end.has_value(); });
}

bool EngineHarness::WaitVote(uint64_t step) {
  const uint64_t heard = votes_heard;
  return RunUntil([&] { return voted(step) || votes_heard > heard; });
}

void EngineHarness::Decide(uint64_t step) {
  v1::Decision decision;
  decision.set_timeline(timeline_);
  decision.set_step(step);
  decision.set_grad_scale(0.125f / static_cast<float>(step));
  decision.set_learning_rate(1e-2f);
  decision.set_bias1(0.1f);
  decision.set_bias2(0.05f);
  decision.set_skip(skipped_.contains(step));
  decision.set_checkpoint(checkpointed_.contains(step));
  decisions_.push_back(decision);
  Direct();
}

bool EngineHarness::WaitConfirm(uint64_t step) {
  return RunUntil([&] { return version_ && *version_ >= step; });
}

bool EngineHarness::TrainThrough(uint64_t step) {
  if (!WaitLoaded()) {
    return false;
  }
  while (*version_ < step) {
    const uint64_t next = committed() + 1;
    if (*version_ < committed()) {
      if (!WaitConfirm(committed())) {
        return false;
      }
      continue;
    }
    if (!HoldsVote() || next > committed() + 1 || !voted(next)) {
      if (!Push(next) || !WaitVote(next)) {
        return false;
      }
    }
    Decide(next);
    if (!WaitConfirm(next)) {
      return false;
    }
  }
  return true;
}

void EngineHarness::Branch(uint64_t step) {
  ++timeline_;
  decisions_.resize(step);
  version_.reset();
  join_.Clear();
}

int EngineHarness::StreamsWithCredit(int count) {
  workers_ = count;
  Direct();
  std::vector<std::shared_ptr<Stream>> streams;
  for (int i = 0; i < count; ++i) {
    const uint64_t id = next_stream_++;
    streams.push_back(std::make_shared<Stream>(mailbox_, engine_->push(), id));
    mailbox_->Post([this, id, stream = streams.back()] {
      engine_->push()->OnOpen(id, stream);
    });
  }
  const auto with_credit = [&] {
    return static_cast<int>(
        std::count_if(streams.begin(), streams.end(),
                      [](const auto& s) { return s->hellos > 0; }));
  };
  RunUntil([&] { return with_credit() == count; }, absl::Milliseconds(200));
  return with_credit();
}

std::optional<v1::Confirm> EngineHarness::confirm(uint64_t step) const {
  for (const v1::ReportRequest& report : reports_) {
    if (report.has_confirm() && report.confirm().step() == step) {
      return report.confirm();
    }
  }
  return std::nullopt;
}

std::string EngineHarness::StateOf(uint64_t version) {
  v1::ServerDirective directive = MakeDirective();
  directive.set_state_hash_wanted(true);
  directive.set_state_hash_step(version);
  Deliver(directive);
  std::string digests;
  EXPECT_TRUE(RunUntil([&] {
    for (const v1::ReportRequest& report : reports_) {
      if (report.has_state_digests() &&
          report.state_digests().step() == version) {
        digests = report.state_digests().SerializeAsString();
        return true;
      }
    }
    return false;
  }));
  return digests;
}

}  // namespace ballast::testing
