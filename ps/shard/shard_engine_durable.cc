// SPDX-License-Identifier: Apache-2.0
// What an engine keeps through its death: data directory, votes, bases and the
// log's limit; the rest is in shard_engine.cc.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/crash_point.h"
#include "common/log.h"
#include "common/rule.h"
#include "common/status_macros.h"
#include "common/units.h"
#include "ps/shard/shard_engine.h"
#include "storage/data_dir.h"

namespace ballast {
namespace {

// The plan gives the buffers of both logs at least twice this
// (offload/residency.h).
constexpr uint64_t kLogBufferBytes = 64 << 10;
constexpr uint64_t kLogLimitMin = uint64_t{256} << 20;
constexpr uint64_t kStepsKept = 4;
// A log is dropped by segments: many make its size follow what is needed.
constexpr uint64_t kSegmentsWanted = 8;
constexpr uint64_t kSegmentMin = 64 << 10;
constexpr uint64_t kSegmentMax = 64 << 20;
// Of a vote's mark beside a few bytes a chunk.
constexpr uint64_t kMarkBytes = 16 << 10;
constexpr uint64_t kMarkBytesPerChunk = 32;

// An open on a full disk; less than a failure is shown.
constexpr absl::Duration kOpenAgainAfter = absl::Milliseconds(500);

}  // namespace

absl::Status ShardEngine::Open() {
  BALLAST_ASSIGN_OR_RETURN(
      const std::optional<Hash128> run,
      ReadDataDirectoryRun(options_.disk, options_.data_dir));
  return run ? OpenStore(*run) : absl::OkStatus();
}

absl::Status ShardEngine::OpenStoreUnlessFull() {
  if (now_ < open_again_at_) {
    return absl::OkStatus();
  }
  absl::Status status = OpenStore(*run_);
  if (absl::IsResourceExhausted(status)) {
    slab_.reset();  // The mark of a store that is not open.
    open_again_at_ = now_ + kOpenAgainAfter;
    FailUnlessFull(status);
    return absl::OkStatus();
  }
  return status;
}

absl::Status ShardEngine::OpenStore(const Hash128& run) {
  run_ = run;
  log_.reset();
  slab_.reset();  // Of an open that came half way.
  SlabStore::Options store;
  store.disk = options_.disk;
  store.dir = options_.data_dir;
  store.run = run;
  store.owner = absl::StrCat(options_.name, " of run ", options_.job.run.name);
  store.index_memory_bytes = IndexBytes(options_.job.server.memory);
  BALLAST_ASSIGN_OR_RETURN(slab_, SlabStore::Open(store));
  if (durable()) {
    BALLAST_RETURN_IF_ERROR(OpenLog());
    book_.Fill(slab_->bases(), log_->contents());
  }
  return absl::OkStatus();
}

absl::Status ShardEngine::OpenLog() {
  GradientLog::Options log;
  log.disk = options_.disk;
  log.dir = options_.data_dir;
  log.run = *run_;
  log.timeline = view_.timeline;
  log.buffer_bytes = kLogBufferBytes;
  log.keep = true;
  if (options_.job.server.log_limit > 0) {
    log.segment_bytes =
        std::clamp(options_.job.server.log_limit / kSegmentsWanted, kSegmentMin,
                   kSegmentMax);
  }
  BALLAST_ASSIGN_OR_RETURN(log_, GradientLog::Open(log));
  return absl::OkStatus();
}

// Not durable; it is emptied with every step. The redo log has a limit that
// spans which wait for a sibling must not count against.
absl::Status ShardEngine::OpenSpill(uint64_t buffer_bytes) {
  GradientLog::Options spill;
  spill.disk = options_.disk;
  spill.dir = durable() ? options_.data_dir + "/spill" : options_.data_dir;
  spill.run = *run_;
  spill.timeline = view_.timeline;
  spill.buffer_bytes = durable() ? kLogBufferBytes : buffer_bytes;
  BALLAST_ASSIGN_OR_RETURN(spill_, GradientLog::Open(spill));
  return absl::OkStatus();
}

void ShardEngine::FillJoin(v1::JoinRequest* join) const {
  if (run_) {
    join->set_run_id(HashHex(*run_));
  }
  book_.FillHeld(join);
}

absl::Status ShardEngine::PlanLog() {
  uint64_t step = kMarkBytes;
  for (const GradientShape& shape : shapes_) {
    step +=
        LogRecordBytes(shape.elem_count * sizeof(float)) + kMarkBytesPerChunk;
  }
  const uint64_t smallest = 2 * step + kSegmentMin;
  log_limit_ = options_.job.server.log_limit;
  if (log_limit_ == 0) {
    log_limit_ = std::max(kLogLimitMin, kStepsKept * step);
  }
  if (log_limit_ < smallest) {
    return absl::InvalidArgumentError(
        absl::StrCat("server.log_limit is ", log_limit_,
                     " bytes; the gradients of ", options_.name, " take ", step,
                     " a step and the log holds two: want at ", "least ",
                     smallest, ", or 0 for ", kStepsKept, " steps"));
  }
  LogEvent(Severity::kInfo, "log_planned",
           {{"limit", FormatBytes(log_limit_)},
            {"step", FormatBytes(step)},
            {"smallest", FormatBytes(smallest)}});
  return absl::OkStatus();
}

// Above the limit only when nothing can be done about it: then a wait would
// have no end.
bool ShardEngine::MayAppend(uint64_t bytes) const {
  return log_->bytes() + bytes <= log_limit_ || !bases_ ||
         (!bases_->active() && !bases_->IsStale());
}

void ShardEngine::MakeBases() {
  if (!bases_->active() && !made_ && log_->bytes() > log_limit_ / 2 &&
      bases_->IsStale()) {
    bases_->Start();
  }
  bases_->Work();
}

uint64_t ShardEngine::LowestBase() const {
  return bases_ ? std::min({version_, bases_->LowestBase(),
                            replica_target_.LowestBase()})
                : 0;
}

void ShardEngine::DropLog() {
  // What is on its way to or from a segment keeps it from being recycled.
  uint64_t through = std::min(version_, replica_target_.LowestBase());
  spill_->DropThrough(durable() ? version_ : through);
  if (durable()) {
    through = BALLAST_RULE(kLogKeptUntilBase) ? LowestBase() : version_;
    log_->DropThrough(through);
    BALLAST_CRASH_POINT("server.log.dropped");
  }
  book_.DropThrough(through);
  for (const auto& [server, link] : links_) {
    link->source()->OnDropped(durable() ? through : version_);
  }
}

std::unique_ptr<StepGradients> ShardEngine::RestoreStep(uint64_t step,
                                                        v1::Vote* vote) {
  const VoteMark* mark = book_.Vote(view_.timeline, step, options_.name);
  if (mark == nullptr) {
    return nullptr;
  }
  auto gradients = std::make_unique<StepGradients>(
      &pool_, shapes_, view_.timeline, step, view_.micro_batches);
  if (!gradients->Restore(*mark) || !vote->ParseFromString(mark->vote)) {
    return nullptr;
  }
  LogEvent(Severity::kInfo, "vote_restored", {{"step", step}});
  return gradients;
}

// Every gradient is in the log: the mark goes there too, and one sync covers
// all.
void ShardEngine::SyncVote() {
  if (!collecting_->IsLogged()) {
    return;
  }
  auto mark = std::make_shared<VoteMark>();
  mark->timeline = view_.timeline;
  mark->step = collecting_->step();
  mark->owner = options_.name;
  mark->vote = vote_.SerializeAsString();
  mark->gradients = collecting_->Logged();
  BALLAST_CRASH_POINT("server.vote.before_mark");
  const absl::Status appended = log_->AppendMark(*mark, [](absl::Status) {});
  if (!appended.ok()) {
    FailUnlessFull(appended);
    return;
  }
  vote_phase_ =
      BALLAST_RULE(kSyncBeforeVote) ? VotePhase::kSyncing : VotePhase::kReady;
  BALLAST_CRASH_POINT("server.vote.before_sync");
  ++pool_.in_flight;
  log_->Sync([this, mailbox = mailbox_, round = vote_round_,
              mark](const absl::Status& status) {
    mailbox->Post([this, round, mark, status] {
      --pool_.in_flight;
      OnVoteSynced(round, *mark, status);
    });
  });
}

void ShardEngine::OnVoteSynced(uint64_t round, const VoteMark& mark,
                               const absl::Status& status) {
  if (!status.ok()) {
    Fail(Lost(status));
    return;
  }
  BALLAST_CRASH_POINT("server.vote.synced");
  book_.AddVote(mark);
  if (round != vote_round_ || vote_phase_ != VotePhase::kSyncing) {
    return;
  }
  vote_phase_ = VotePhase::kReady;
  vote_log_bytes_ = collecting_->logged_bytes();
  vote_log_seconds_ = absl::ToDoubleSeconds(options_.clock() - *gathered_at_);
}

}  // namespace ballast
