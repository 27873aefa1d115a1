// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/shard_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/check.h"
#include "common/crash_point.h"
#include "common/log.h"
#include "common/memory_setup.h"
#include "common/status_macros.h"
#include "common/units.h"

namespace ballast {
namespace {

constexpr absl::Duration kStatsEvery = absl::Milliseconds(20);
// A write that a full disk refused is tried again at least that often.
constexpr absl::Duration kFullShown = absl::Seconds(1);

}  // namespace

ShardEngine::ShardEngine(const Options& options,
                         std::shared_ptr<Mailbox> mailbox)
    : options_(options),
      mailbox_(std::move(mailbox)),
      now_(options_.clock()),
      fetch_(&view_, mailbox_),
      push_(&view_),
      replica_target_(&view_),
      blocking_(options_.blocking, mailbox_) {}

// What is on its way to the disk ends first (kill -9 would leave it to the
// kernel); nothing that it would do here afterwards is done.
ShardEngine::~ShardEngine() {
  mailbox_->Close();
  CloseLinks();
  replica_target_.Reset(absl::CancelledError("this server has left"));
  taking_in_.reset();
  update_.reset();
  collecting_.reset();
  load_.reset();
  redo_.reset();
  bases_.reset();
  checkpoints_.reset();
  chunks_.reset();
  spill_.reset();
  log_.reset();
}

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

void ShardEngine::Drain(const std::string& reason) {
  mailbox_->Post([this, reason] {
    if (draining_since_) {
      return;
    }
    draining_since_ = now_;
    LogEvent(Severity::kInfo, "draining", {{"why", reason}});
    v1::ReportRequest request;
    request.mutable_draining()->set_reason(reason);
    Report(std::move(request));
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

void ShardEngine::FailUnlessFull(const absl::Status& status) {
  if (!absl::IsResourceExhausted(status)) {
    Fail(status);
    return;
  }
  if (now_ - disk_full_at_ > kFullShown) {
    LogEvent(Severity::kWarn, "disk_full", {{"why", status.message()}});
  }
  disk_full_ = std::string(status.message());
  disk_full_at_ = now_;
}

void ShardEngine::Report(v1::ReportRequest request) {
  request.set_timeline(view_.timeline);
  PublishStats();
  session_->Post(std::move(request));
}

absl::Status ShardEngine::Start(ShardSession* session) {
  session_ = session;
  const v1::JoinReply& admission = session_->admission();
  const std::optional<Hash128> run = ParseHashHex(admission.run_id());
  if (!run) {
    return absl::InternalError(
        absl::StrCat("the coordinator named run '", admission.run_id(),
                     "'; want 32 lower-case hex digits"));
  }
  view_.incarnation = admission.incarnation();
  view_.timeline = admission.timeline();
  view_.micro_batches = options_.job.batch.micro_batches;
  view_.workers_planned = std::max<uint32_t>(1, options_.job.worker.count);
  if (slab_ == nullptr) {
    run_ = run;
    BALLAST_RETURN_IF_ERROR(OpenStoreUnlessFull());
  } else if (*run_ != *run) {
    return absl::FailedPreconditionError(absl::StrCat(
        options_.data_dir, " belongs to run ", HashHex(*run_),
        ", the coordinator's is ", HashHex(*run), "; name another folder"));
  }
  base_bytes_ = ResidentBytes();
  LogEvent(Severity::kInfo, "memory_base",
           {{"bytes", FormatBytes(base_bytes_)}});
  return absl::OkStatus();
}

std::optional<v1::ReportRequest> ShardEngine::LastReport() const {
  if (session_over_ || !over()) {
    return std::nullopt;
  }
  v1::ReportRequest request;
  request.set_timeline(view_.timeline);
  if (failure_.ok()) {
    request.mutable_leaving();
  } else {
    request.mutable_fatal()->set_code(static_cast<int32_t>(failure_.code()));
    request.mutable_fatal()->set_message(
        absl::StrCat(options_.name, ": ", failure_.message()));
  }
  return request;
}

bool ShardEngine::Step() {
  mailbox_->Run(absl::ZeroDuration());
  now_ = options_.clock();
  const bool busy = !over() && Turn();
  if (over()) {
    PublishStats();
    return false;
  }
  PublishWhenDue();
  return busy;
}

bool ShardEngine::Turn() {
  if (draining_since_ &&
      now_ - *draining_since_ > options_.job.cluster.drain_timeout) {
    LogEvent(
        Severity::kWarn, "left_undrained",
        {{"after", absl::FormatDuration(options_.job.cluster.drain_timeout)}});
    leave_ = true;
    return false;
  }
  if (slab_ == nullptr) {
    Fail(OpenStoreUnlessFull());
    leave_ = directive_ && directive_->task() == v1::SERVER_EXIT;
    return false;
  }
  if (directive_is_new_) {
    Obey();
  }
  if (load_phase_ != LoadPhase::kNone) {
    bool worked = false;
    const absl::Status status = Load(&worked);
    absl::IsResourceExhausted(status) ? FailUnlessFull(status) : Fail(status);
    return worked && !over();
  }
  return view_.loaded && !leave_ && Train();
}

// Does whatever can be done, with fetches answered after every chunk that an
// update has made.
bool ShardEngine::Train() {
  if (bases_) {
    MakeBases();
  }
  StartUpdate();
  StartCollecting();
  bool busy = update_->Work();
  if (update_->gradients() != nullptr) {
    busy |= update_->gradients()->Work();
  }
  if (collecting_) {
    busy |= collecting_->Work();
  }
  FinishUpdate();
  fetch_.Pump(now_);
  push_.Pump(collecting_.get(), now_);
  PumpCopies();
  MaybeVote(/*again=*/false);
  checkpoints_->Work();
  MaybeDigest();
  if (update_->blocked()) {
    fetch_.CancelSlow(update_->decision().step(), now_);
  }
  return busy && !over();
}

void ShardEngine::Obey() {
  directive_is_new_ = false;
  const v1::ServerDirective& directive = *directive_;
  if (directive.task() == v1::SERVER_LOAD) {
    ObeyLoad();
    return;
  }
  if (directive.task() == v1::SERVER_EXIT) {
    // What is being written is finished; a load is not waited for.
    leave_ =
        !view_.loaded || (checkpoints_->idle() && blocking_.in_flight() == 0 &&
                          !update_->active() && !made_);
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
    } else if ((!made_ || made_->step() != decision.step()) &&
               (!update_->active() ||
                update_->decision().step() != decision.step())) {
      decisions_.emplace(decision.step(), decision);
    }
  }
  digests_wanted_ = directive.state_hash_wanted();
  ObeyOrders();
  MaybeVote(/*again=*/true);
  MeetOwed();
  checkpoints_->Prune({directive.keep_checkpoints().begin(),
                       directive.keep_checkpoints().end()});
}

void ShardEngine::StartCollecting() {
  const uint64_t wanted =
      directive_->task() == v1::SERVER_RUN ? directive_->collecting_step() : 0;
  // A server without chunks may hear of several steps at once: what it collects
  // depends on what the decisions before bring it.
  if (collecting_ || wanted != view_.decided_step + 1 || made_ ||
      !coming_.empty() || !going_.empty()) {
    return;
  }
  ++vote_round_;
  gathered_at_.reset();
  vote_held_since_.reset();
  vote_phase_ = VotePhase::kReady;
  collecting_ = RestoreStep(wanted, &vote_);
  if (!collecting_) {
    vote_phase_ = VotePhase::kGathering;
    collecting_ = std::make_unique<StepGradients>(
        &pool_, shapes_, view_.timeline, wanted, view_.micro_batches);
  }
  view_.collecting_step = wanted;
  for (const auto& [server, link] : links_) {
    link->OnStep(wanted);
  }
  if (vote_phase_ == VotePhase::kReady) {
    TellGradients();  // Of an earlier life's vote.
  }
}

v1::Vote ShardEngine::MakeVote() const {
  v1::Vote vote;
  vote.set_step(collecting_->step());
  vote.set_sum_squares(collecting_->sum_squares().Encode());
  for (const auto& [tensor, count] : collecting_->non_finite()) {
    v1::NonFinite* entry = vote.add_non_finite();
    entry->set_tensor(tensor);
    entry->set_count(count);
  }
  if (loss_position_) {
    if (const auto loss = collecting_->Loss(*loss_position_)) {
      vote.set_has_loss(true);
      vote.set_loss_sum(*loss);
    }
  }
  return vote;
}

void ShardEngine::MaybeVote(bool again) {
  if (!collecting_ || !collecting_->IsComplete() ||
      directive_->collecting_step() != collecting_->step()) {
    return;
  }
  if (vote_phase_ == VotePhase::kGathering) {
    if (!gathered_at_) {
      gathered_at_ = now_;
      vote_ = MakeVote();
    }
    if (durable()) {
      SyncVote();
    } else {
      vote_phase_ = VotePhase::kReady;
    }
  }
  if ((vote_phase_ == VotePhase::kReady && !HoldsVote()) ||
      (vote_phase_ == VotePhase::kTold && again)) {
    vote_phase_ = VotePhase::kTold;
    v1::ReportRequest request;
    *request.mutable_vote() = vote_;
    AddInSync(request.mutable_vote());
    Report(std::move(request));
  }
}

void ShardEngine::StartUpdate() {
  const bool digests_first =
      digests_wanted_ && directive_->state_hash_step() == version_;
  if (update_->active() || made_ || digests_first) {
    return;
  }
  const auto next = decisions_.find(version_ + 1);
  if (next == decisions_.end()) {
    return;
  }
  const v1::Decision decision = next->second;
  decisions_.erase(next);
  if (!collecting_) {  // Voted for by an earlier life.
    collecting_ = RestoreStep(decision.step(), &vote_);
  }
  const bool has_gradients = collecting_ &&
                             collecting_->step() == decision.step() &&
                             collecting_->IsComplete();
  if (!has_gradients && !decision.skip() && !chunks_->chunks().empty()) {
    Fail(absl::InternalError(absl::StrCat(
        "a decision came for step ", decision.step(),
        ", whose gradients this server has not got; it is at version ",
        version_)));
    return;
  }
  if (!BeginMoves(decision)) {
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
  if (!made_ && update_->active() && update_->IsDone()) {
    made_ = update_->decision();
    update_seconds_ = update_->Finish(now_);
    Remember(*made_);
  }
  if (made_ && FinishMoves()) {
    FinishStep();
  }
}

void ShardEngine::FinishStep() {
  const v1::Decision decision = *std::exchange(made_, std::nullopt);
  version_ = decision.step();
  decisions_.erase(decisions_.begin(), decisions_.upper_bound(version_));
  for (const auto& [server, link] : links_) {
    link->source()->OnComplete(version_);
  }
  BALLAST_CRASH_POINT("server.update.done");
  DropLog();
  Confirm(version_);
  if (decision.checkpoint()) {
    checkpoints_->Start(view_.timeline, version_);
  }
}

void ShardEngine::Confirm(uint64_t step) {
  v1::ReportRequest request;
  v1::Confirm* confirm = request.mutable_confirm();
  confirm->set_step(step);
  confirm->set_update_seconds(update_seconds_);
  confirm->set_base_step(durable() ? LowestBase() : version_);
  confirm->set_log_bytes(vote_log_bytes_);
  confirm->set_log_seconds(vote_log_seconds_);
  Report(std::move(request));
}

void ShardEngine::MeetOwed() {
  for (const v1::CheckpointId& owed : directive_->owed_checkpoints()) {
    if (!checkpoints_->Repeat(owed.timeline(), owed.step()) &&
        !update_->active() && !made_ && owed.step() == version_ &&
        owed.timeline() == view_.timeline) {
      checkpoints_->Start(view_.timeline, version_);
    }
  }
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
  if (!digests_wanted_ || update_->active() || made_ ||
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
  if (now_ - disk_full_at_ <= kFullShown) {
    return absl::StrCat("read-only: ", disk_full_);
  }
  if (!view_.loaded) {
    return load_phase_ == LoadPhase::kNone ? "joining" : "loading";
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
  if (load_) {
    stats.set_loaded_chunks(load_->loaded() + (redo_ ? redo_->loaded() : 0));
  }
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
    uint64_t written = slab.bytes_written;
    uint64_t read = slab.bytes_read;
    for (const GradientLog* log : {log_.get(), spill_.get()}) {
      if (log != nullptr) {
        const GradientLogStats stats_of = log->stats();
        written += stats_of.bytes_written;
        read += stats_of.bytes_read;
      }
    }
    stats.set_spilled_bytes_written(written);
    stats.set_spilled_bytes_read(read);
    if (log_ != nullptr) {
      stats.set_log_bytes(log_->bytes());
      stats.set_log_limit_bytes(log_limit_);
    }
    uint64_t resident = 0;
    uint64_t streamed = 0;
    for (const ChunkState& chunk : chunks_->chunks()) {
      const bool whole = chunk.tier == Tier::kWhole;
      resident += whole && chunk.resident->ready ? 1 : 0;
      streamed += whole ? 0 : 1;
    }
    stats.set_chunks_resident(resident);
    stats.set_chunks_streamed(streamed);
    if (collecting_ && collecting_->waits_for_log()) {
      stats.set_waits_for(absl::StrCat(
          "room in the gradient log (", FormatBytes(log_->bytes()), " of ",
          FormatBytes(log_limit_), "), step ", collecting_->step()));
    } else if (collecting_ && !collecting_->IsComplete()) {
      const size_t position = *collecting_->FirstIncomplete();
      stats.set_waits_for(absl::StrCat("gradient of ",
                                       chunks_->chunks()[position].tensor->name,
                                       ", step ", collecting_->step()));
    } else if (vote_held_since_) {
      for (const auto& [server, link] : links_) {
        if (const std::string what = link->WaitsFor(); !what.empty()) {
          stats.set_waits_for(what);
          stats.set_waits_ms(
              absl::ToInt64Milliseconds(now_ - *vote_held_since_));
        }
      }
    }
  }
  MutexLock lock(&stats_mutex_);
  stats_ = std::move(stats);
}

}  // namespace ballast
