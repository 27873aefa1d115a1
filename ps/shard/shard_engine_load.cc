// SPDX-License-Identifier: Apache-2.0
// How an engine takes its memory and loads its chunks; the rest is in
// shard_engine.cc.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "common/units.h"
#include "ps/shard/shard_engine.h"

namespace ballast {
namespace {

constexpr absl::Duration kLoadShownEvery = absl::Seconds(2);
constexpr absl::Duration kOldMemoryMax = absl::Seconds(5);

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

absl::Status ShardEngine::MakePlan(const std::vector<uint32_t>& owned,
                                   uint32_t servers) {
  ResidencyRequest request;
  request.budget_bytes = options_.job.server.memory;
  request.workers = view_.workers_planned;
  const auto footprint = [this](uint32_t id) {
    const Chunk& chunk = view_.table->chunk(id);
    const TensorSpec& tensor = view_.table->tensor_of(id);
    const RecordLayout layout =
        RecordLayout::For(tensor, chunk, options_.job.optimizer.kind);
    return ChunkFootprint{layout.total_bytes, layout.prefix_bytes,
                          chunk.elem_count() * sizeof(float), tensor.use_count};
  };
  uint64_t owned_bytes = 0;
  for (const uint32_t id : owned) {
    request.chunks.push_back(footprint(id));
    owned_bytes += request.chunks.back().record_bytes;
  }
  // Chunks may come from other servers: a new one has room for its share.
  request.copy_sources = std::max<uint32_t>(1, servers - 1);
  uint64_t all_bytes = 0;
  for (const Chunk& chunk : view_.table->chunks()) {
    const ChunkFootprint bytes = footprint(chunk.id);
    all_bytes += bytes.record_bytes;
    if (bytes.record_bytes > request.largest.record_bytes) {
      request.largest = bytes;
    }
  }
  for (uint32_t id = 0;
       owned_bytes < all_bytes / servers && id < view_.table->chunks().size();
       ++id) {
    if (!std::binary_search(owned.begin(), owned.end(), id)) {
      request.chunks.push_back(footprint(id));
      owned_bytes += request.chunks.back().record_bytes;
    }
  }
  absl::StatusOr<ResidencyPlan> plan = PlanResidency(request);
  if (absl::IsResourceExhausted(plan.status())) {
    // Trying again will not help: it is the configuration that is wrong.
    return absl::InvalidArgumentError(plan.status().message());
  }
  BALLAST_ASSIGN_OR_RETURN(view_.plan, std::move(plan));
  view_.plan.tiers.resize(owned.size());
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
  const auto servers = static_cast<uint32_t>(placement.servers_size());
  self_ = servers;
  for (uint32_t i = 0; i < servers; ++i) {
    if (placement.servers(static_cast<int>(i)).name() == options_.name) {
      self_ = i;
    }
  }
  BALLAST_RETURN_IF_ERROR(MakePlan(owned, std::max<uint32_t>(1, servers)));

  const ResidencyPlan& plan = view_.plan;
  auto memory = std::make_shared<ShardMemory>();
  BALLAST_RETURN_IF_ERROR(
      MakeArena("chunks", plan.resident_bytes, kPageBytes, &memory->resident));
  BALLAST_RETURN_IF_ERROR(
      MakeArena("window", plan.window_bytes, kPageBytes, &memory->window));
  BALLAST_RETURN_IF_ERROR(MakeArena("gradients",
                                    plan.gradient_bytes + plan.scratch_bytes,
                                    // Goes to the log without a copy then.
                                    kPageBytes, &memory->gradients));
  if (plan.scratch_bytes > 0) {
    BALLAST_ASSIGN_OR_RETURN(
        memory->scratch,
        memory->gradients->Allocate(plan.scratch_bytes, "scratch"));
  }
  view_.memory = memory;

  BALLAST_RETURN_IF_ERROR(OpenSpill(plan.log_buffer_bytes));
  const auto fail = [this](const absl::Status& status) {
    FailUnlessFull(status);
  };
  pool_ = GradientPool();
  pool_.arena = memory->gradients.get();
  pool_.scratch = memory->scratch.data();
  pool_.log = durable() ? log_.get() : spill_.get();
  pool_.spill = spill_.get();
  pool_.mailbox = mailbox_;
  pool_.fail = fail;
  pool_.completed = [this](uint32_t chunk, uint64_t step, uint64_t bytes) {
    TellGradient(chunk, step, bytes);
  };
  if (durable()) {
    pool_.keep_all = true;
    pool_.may_append = [this](uint64_t bytes) { return MayAppend(bytes); };
  }

  ChunkStore::Options store;
  store.run = *run_;
  store.slab = slab_.get();
  store.resident = memory->resident.get();
  store.window = memory->window.get();
  store.mailbox = mailbox_;
  store.fail = fail;
  BALLAST_ASSIGN_OR_RETURN(
      chunks_, ChunkStore::Create(store, *view_.table, owned,
                                  options_.job.optimizer.kind, plan.tiers));
  SetShapes();
  return durable() ? PlanLog() : absl::OkStatus();
}

void ShardEngine::SetShapes() {
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
}

void ShardEngine::ObeyLoad() {
  const uint64_t wanted = directive_->timeline();
  if (load_phase_ != LoadPhase::kNone && load_directive_.timeline() == wanted) {
    return;  // It is being done.
  }
  if (loaded_ == wanted) {
    ReportLoaded();
    return;
  }
  load_directive_ = *directive_;
  Forget();
  load_phase_ = LoadPhase::kSettling;
}

void ShardEngine::ReportLoaded() {
  v1::ReportRequest request;
  request.mutable_loaded()->set_step(version_);
  Report(std::move(request));
}

// The disk may still be at work for the old timeline, with our memory; it is
// waited for in IsSettled.
void ShardEngine::Forget() {
  view_.loaded = false;
  loaded_.reset();
  load_.reset();
  redo_.reset();
  CloseLinks();
  replica_target_.Reset(
      absl::AbortedError("this server loads another version"));
  taking_in_.reset();
  made_.reset();
  coming_.clear();
  going_.clear();
  view_.incoming.clear();
  history_.clear();
  vote_held_since_.reset();
  fetch_.Reset(absl::AbortedError("this server loads another version"));
  push_.Reset(absl::AbortedError("this server loads another version"));
  collecting_.reset();
  update_.reset();
  decisions_.clear();
  digests_wanted_ = false;
  ++vote_round_;
  if (checkpoints_) {
    checkpoints_->Abandon();
    bases_ ? bases_->Abandon() : void();
  }
  load_began_ = now_;
}

bool ShardEngine::IsSettled() const {
  return pool_.in_flight == 0 && blocking_.in_flight() == 0 &&
         replica_target_.in_flight() == 0 && AreLinksIdle() &&
         (!chunks_ || chunks_->in_flight() == 0);
}

absl::Status ShardEngine::Load(bool* worked) {
  switch (load_phase_) {
    case LoadPhase::kNone:
      return absl::OkStatus();
    case LoadPhase::kSettling:
      if (!IsSettled()) {
        return absl::OkStatus();
      }
      checkpoints_.reset();
      bases_.reset();
      chunks_.reset();
      if (durable()) {
        book_.SetBases(slab_->bases());  // Of a commit that nobody awaited.
      }
      old_memory_ = view_.memory;
      view_.memory.reset();
      AskPlacement();
      load_phase_ = LoadPhase::kPlacement;
      *worked = true;
      return absl::OkStatus();
    case LoadPhase::kPlacement:
      // Replies on their way hold the memory they point into; their streams
      // were broken off.
      if (!placement_answer_ ||
          (!old_memory_.expired() && now_ - load_began_ < kOldMemoryMax)) {
        return absl::OkStatus();
      }
      *worked = true;
      return BeginLoad();
    case LoadPhase::kChunks:
      ShowLoad();
      BALLAST_RETURN_IF_ERROR(load_->Work(worked));
      if (load_->IsDone()) {
        load_phase_ = LoadPhase::kRedo;
        *worked = true;
      }
      return absl::OkStatus();
    case LoadPhase::kRedo:
      ShowLoad();
      BALLAST_RETURN_IF_ERROR(redo_->Work(worked));
      if (redo_->IsDone()) {
        load_phase_ = LoadPhase::kBases;
        if (durable() && load_->loaded() > 0) {
          bases_->Start();  // What did not come from our own disk.
        }
        *worked = true;
      }
      return absl::OkStatus();
    case LoadPhase::kBases:
      if (durable()) {
        bases_->Work();
      }
      if (!durable() || !bases_->active()) {
        FinishLoad();
        *worked = true;
      }
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

void ShardEngine::ShowLoad() {
  if (now_ - load_shown_ < kLoadShownEvery) {
    return;
  }
  load_shown_ = now_;
  LogEvent(Severity::kInfo, "loading",
           {{"version", load_directive_.load_step()},
            {"chunks", load_->loaded() + redo_->loaded()},
            {"of", chunks_->chunks().size()},
            {"gradients_to_redo", redo_->gradients()}});
}

void ShardEngine::AskPlacement() {
  placement_answer_.reset();
  const uint64_t question = ++placement_asked_;
  session_->AskPlacement([this, question, mailbox = mailbox_](
                             const absl::StatusOr<v1::Placement>& placement) {
    mailbox->Post([this, question, placement] {
      if (question == placement_asked_) {
        placement_answer_ = placement;
      }
    });
  });
}

absl::Status ShardEngine::BeginLoad() {
  BALLAST_ASSIGN_OR_RETURN(const v1::Placement placement,
                           *std::exchange(placement_answer_, std::nullopt));
  if (placement.optimizer() != NameOf(options_.job.optimizer.kind)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the placement is for ", placement.optimizer(), ", optimizer.name is ",
        NameOf(options_.job.optimizer.kind)));
  }
  view_.timeline = load_directive_.timeline();
  view_.placement_version = placement.placement_version();
  spill_.reset();
  BALLAST_RETURN_IF_ERROR(TakeMemory(placement));
  MakeParts();
  LoadPass::Options load;
  load.timeline = load_directive_.timeline();
  load.step = load_directive_.load_step();
  load.seed = options_.job.run.seed;
  load.manifest = load_directive_.load_manifest();
  load.data_dir = options_.data_dir;
  load.run = *run_;
  load.disk = options_.disk;
  load.slab = slab_.get();
  load.chunks = chunks_.get();
  load.exact = durable();
  RedoPass::Options redo;
  redo.step = load.step;
  for (const v1::Decision& decision : load_directive_.decisions()) {
    if (decision.step() <= load.step) {
      redo.decisions.push_back(decision);  // Later ones come again.
    }
  }
  redo.optimizer = options_.job.optimizer;
  redo.micro_batches = view_.micro_batches;
  redo.chunks = chunks_.get();
  redo.pool = &pool_;
  redo.book = &book_;
  std::vector<size_t> own;
  BALLAST_RETURN_IF_ERROR(DivideChunks(&load, &own));
  load_ = std::make_unique<LoadPass>(std::move(load));
  redo_ = std::make_unique<RedoPass>(std::move(redo));
  load_phase_ = LoadPhase::kChunks;
  load_shown_ = now_;
  BALLAST_RETURN_IF_ERROR(redo_->Start(std::move(own)));
  return load_->Start(options_.job.optimizer.kind, view_.table->layout());
}

// Which chunks come from our own records and which are made.
absl::Status ShardEngine::DivideChunks(LoadPass::Options* load,
                                       std::vector<size_t>* own) {
  const std::vector<ChunkState>& chunks = chunks_->chunks();
  for (size_t i = 0; i < chunks.size(); ++i) {
    const bool has_base = durable() && load_directive_.load_own() &&
                          book_.Base(chunks[i].chunk.id) != nullptr;
    (has_base ? *own : load->places).push_back(i);
    if (!has_base && load_directive_.load_own() && load->manifest.empty() &&
        load->step > 0) {
      return absl::DataLossError(
          absl::StrCat(options_.data_dir, " has no record of chunk ",
                       chunks[i].chunk.id, " (", chunks[i].tensor->name,
                       "); want one that leads to version ", load->step));
    }
  }
  return absl::OkStatus();
}

// What works on the chunks.
void ShardEngine::MakeParts() {
  const auto fail = [this](const absl::Status& status) {
    FailUnlessFull(status);
  };
  CheckpointWriter::Options writer;
  writer.slab = slab_.get();
  writer.data_dir = options_.data_dir;
  writer.chunks = chunks_.get();
  writer.tasks = &blocking_;
  writer.fail = fail;
  writer.saved = [this](v1::CheckpointSaved saved) {
    v1::ReportRequest request;
    *request.mutable_checkpoint_saved() = std::move(saved);
    Report(std::move(request));
  };
  checkpoints_ = std::make_unique<CheckpointWriter>(writer);
  if (durable()) {
    BasePass::Options bases;
    bases.slab = slab_.get();
    bases.chunks = chunks_.get();
    bases.tasks = &blocking_;
    bases.book = &book_;
    bases.fail = fail;
    bases.advanced = [this] { DropLog(); };
    bases_ = std::make_unique<BasePass>(bases);
  }
  UpdatePass::Options update;
  update.chunks = chunks_.get();
  update.optimizer = options_.job.optimizer;
  update.save_now = [this](ChunkState* chunk) { checkpoints_->SaveNow(chunk); };
  update.fail = fail;
  update_ = std::make_unique<UpdatePass>(update);
  ReplicaTarget::Parts copies;
  copies.run = *run_;
  copies.optimizer = options_.job.optimizer.kind;
  copies.durable = durable();
  copies.slab = slab_.get();
  copies.log = pool_.log;
  copies.chunks = chunks_.get();
  copies.book = &book_;
  copies.tasks = &blocking_;
  copies.mailbox = mailbox_;
  copies.may_append = [this](uint64_t bytes) {
    return !durable() || MayAppend(bytes);
  };
  copies.fail = fail;
  replica_target_.Start(std::move(copies));
}

void ShardEngine::FinishLoad() {
  const uint64_t redone = redo_->gradients();
  load_.reset();
  redo_.reset();
  load_phase_ = LoadPhase::kNone;
  version_ = view_.decided_step = load_directive_.load_step();
  view_.collecting_step = 0;
  view_.loaded = true;
  loaded_ = load_directive_.timeline();
  fetch_.set_chunks(chunks_.get());
  if (!durable() && !slab_->bases().empty()) {
    // Of a time under durability `step`: this history has left them behind.
    std::vector<uint32_t> stale;
    for (const CheckpointEntry& base : slab_->bases()) {
      stale.push_back(base.chunk);
    }
    blocking_.Run(
        [slab = slab_.get(), stale] { return slab->DropBase(stale); },
        [this](const absl::Status& status) { FailUnlessFull(status); });
  }
  LogEvent(Severity::kInfo, "chunks_loaded",
           {{"chunks", chunks_->chunks().size()},
            {"version", version_},
            {"gradients_redone", redone},
            {"seconds", absl::ToDoubleSeconds(now_ - load_began_)},
            {"memory", FormatBytes(view_.plan.used_bytes)},
            {"smallest", FormatBytes(view_.plan.smallest_budget_bytes)}});
  if (durable()) {
    DropForeignBases();
  }
  ReportLoaded();
  directive_is_new_ = directive_->task() != v1::SERVER_LOAD;
}

}  // namespace ballast
