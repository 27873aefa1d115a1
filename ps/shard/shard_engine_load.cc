// SPDX-License-Identifier: Apache-2.0
// How an engine takes its memory and loads its chunks; the rest is in
// shard_engine.cc.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "common/units.h"
#include "ps/shard/chunk_loader.h"
#include "ps/shard/shard_engine.h"

namespace ballast {
namespace {

absl::string_view NameOf(OptimizerKind kind) {
  return kind == OptimizerKind::kAdamW ? "adamw" : "sgd";
}

absl::StatusOr<std::vector<uint32_t>> OwnedChunks(
    const v1::Placement& placement, const ChunkTable& table,
    const std::string& name) {
  if (static_cast<size_t>(placement.owner_size()) != table.chunks().size()) {
    return absl::InternalError(
        absl::StrCat("the placement has ", placement.owner_size(),
                     " chunks, the layout ", table.chunks().size()));
  }
  std::vector<uint32_t> owned;
  for (const Chunk& chunk : table.chunks()) {
    const uint32_t owner = placement.owner(static_cast<int>(chunk.id));
    if (owner >= static_cast<uint32_t>(placement.servers_size())) {
      return absl::InternalError(
          absl::StrCat("the placement gives chunk ", chunk.id, " to server ",
                       owner, " of ", placement.servers_size()));
    }
    if (placement.servers(static_cast<int>(owner)).name() == name) {
      owned.push_back(chunk.id);
    }
  }
  return owned;
}

absl::Status MakeArena(const std::string& what, uint64_t bytes,
                       uint64_t alignment, std::unique_ptr<Arena>* arena) {
  Arena::Options options;
  options.name = absl::StrCat("server.memory (", what, ")");
  options.bytes = bytes;
  options.alignment = alignment;
  BALLAST_ASSIGN_OR_RETURN(*arena, Arena::Create(options));
  return absl::OkStatus();
}

}  // namespace

absl::Status ShardEngine::MakePlan(const std::vector<uint32_t>& owned) {
  ResidencyRequest request;
  request.budget_bytes = options_.job.server.memory;
  request.workers = view_.workers_planned;
  for (const uint32_t id : owned) {
    const Chunk& chunk = view_.table->chunk(id);
    const TensorSpec& tensor = view_.table->tensor_of(id);
    const RecordLayout layout =
        RecordLayout::For(tensor, chunk, options_.job.optimizer.kind);
    request.chunks.push_back({layout.total_bytes, layout.prefix_bytes,
                              chunk.elem_count() * sizeof(float),
                              tensor.use_count});
  }
  absl::StatusOr<ResidencyPlan> plan = PlanResidency(request);
  if (absl::IsResourceExhausted(plan.status())) {
    // Trying again will not help: it is the configuration that is wrong.
    return absl::InvalidArgumentError(plan.status().message());
  }
  BALLAST_ASSIGN_OR_RETURN(view_.plan, std::move(plan));
  for (const BudgetItem& item : view_.plan.items) {
    LogEvent(Severity::kInfo, "memory_planned",
             {{"what", item.what}, {"bytes", FormatBytes(item.bytes)}});
  }
  return absl::OkStatus();
}

absl::Status ShardEngine::TakeMemory(const v1::Placement& placement) {
  BALLAST_ASSIGN_OR_RETURN(const ModelLayout layout,
                           ModelLayout::Decode(placement.layout()));
  BALLAST_ASSIGN_OR_RETURN(view_.table,
                           ChunkTable::Build(layout, placement.chunk_elems()));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<uint32_t> owned,
                           OwnedChunks(placement, *view_.table, options_.name));
  BALLAST_RETURN_IF_ERROR(MakePlan(owned));

  const ResidencyPlan& plan = view_.plan;
  auto memory = std::make_shared<ShardMemory>();
  BALLAST_RETURN_IF_ERROR(
      MakeArena("chunks", plan.resident_bytes, kPageBytes, &memory->resident));
  BALLAST_RETURN_IF_ERROR(
      MakeArena("window", plan.window_bytes, kPageBytes, &memory->window));
  BALLAST_RETURN_IF_ERROR(MakeArena("gradients",
                                    plan.gradient_bytes + plan.scratch_bytes,
                                    64, &memory->gradients));
  if (plan.scratch_bytes > 0) {
    BALLAST_ASSIGN_OR_RETURN(
        memory->scratch,
        memory->gradients->Allocate(plan.scratch_bytes, "scratch"));
  }
  view_.memory = memory;

