// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/shard_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/check.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/memory_setup.h"
#include "common/status_macros.h"
#include "common/units.h"
#include "ps/shard/chunk_loader.h"

namespace ballast {
namespace {

constexpr absl::Duration kIdleWait = absl::Milliseconds(50);
constexpr absl::Duration kStatsEvery = absl::Milliseconds(20);

}  // namespace

ShardEngine::ShardEngine(const Options& options,
                         std::shared_ptr<Mailbox> mailbox)
    : options_(options),
      mailbox_(std::move(mailbox)),
      now_(MonotonicNow()),
      fetch_(&view_, mailbox_),
      push_(&view_) {}

ShardEngine::~ShardEngine() { Drain(); }

void ShardEngine::Deliver(const v1::PollReply& reply) {
  if (!reply.has_server()) {
    return;
  }
  mailbox_->Post([this, directive = reply.server()] {
    directive_ = directive;
    directive_is_new_ = true;
  });
}

void ShardEngine::SessionOver(const absl::Status& why) {
  mailbox_->Post([this, why] {
    session_over_ = true;
    Fail(why);
  });
}

v1::MemberStats ShardEngine::stats() const {
  MutexLock lock(&stats_mutex_);
  return stats_;
}

void ShardEngine::Fail(const absl::Status& status) {
  if (failure_.ok() && !status.ok()) {
    failure_ = status;
    LogEvent(Severity::kError, "server_failed", {{"why", status.ToString()}});
  }
}

void ShardEngine::Report(v1::ReportRequest request) {
  request.set_timeline(view_.timeline);
  PublishStats();
  session_->Post(std::move(request));
}

absl::Status ShardEngine::Open() {
  const v1::JoinReply& admission = session_->admission();
  const std::optional<Hash128> run = ParseHashHex(admission.run_id());
  if (!run) {
    return absl::InternalError(
        absl::StrCat("the coordinator named run '", admission.run_id(),
                     "'; want 32 lower-case hex digits"));
  }
  run_ = *run;
  view_.incarnation = admission.incarnation();
  view_.timeline = admission.timeline();
  view_.micro_batches = options_.job.batch.micro_batches;
  view_.workers_planned = std::max<uint32_t>(1, options_.job.worker.count);
  SlabStore::Options store;
  store.dir = options_.data_dir;
  store.run = run_;
  store.owner = absl::StrCat(options_.name, " of run ", options_.job.run.name);
  store.index_memory_bytes = IndexBytes(options_.job.server.memory);
  BALLAST_ASSIGN_OR_RETURN(slab_, SlabStore::Open(store));
  CheckpointWriter::Options writer;
  writer.slab = slab_.get();
  writer.data_dir = options_.data_dir;
  writer.mailbox = mailbox_;
  writer.fail = [this](const absl::Status& status) { Fail(status); };
  writer.saved = [this](v1::CheckpointSaved saved) {
    v1::ReportRequest request;
    *request.mutable_checkpoint_saved() = std::move(saved);
    Report(std::move(request));
  };
  checkpoints_ = std::make_unique<CheckpointWriter>(writer);
  base_bytes_ = ResidentBytes();
  LogEvent(Severity::kInfo, "memory_base",
           {{"bytes", FormatBytes(base_bytes_)}});
  return absl::OkStatus();
}

absl::Status ShardEngine::Run(MemberSession* session) {
  session_ = session;
  Fail(Open());
  while (failure_.ok() && !leave_) {
    mailbox_->Run(kIdleWait);
    Turn();
  }
  PublishStats();
  if (!failure_.ok() && !session_over_) {
    v1::ReportRequest request;
    request.set_timeline(view_.timeline);
    request.mutable_fatal()->set_code(static_cast<int32_t>(failure_.code()));
    request.mutable_fatal()->set_message(
        absl::StrCat(options_.name, ": ", failure_.message()));
    session_->Report(std::move(request), absl::Seconds(5)).IgnoreError();
  } else if (leave_) {
    v1::ReportRequest request;
    request.set_timeline(view_.timeline);
    request.mutable_leaving();
    session_->Report(std::move(request), absl::Seconds(5)).IgnoreError();
  }
  return failure_;
}

// One turn: obey, then do whatever can be done, with fetches answered after
// every chunk that an update has made.
void ShardEngine::Turn() {
  bool busy = true;
  while (busy && failure_.ok() && !leave_) {
    now_ = MonotonicNow();
    if (directive_is_new_) {
      Obey();
    }
    if (!view_.loaded) {
      return;
    }
    StartUpdate();
    StartCollecting();
    busy = update_->Work();
    if (update_->gradients() != nullptr) {
      busy |= update_->gradients()->Work();
    }
    if (collecting_) {
      busy |= collecting_->Work();
    }
    FinishUpdate();
    fetch_.Pump(now_);
    push_.Pump(collecting_.get(), now_);
    MaybeVote(/*again=*/false);
    checkpoints_->Work();
    MaybeDigest();
    if (update_->blocked()) {
      fetch_.CancelSlow(update_->decision().step(), now_);
    }
    PublishWhenDue();
    if (busy) {
      mailbox_->Run(absl::ZeroDuration());
    }
  }
}

void ShardEngine::Obey() {
  directive_is_new_ = false;
  const v1::ServerDirective& directive = *directive_;
  if (directive.task() == v1::SERVER_LOAD) {
    const auto wanted =
        std::pair(directive.timeline(), directive.placement_version());
    if (loaded_ != wanted) {
      const absl::Status status = Load();
      if (!status.ok()) {
        Fail(status);
        return;
      }
      loaded_ = wanted;
    }
    v1::ReportRequest request;
    request.mutable_loaded()->set_step(directive.load_step());
    Report(std::move(request));
    return;
  }
  if (directive.task() == v1::SERVER_EXIT) {
    leave_ = checkpoints_->idle() && (!update_ || !update_->active());
    directive_is_new_ = !leave_;  // Asked again after the next event.
    return;
  }
  if (directive.task() != v1::SERVER_RUN || !view_.loaded ||
      directive.timeline() != view_.timeline) {
    return;
  }
  view_.workers = {directive.workers().begin(), directive.workers().end()};
  chunks_->set_readers(
      std::max<uint32_t>(1, static_cast<uint32_t>(view_.workers.size())));
  for (const v1::Decision& decision : directive.decisions()) {
    const bool is_applied = decision.step() <= version_;
    if (is_applied) {
      Confirm(decision.step());  // It asks because it did not hear.
    } else if (!update_->active() ||
               update_->decision().step() != decision.step()) {
      decisions_.emplace(decision.step(), decision);
    }
  }
  digests_wanted_ = directive.state_hash_wanted();
  MaybeVote(/*again=*/true);
  checkpoints_->Prune({directive.keep_checkpoints().begin(),
                       directive.keep_checkpoints().end()});
}

void ShardEngine::StartCollecting() {
  const uint64_t wanted =
      directive_->task() == v1::SERVER_RUN ? directive_->collecting_step() : 0;
  if (collecting_ || wanted <= view_.decided_step) {
    return;
  }
  collecting_ = std::make_unique<StepGradients>(&pool_, shapes_, view_.timeline,
                                                wanted, view_.micro_batches);
  view_.collecting_step = wanted;
  voted_ = false;
}

void ShardEngine::MaybeVote(bool again) {
  if (!collecting_ || !collecting_->IsComplete() || (voted_ && !again) ||
      directive_->collecting_step() != collecting_->step()) {
    return;
  }
  voted_ = true;
  v1::ReportRequest request;
  v1::Vote* vote = request.mutable_vote();
  vote->set_step(collecting_->step());
  vote->set_sum_squares(collecting_->sum_squares().Encode());
  for (const auto& [tensor, count] : collecting_->non_finite()) {
    v1::NonFinite* entry = vote->add_non_finite();
    entry->set_tensor(tensor);
    entry->set_count(count);
  }
  if (loss_position_) {
    if (const auto loss = collecting_->Loss(*loss_position_)) {
      vote->set_has_loss(true);
      vote->set_loss_sum(*loss);
    }
  }
  Report(std::move(request));
}

void ShardEngine::StartUpdate() {
  const bool digests_first =
      digests_wanted_ && directive_->state_hash_step() == version_;
  if (update_->active() || digests_first) {
    return;
  }
  const auto next = decisions_.find(version_ + 1);
  if (next == decisions_.end()) {
    return;
  }
  const v1::Decision decision = next->second;
  decisions_.erase(next);
  const bool has_gradients = collecting_ &&
                             collecting_->step() == decision.step() &&
                             collecting_->IsComplete();
  if (!has_gradients && !decision.skip()) {
    Fail(absl::InternalError(absl::StrCat(
        "a decision came for step ", decision.step(),
        ", whose gradients this server has not got; it is at version ",
        version_)));
    return;
  }
  view_.decided_step = decision.step();
  std::unique_ptr<StepGradients> gradients = std::move(collecting_);
  if (decision.skip()) {
    gradients.reset();
  }
  update_->Start(decision, std::move(gradients), now_);
}

void ShardEngine::FinishUpdate() {
  if (!update_->active() || !update_->IsDone()) {
    return;
  }
  const v1::Decision decision = update_->decision();
  update_seconds_ = update_->Finish(now_);
  version_ = decision.step();
  // What is on its way to or from a segment keeps it from being recycled.
  log_->DropThrough(version_);
  Confirm(version_);
  if (decision.checkpoint()) {
    checkpoints_->Start(view_.timeline, version_, chunks_.get());
  }
}

void ShardEngine::Confirm(uint64_t step) {
  v1::ReportRequest request;
  request.mutable_confirm()->set_step(step);
  request.mutable_confirm()->set_update_seconds(update_seconds_);
  Report(std::move(request));
}

bool ShardEngine::FillDigests(ChunkState* chunk) {
  if (!chunk->digests.empty()) {
    return true;
  }
  if (!chunk->extent) {
    const Image& image = *chunk->resident;
    chunk->digests =
        DigestFields(chunk->layout, {image.buffer.data(), image.bytes});
    return true;
  }
  // What is on disk carries its digests in front of what workers fetch.
  const auto image = chunks_->Served(*chunk);
  if (!image) {
    chunks_->Bring(chunk, /*whole=*/false, ChunkStore::Need::kNow);
    return false;
  }
  chunk->digests =
      ReadDigests(chunk->layout, {image->buffer.data(), image->bytes});
  return true;
}

void ShardEngine::MaybeDigest() {
  if (!digests_wanted_ || update_->active() ||
      directive_->state_hash_step() != version_) {
    return;
  }
  for (ChunkState& chunk : chunks_->chunks()) {
    if (!FillDigests(&chunk)) {
      return;
    }
  }
  digests_wanted_ = false;
  v1::ReportRequest request;
  request.mutable_state_digests()->set_step(version_);
  for (const ChunkState& chunk : chunks_->chunks()) {
    v1::ChunkDigests* entry = request.mutable_state_digests()->add_chunks();
    entry->set_chunk(chunk.chunk.id);
    // Without the served copy, which comes first.
    const size_t skipped = chunk.layout.first_field() == Field::kServed
                               ? chunk.layout.block_count()
                               : 0;
    ByteWriter writer;
    for (size_t i = skipped; i < chunk.digests.size(); ++i) {
      writer.Put(chunk.digests[i].high);
      writer.Put(chunk.digests[i].low);
    }
    entry->set_digests(writer.Take());
  }
  Report(std::move(request));
}

std::string ShardEngine::Phase() const {
  if (!view_.loaded) {
    return directive_ && directive_->task() == v1::SERVER_LOAD ? "loading"
                                                               : "joining";
  }
  if (update_->active()) {
    return absl::StrCat("update ", update_->NextTensor());
  }
  if (!checkpoints_->idle()) {
    return "checkpoint";
  }
  return collecting_ ? "collecting" : "serving";
}

void ShardEngine::PublishWhenDue() {
  now_ = MonotonicNow();
  if (now_ - published_ >= kStatsEvery) {
    PublishStats();
  }
}

void ShardEngine::PublishStats() {
  published_ = now_;
  v1::MemberStats stats;
  stats.set_memory_budget_bytes(options_.job.server.memory);
  stats.set_base_bytes(base_bytes_);
  stats.set_resident_bytes(ResidentBytes());
  stats.set_minor_faults(MinorFaults());
  stats.set_step(version_);
  stats.set_phase(Phase());
  if (chunks_) {  // While they are loaded, too.
    const ResidencyPlan& plan = view_.plan;
    uint64_t used = plan.index_bytes + plan.tables_bytes +
                    plan.log_buffer_bytes +
                    plan.credit_bytes * view_.workers_planned;
    uint64_t peak = used;
    for (const Arena* arena :
         {view_.memory->resident.get(), view_.memory->window.get(),
          view_.memory->gradients.get()}) {
      used += arena->used_bytes();
      peak += arena->peak_bytes();
    }
    stats.set_memory_used_bytes(used);
    stats.set_memory_peak_bytes(peak);
    stats.set_fetched_bytes(fetch_.sent_bytes());
    stats.set_pushed_bytes(push_.taken_bytes());
    const SlabIoStats slab = slab_->stats();
    const GradientLogStats log = log_->stats();
    stats.set_spilled_bytes_written(slab.bytes_written + log.bytes_written);
    stats.set_spilled_bytes_read(slab.bytes_read + log.bytes_read);
    uint64_t resident = 0;
    uint64_t streamed = 0;
    for (const ChunkState& chunk : chunks_->chunks()) {
      const bool whole = chunk.tier == Tier::kWhole;
      resident += whole && chunk.resident->ready ? 1 : 0;
      streamed += whole ? 0 : 1;
    }
    stats.set_chunks_resident(resident);
    stats.set_chunks_streamed(streamed);
    if (collecting_ && !collecting_->IsComplete()) {
      const size_t position = *collecting_->FirstIncomplete();
      stats.set_waits_for(absl::StrCat("gradient of ",
                                       chunks_->chunks()[position].tensor->name,
                                       ", step ", collecting_->step()));
    }
  }
  MutexLock lock(&stats_mutex_);
  stats_ = std::move(stats);
}

void ShardEngine::Drain() {
  Settle();
  mailbox_->Close();
  update_.reset();
  collecting_.reset();
  checkpoints_.reset();
  chunks_.reset();
  log_.reset();
  slab_.reset();
}

}  // namespace ballast
