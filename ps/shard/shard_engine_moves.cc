// SPDX-License-Identifier: Apache-2.0
// Chunks that move between servers while training goes on: copies are kept up
// to date at their next owner first, then change hands with a decision
// (docs/PROTOCOL.md, section 6). The rest is in shard_engine.cc.
#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/crash_point.h"
#include "common/log.h"
#include "common/rule.h"
#include "ps/shard/shard_engine.h"

namespace ballast {
namespace {

// Decisions kept in memory whether or not a copy needs them yet: a record that
// is on its way to us may be that much older than our chunks.
constexpr uint64_t kHistoryMin = 256;
// A vote waits so long for copies that are nearly in sync: a sync and a round
// trip are far below it.
constexpr absl::Duration kHoldMax = absl::Milliseconds(500);
// Copies give way when the log is that many times too long because of them.
constexpr uint64_t kLogTimesMax = 2;

std::set<uint32_t> ChunksOf(
    const google::protobuf::RepeatedPtrField<v1::ChunkRange>& ranges) {
  std::set<uint32_t> chunks;
  for (const v1::ChunkRange& range : ranges) {
    for (uint32_t i = 0; i < range.count(); ++i) {
      chunks.insert(range.first() + i);
    }
  }
  return chunks;
}

void AddRanges(const std::vector<uint32_t>& ascending,
               google::protobuf::RepeatedPtrField<v1::ChunkRange>* ranges) {
  v1::ChunkRange* last = nullptr;
  for (const uint32_t chunk : ascending) {
    if (last != nullptr && last->first() + last->count() == chunk) {
      last->set_count(last->count() + 1);
      continue;
    }
    last = ranges->Add();
    last->set_first(chunk);
    last->set_count(1);
  }
}

}  // namespace

void ShardEngine::ObeyOrders() {
  std::map<uint32_t, ReplicaTarget::Source> sources;
  for (const v1::ReplicaOrder& order : directive_->receive()) {
    for (const uint32_t chunk : ChunksOf(order.chunks())) {
      if (chunks_->Find(chunk) == nullptr) {
        sources[chunk] = {order.server(), order.incarnation()};
      }
    }
  }
  replica_target_.Order(sources);

  std::map<std::string, std::unique_ptr<ReplicaLink>> before;
  before.swap(links_);
  for (const v1::ReplicaOrder& order : directive_->replicate()) {
    std::unique_ptr<ReplicaLink>& link = before[order.server()];
    if (!link || link->options().incarnation != order.incarnation() ||
        link->options().address != order.address() ||
        link->options().standing != order.standing()) {
      if (link) {
        link->Close();
        closed_links_.push_back(std::move(link));
      }
      link = MakeLink(order);
    }
    if (!link) {
      continue;
    }
    std::set<uint32_t> chunks = ChunksOf(order.chunks());
    std::erase_if(chunks, [this](uint32_t chunk) {
      return chunks_->Find(chunk) == nullptr;
    });
    link->source()->Order(chunks);
    links_[order.server()] = std::move(link);
  }
  for (auto& [server, link] : before) {
    if (link) {
      link->Close();
      closed_links_.push_back(std::move(link));
    }
  }
  TellGradients();  // What was complete before the order came.
}

std::unique_ptr<ReplicaLink> ShardEngine::MakeLink(
    const v1::ReplicaOrder& order) {
  if (options_.dialer == nullptr) {
    return nullptr;
  }
  ReplicaLink::Options link;
  link.server = order.server();
  link.address = order.address();
  link.incarnation = order.incarnation();
  link.standing = order.standing();
  link.view = &view_;
  link.dialer = options_.dialer;
  link.slab = slab_.get();
  link.mailbox = mailbox_;
  link.base = [this](uint32_t chunk) { return BaseOf(chunk); };
  link.gradient = [this](uint32_t chunk, uint64_t step, std::byte* out,
                         std::function<void(const absl::Status&)> done) {
    return ReadGradient(chunk, step, out, std::move(done));
  };
  link.behind = [this](uint32_t chunk, uint64_t step) {
    std::vector<uint64_t> steps;
    while (book_.Gradient(view_.timeline, ++step, chunk) != nullptr) {
      steps.push_back(step);
    }
    return steps;
  };
  link.fail = [this](const absl::Status& status) { FailUnlessFull(status); };
  return std::make_unique<ReplicaLink>(link);
}

void ShardEngine::CloseLinks() {
  for (auto& [server, link] : links_) {
    link->Close();
    closed_links_.push_back(std::move(link));
  }
  links_.clear();
}

bool ShardEngine::AreLinksIdle() const {
  return std::all_of(closed_links_.begin(), closed_links_.end(),
                     [](const auto& link) { return link->IsIdle(); });
}

void ShardEngine::PumpCopies() {
  replica_target_.Pump(version_, HistoryBegin(), now_);
  for (const auto& [server, link] : links_) {
    if (link->Pump(dialled_ + 1, now_)) {
      ++dialled_;
    }
    if (link->options().standing && collecting_ && gathered_at_) {
      link->OnVote(collecting_->step(), vote_.SerializeAsString());
    }
  }
  std::erase_if(closed_links_, [](const auto& link) { return link->IsIdle(); });
  if (bases_ && log_->bytes() > kLogTimesMax * log_limit_) {
    replica_target_.GiveUpStale(version_);
  }
}

void ShardEngine::TellGradient(uint32_t chunk, uint64_t step, uint64_t bytes) {
  for (const auto& [server, link] : links_) {
    link->source()->OnGradient(chunk, step, bytes);
  }
}

void ShardEngine::TellGradients() {
  if (links_.empty()) {
    return;
  }
  for (size_t i = 0; i < shapes_.size(); ++i) {
    const uint64_t bytes = shapes_[i].elem_count * sizeof(float);
    if (update_->active()) {
      TellGradient(shapes_[i].chunk, update_->decision().step(), bytes);
    }
    if (collecting_ && collecting_->IsComplete(i)) {
      TellGradient(shapes_[i].chunk, collecting_->step(), bytes);
    }
  }
}

std::optional<ReplicaLink::Base> ShardEngine::BaseOf(uint32_t id) {
  ChunkState* chunk = chunks_->Find(id);
  if (chunk == nullptr) {
    return std::nullopt;
  }
  if (!chunks_->IsOnDisk(*chunk)) {
    if (const absl::Status status = chunks_->Save(chunk); !status.ok()) {
      FailUnlessFull(status);
    }
    return std::nullopt;
  }
  return ReplicaLink::Base{chunk->version, chunk->data_version,
                           chunk->data_timeline, chunk->extent};
}

bool ShardEngine::ReadGradient(uint32_t chunk, uint64_t step, std::byte* out,
                               std::function<void(const absl::Status&)> done) {
  if (const LogPosition* position =
          book_.Gradient(view_.timeline, step, chunk)) {
    ++pool_.in_flight;
    pool_.log->Read(
        {view_.timeline, step, chunk, kAllUses, {0, view_.micro_batches}},
        *position, out,
        [this, mailbox = mailbox_,
         done = std::move(done)](const absl::Status& status) {
          mailbox->Post([this, done, status] {
            --pool_.in_flight;
            done(status);
          });
        });
    return true;
  }
  const auto shape = std::lower_bound(
      shapes_.begin(), shapes_.end(), chunk,
      [](const GradientShape& s, uint32_t id) { return s.chunk < id; });
  if (shape == shapes_.end() || shape->chunk != chunk) {
    return false;
  }
  const auto place = static_cast<size_t>(shape - shapes_.begin());
  if (collecting_ && collecting_->step() == step) {
    return collecting_->Copy(place, out, std::move(done));
  }
  StepGradients* used = update_->gradients();
  return used != nullptr && used->step() == step &&
         used->Copy(place, out, std::move(done));
}

void ShardEngine::Remember(const v1::Decision& decision) {
  history_[decision.step()] = decision;
  const uint64_t needed =
      std::min(replica_target_.LowestBase(),
               decision.step() - std::min(decision.step(), kHistoryMin));
  history_.erase(history_.begin(), history_.upper_bound(needed));
}

uint64_t ShardEngine::HistoryBegin() const {
  return history_.empty() ? version_ + 1 : history_.begin()->first;
}

// A vote of a step is not told while a standing copy lacks something, nor, for
// a moment, while one that moves is nearly in sync: the decision may then take
// it along.
bool ShardEngine::HoldsVote() {
  const uint64_t step = collecting_->step();
  bool standing = false;
  bool moving = false;
  for (const auto& [server, link] : links_) {
    if (link->is_binding()) {
      standing |=
          !link->source()->AllInSync(step) || !link->source()->MarkSynced(step);
    } else if (!link->options().standing) {
      moving |= link->IsWorthWaiting(step);
    }
  }
  if (!standing && !moving) {
    vote_held_since_.reset();
    return false;
  }
  if (!vote_held_since_) {
    vote_held_since_ = now_;
  }
  if (moving && now_ - *vote_held_since_ > kHoldMax) {
    for (const auto& [server, link] : links_) {
      link->WaitedInVain();
    }
    moving = false;
  }
  return standing || moving;
}

void ShardEngine::AddInSync(v1::Vote* vote) const {
  vote->clear_in_sync();
  for (const auto& [server, link] : links_) {
    const std::vector<uint32_t> chunks = link->source()->InSync(vote->step());
    if (chunks.empty()) {
      continue;
    }
    v1::ReplicaOrder* order = vote->add_in_sync();
    order->set_server(server);
    order->set_incarnation(link->options().incarnation);
    order->set_standing(link->options().standing);
    AddRanges(chunks, order->mutable_chunks());
  }
}

bool ShardEngine::BeginMoves(const v1::Decision& decision) {
  coming_.clear();
  going_.clear();
  for (const v1::ChunkMove& move : decision.moves()) {
    for (const uint32_t chunk : ChunksOf(move.chunks())) {
      const bool is_ours = chunks_->Find(chunk) != nullptr;
      if (move.from() == self_ && is_ours) {
        going_.push_back(chunk);
      } else if (move.to() == self_ && !is_ours) {
        // A placement that is newer than the decision has made it ours before.
        coming_.push_back(chunk);
      }
    }
  }
  std::sort(coming_.begin(), coming_.end());
  std::sort(going_.begin(), going_.end());
  for (const uint32_t chunk : coming_) {
    if (!BALLAST_RULE(kOnlySyncedReplicaMoves) ||
        replica_target_.IsSynced(chunk, decision.step())) {
      continue;
    }
    Fail(absl::DataLossError(
        absl::StrCat("the decision of step ", decision.step(), " gives chunk ",
                     chunk, " to ", options_.name,
                     ", whose copy of it is not synced through that step")));
    return false;
  }
  view_.placement_version =
      std::max(view_.placement_version, decision.placement_version());
  view_.incoming = {coming_.begin(), coming_.end()};
  return true;
}

// Between two steps: nothing is collected, updated, saved or named as a base,
// so places of chunks may change.
bool ShardEngine::FinishMoves() {
  if (coming_.empty() && going_.empty()) {
    return true;
  }
  if (!taking_in_) {
    if (!checkpoints_->idle() || (bases_ && bases_->active())) {
      return false;
    }
    GiveAway();
    BALLAST_CRASH_POINT("server.move.flipped");
    Fail(TakeIn());
    if (!taking_in_) {
      return false;
    }
  }
  bool worked = false;
  if (const absl::Status status = taking_in_->Work(&worked); !status.ok()) {
    FailUnlessFull(status);
    return false;
  }
  if (taking_in_->loaded() < coming_.size()) {
    return false;
  }
  LogEvent(Severity::kInfo, "chunks_moved",
           {{"step", made_->step()},
            {"in", coming_.size()},
            {"out", going_.size()},
            {"redone", taking_in_->gradients()},
            {"chunks", chunks_->chunks().size()}});
  taking_in_.reset();
  view_.incoming.clear();
  coming_.clear();
  going_.clear();
  SetShapes();
  if (durable()) {
    if (const absl::Status status = PlanLog(); !status.ok()) {
      // It may grow above the limit when nothing else helps.
      LogEvent(Severity::kWarn, "log_limit_low", {{"why", status.message()}});
    }
  }
  return true;
}

void ShardEngine::GiveAway() {
  if (going_.empty()) {
    return;
  }
  for (const auto& [server, link] : links_) {
    link->source()->Forget(going_);
  }
  chunks_->Erase(going_);
  DropBases(going_);
}

absl::Status ShardEngine::TakeIn() {
  chunks_->Insert(coming_);
  RedoPass::Options redo;
  redo.step = made_->step();
  for (const auto& [step, decision] : history_) {
    redo.decisions.push_back(decision);
  }
  redo.optimizer = options_.job.optimizer;
  redo.micro_batches = view_.micro_batches;
  redo.chunks = chunks_.get();
  redo.pool = &pool_;
  redo.book = &book_;
  std::vector<size_t> places;
  for (const uint32_t id : coming_) {
    ChunkState* chunk = chunks_->Find(id);
    const CheckpointEntry* base = book_.Base(id);
    if (base == nullptr) {
      return absl::DataLossError(
          absl::StrCat("chunk ", id, " came without a record"));
    }
    chunk->version = chunk->data_version = base->version;
    chunk->data_timeline = base->timeline;
    chunk->extent = replica_target_.Release(id);
    places.push_back(static_cast<size_t>(chunk - chunks_->chunks().data()));
  }
  auto pass = std::make_unique<RedoPass>(std::move(redo));
  const absl::Status status = pass->Start(std::move(places));
  if (status.ok()) {
    taking_in_ = std::move(pass);
  }
  return status;
}

void ShardEngine::DropBases(std::vector<uint32_t> chunks) {
  for (const uint32_t chunk : chunks) {
    book_.DropBase(chunk);
  }
  if (!durable() || chunks.empty()) {
    return;
  }
  blocking_.Run([slab = slab_.get(),
                 chunks = std::move(chunks)] { return slab->DropBase(chunks); },
                [this](const absl::Status& status) {
                  if (!status.ok()) {  // What stays named there does no harm.
                    FailUnlessFull(status);
                  }
                });
}

// After a load: copies of an earlier life begin again, and what was moved away
// by a decision that the earlier life did not hear of is not ours.
void ShardEngine::DropForeignBases() {
  std::vector<uint32_t> foreign;
  for (const CheckpointEntry& base : slab_->bases()) {
    if (chunks_->Find(base.chunk) == nullptr) {
      foreign.push_back(base.chunk);
    }
  }
  DropBases(std::move(foreign));
}

}  // namespace ballast