  GradientLog::Options log;
  log.dir = options_.data_dir;
  log.run = run_;
  log.timeline = view_.timeline;
  log.buffer_bytes = plan.log_buffer_bytes;
  BALLAST_ASSIGN_OR_RETURN(log_, GradientLog::Open(log));
  const auto fail = [this](const absl::Status& status) { Fail(status); };
  pool_ = {memory->gradients.get(),
           memory->scratch.data(),
           false,
           log_.get(),
           mailbox_,
           fail,
           0};

  ChunkStore::Options store;
  store.run = run_;
  store.slab = slab_.get();
  store.resident = memory->resident.get();
  store.window = memory->window.get();
  store.mailbox = mailbox_;
  store.fail = fail;
  BALLAST_ASSIGN_OR_RETURN(
      chunks_, ChunkStore::Create(store, *view_.table, owned,
                                  options_.job.optimizer.kind, plan.tiers));
  std::vector<int64_t> positions(view_.table->chunks().size(), -1);
  loss_position_.reset();
  shapes_.clear();
  for (const ChunkState& chunk : chunks_->chunks()) {
    positions[chunk.chunk.id] = static_cast<int64_t>(shapes_.size());
    if (chunk.chunk.id == view_.table->loss_chunk()) {
      loss_position_ = shapes_.size();
    }
    shapes_.push_back({chunk.chunk.id, chunk.chunk.tensor,
                       chunk.tensor->use_count, chunk.layout.elem_count,
                       chunk.layout.block_elems});
  }
  push_.set_positions(std::move(positions));
  return absl::OkStatus();
}

absl::Status ShardEngine::Load() {
  const v1::ServerDirective directive = *directive_;
  view_.loaded = false;
  fetch_.set_chunks(nullptr);
  PublishStats();
  BALLAST_ASSIGN_OR_RETURN(const v1::Placement placement,
                           session_->GetPlacement());
  if (placement.optimizer() != NameOf(options_.job.optimizer.kind)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the placement is for ", placement.optimizer(), ", optimizer.name is ",
        NameOf(options_.job.optimizer.kind)));
  }
  // What an earlier life of the run left goes first.
  Settle();
  collecting_.reset();
  update_.reset();
  decisions_.clear();
  chunks_.reset();
  log_.reset();
  view_.memory.reset();

  view_.timeline = directive.timeline();
  view_.placement_version = placement.placement_version();
  BALLAST_RETURN_IF_ERROR(TakeMemory(placement));
  LoadRequest request;
  request.timeline = directive.timeline();
  request.step = directive.load_step();
  request.seed = options_.job.run.seed;
  request.manifest = directive.load_manifest();
  request.data_dir = options_.data_dir;
  request.run = run_;
  request.slab = slab_.get();
  request.mailbox = mailbox_.get();
  request.failure = [this] {
    PublishWhenDue();  // A load may take longer than a silence is borne.
    return failure_;
  };
  BALLAST_RETURN_IF_ERROR(LoadChunks(request, options_.job.optimizer.kind,
                                     view_.table->layout(), chunks_.get()));
  UpdatePass::Options update;
  update.chunks = chunks_.get();
  update.optimizer = options_.job.optimizer;
  update.save_now = [this](ChunkState* chunk) { checkpoints_->SaveNow(chunk); };
  update.fail = [this](const absl::Status& status) { Fail(status); };
  update_ = std::make_unique<UpdatePass>(update);
  version_ = view_.decided_step = directive.load_step();
  view_.collecting_step = 0;
  view_.loaded = true;
  fetch_.set_chunks(chunks_.get());
  LogEvent(Severity::kInfo, "chunks_loaded",
           {{"chunks", chunks_->chunks().size()},
            {"version", version_},
            {"memory", FormatBytes(view_.plan.used_bytes)},
            {"smallest", FormatBytes(view_.plan.smallest_budget_bytes)}});
  return absl::OkStatus();
}

void ShardEngine::Settle() {
  const auto in_flight = [this] {
    return pool_.in_flight + (chunks_ ? chunks_->in_flight() : 0);
  };
  while (in_flight() > 0) {
    mailbox_->Run(absl::Milliseconds(100));
  }
}

}  // namespace ballast
