// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_pass.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"

namespace ballast::sim {
namespace {

constexpr uint32_t kAhead = 2;  // Units asked for before they are needed.
constexpr uint64_t kMessageBytes = 4 << 10;

}  // namespace

std::string SimPass::NameOf(uint32_t server) const {
  return options_.pass.view.servers[server].name;
}

void SimPass::Start() {
  for (const TensorSpec& tensor : options_.job->layout.tensors) {
    weights_.emplace_back(tensor.elem_count() * DTypeBytes(tensor.served));
  }
  heard_ = options_.world->now();
  OpenLinks();
  WatchSilence();
  Advance();
}

void SimPass::OpenLinks() {
  const auto& servers = options_.pass.view.servers;
  std::set<uint32_t> targets;
  for (const WorkerCore::Part& part : options_.pass.parts) {
    targets.insert(part.servers.begin(), part.servers.end());
  }
  fetch_.resize(servers.size());
  push_.resize(servers.size());
  auto self = shared_from_this();
  for (uint32_t i = 0; i < servers.size(); ++i) {
    const std::string address =
        options_.placement.servers(static_cast<int>(i)).address();
    if (!servers[i].owns_chunks) {
      continue;
    }
    fetch_[i].stream =
        options_.network->Open(options_.life, address, kFetchStream);
    fetch_[i].stream->set_client_events(
        {[self, i](const grpc::ByteBuffer& buffer) {
           self->OnFetched(i, buffer);
         },
         [self, i](const absl::Status& why) {
           self->OnLinkEnd(&self->fetch_[i], self->NameOf(i), why);
         }});
    if (!targets.contains(i)) {
      continue;
    }
    push_[i].stream =
        options_.network->Open(options_.life, address, kPushStream);
    push_[i].stream->set_client_events(
        {[self, i](const grpc::ByteBuffer& buffer) {
           self->OnAcknowledged(i, buffer);
         },
         [self, i](const absl::Status& why) {
           self->OnLinkEnd(&self->push_[i], self->NameOf(i), why);
         }});
  }
}

void SimPass::OnLinkEnd(Link* link, const std::string& server,
                        const absl::Status& why) {
  link->ended = true;
  if (over_) {
    return;
  }
  if (!finishing_ || !why.ok()) {
    End(absl::Status(
        why.ok() ? absl::StatusCode::kUnavailable : why.code(),
        absl::StrCat(server, ": ", why.ok() ? "ended early" : why.message())));
    return;
  }
  MaybeFinish();
}

// Every wait is bounded, as in worker/client/shard_client.cc.
void SimPass::WatchSilence() {
  auto self = shared_from_this();
  options_.world->After(absl::Milliseconds(250), options_.life, [self] {
    if (self->over_) {
      return;
    }
    if (self->options_.world->now() - self->heard_ >=
        self->options_.silence_max) {
      self->End(absl::DeadlineExceededError(
          absl::StrCat("waits for ", self->waits_for_)));
      return;
    }
    self->WatchSilence();
  });
}

void SimPass::Touch() {
  heard_ = options_.world->now();
  options_.progress();
}

void SimPass::RequestUnit(uint32_t unit) {
  const ChunkTable& table = *options_.table;
  uint64_t& missing = missing_[unit];
  missing = 0;
  for (uint32_t server = 0; server < fetch_.size(); ++server) {
    FetchLink& link = fetch_[server];
    if (link.stream == nullptr) {
      continue;
    }
    BulkHeader header;
    header.kind = BulkKind::kFetchRequest;
    header.timeline = options_.pass.timeline;
    header.step = options_.pass.version;
    header.incarnation = options_.pass.incarnation;
    header.placement_version = options_.pass.view.placement_version;
    for (const TensorUse& use : table.layout().units[unit].tensors) {
      for (const uint32_t chunk : table.chunks_of_tensor(use.tensor)) {
        if (options_.placement.owner(static_cast<int>(chunk)) == server) {
          BulkItem& item = header.items.emplace_back();
          item.chunk = chunk;
          item.field = kServedField;
        }
      }
    }
    if (header.items.empty()) {
      continue;
    }
    header.sequence = link.next_sequence++;
    missing += header.items.size();
    link.stream->ClientWrite(MakeBulkMessage(header));
    link.outstanding.push_back(std::move(header));
    link.units.push_back(unit);
  }
}

void SimPass::OnFetched(uint32_t server, const grpc::ByteBuffer& buffer) {
  if (over_) {
    return;
  }
  const absl::Status status = TakeFetched(server, buffer);
  if (!status.ok()) {
    End(absl::Status(status.code(),
                     absl::StrCat(NameOf(server), ": ", status.message())));
    return;
  }
  Touch();
  if (!over_) {
    Advance();
  }
}

absl::Status SimPass::TakeFetched(uint32_t server,
                                  const grpc::ByteBuffer& buffer) {
  BALLAST_ASSIGN_OR_RETURN(const BulkMessage message,
                           BulkMessage::Parse(buffer));
  const BulkHeader& header = message.header();
  if (header.kind == BulkKind::kError) {
    return message.error();
  }
  FetchLink& link = fetch_[server];
  if (header.kind != BulkKind::kFetchReply || link.outstanding.empty() ||
      header.sequence != link.outstanding.front().sequence ||
      header.step != link.outstanding.front().step) {
    return absl::InternalError(absl::StrCat(
        "an answer at version ", header.step, " that nobody asked for"));
  }
  const uint64_t life = options_.pass.view.servers[server].life;
  if (life != 0 && header.incarnation != life) {
    return absl::AbortedError(absl::StrCat("weights of incarnation ",
                                           header.incarnation,
                                           "; the placement names ", life));
  }
  std::vector<BulkItem>& wanted = link.outstanding.front().items;
  for (size_t i = 0; i < header.items.size(); ++i) {
    const auto found =
        std::find_if(wanted.begin(), wanted.end(), [&](const BulkItem& item) {
          return item.chunk == header.items[i].chunk;
        });
    if (found == wanted.end() ||
        header.items[i].payload_bytes !=
            options_.table->served_bytes(header.items[i].chunk)) {
      return absl::InternalError("bytes that were not asked for");
    }
    StorePayload(message, i);
    wanted.erase(found);
    --missing_[link.units.front()];
  }
  if (wanted.empty()) {
    link.outstanding.pop_front();
    link.units.pop_front();
  }
  return absl::OkStatus();
}

void SimPass::StorePayload(const BulkMessage& message, size_t index) {
  const Chunk& chunk =
      options_.table->chunk(message.header().items[index].chunk);
  const uint64_t offset =
      chunk.begin * DTypeBytes(options_.table->tensor_of(chunk.id).served);
  message.CopyPayload(index, weights_[chunk.tensor].data() + offset);
}

bool SimPass::UnitThere(uint32_t unit) const {
  const auto found = missing_.find(unit);
  return found != missing_.end() && found->second == 0;
}

void SimPass::Advance() {
  const auto units = static_cast<uint32_t>(options_.job->layout.units.size());
  const uint32_t places = options_.pass.evaluate ? units : 2 * units;
  const auto unit_at = [units](uint32_t place) {
    return place < units ? place : 2 * units - 1 - place;
  };
  // A unit is asked for again only when its first visit is over.
  while (next_request_ < places && next_request_ <= place_ + kAhead &&
         (next_request_ < units || unit_at(next_request_) != units - 1 ||
          place_ >= units)) {
    RequestUnit(unit_at(next_request_++));
  }
  if (computing_ || !staged_.empty() || place_ == places) {
    MaybeFinish();
    return;
  }
  const uint32_t unit = unit_at(place_);
  if (next_request_ <= place_ || !UnitThere(unit)) {
    waits_for_ = absl::StrCat("weights of unit ", unit);
    return;
  }
  waits_for_.clear();
  computing_ = true;
  missing_.erase(unit);
  CheckWeights(unit);
  uint32_t micro_batches = 0;
  for (const WorkerCore::Part& part : options_.pass.parts) {
    micro_batches += part.node.count;
  }
  auto self = shared_from_this();
  options_.world->After(options_.unit_time * micro_batches, options_.life,
                        [self] {
                          if (!self->over_) {
                            self->ComputeUnit();
                          }
                        });
}

// The direct oracle of rule 7: nothing else than the version asked for.
void SimPass::CheckWeights(uint32_t unit) {
  for (const TensorUse& use : options_.job->layout.units[unit].tensors) {
    if (options_.pass.version >= options_.twin->weights.size() ||
        weights_[use.tensor] !=
            options_.twin->weights[options_.pass.version][use.tensor]) {
      options_.world->Violate(
          "fetched weights",
          absl::StrCat(options_.life->name, " fetched ",
                       options_.job->layout.tensors[use.tensor].name,
                       " at version ", options_.pass.version,
                       ", which has other bytes than the twin's"));
    }
  }
}

void SimPass::ComputeUnit() {
  computing_ = false;
  ++units_done_;
  const auto units = static_cast<uint32_t>(options_.job->layout.units.size());
  const uint32_t place = place_++;
  if (place + 1 == units) {
    weights_hash_ = HashOf(weights_);
    if (options_.pass.evaluate) {
      for (const WorkerCore::Part& part : options_.pass.parts) {
        for (uint32_t m = part.node.first; m < part.node.end(); ++m) {
          v1::MicroBatchLoss& loss = losses_.emplace_back();
          loss.set_micro_batch(m);
          loss.set_loss_sum(LossOf(*options_.job, options_.pass.version, m,
                                   /*eval=*/true, weights_hash_));
        }
      }
    }
  } else if (place >= units) {
    PushUnit(2 * units - 1 - place);
  }
  options_.progress();
  if (!over_) {
    Advance();
  }
}

void SimPass::PushUnit(uint32_t unit) {
  const std::vector<TensorUse>& uses = options_.job->layout.units[unit].tensors;
  for (size_t part = 0; part < options_.pass.parts.size(); ++part) {
    for (size_t slot = 0; slot < uses.size(); ++slot) {
      const bool loss =
          unit + 1 == options_.job->layout.units.size() && slot == 0;
      staged_.push_back(
          [this, part, use = uses[slot], loss] { QueuePart(part, use, loss); });
    }
  }
  if (unit == 0) {
    staged_.push_back([this] {
      for (auto& [key, debt] : debts_) {
        debt.all_queued = true;
      }
      for (size_t i = 0; i < options_.pass.parts.size(); ++i) {
        for (const uint32_t server : options_.pass.parts[i].servers) {
          debts_[{i, server}].all_queued = true;
        }
      }
    });
  }
  while (!staged_.empty() && staged_bytes_ < options_.staging_bytes) {
    const auto stage = std::move(staged_.front());
    staged_.pop_front();
    stage();
  }
}

void SimPass::QueuePart(size_t part, const TensorUse& use, bool carries_loss) {
  const WorkerCore::Part& what = options_.pass.parts[part];
  const ChunkTable& table = *options_.table;
  const std::vector<float> sum = GradientOfNode(
      *options_.job, options_.pass.step, what.node, use, weights_[use.tensor]);
  std::set<uint32_t> touched;
  for (const uint32_t id : table.chunks_of_tensor(use.tensor)) {
    const uint32_t owner = options_.placement.owner(static_cast<int>(id));
    if (std::find(what.servers.begin(), what.servers.end(), owner) ==
        what.servers.end()) {
      continue;
    }
    const Chunk& chunk = table.chunk(id);
    Piece piece;
    piece.part = part;
    piece.item.chunk = id;
    piece.item.use = use.use;
    piece.item.span = what.node;
    piece.item.elem_count = chunk.elem_count();
    piece.item.payload_bytes = chunk.elem_count() * sizeof(float);
    if (carries_loss && id == table.loss_chunk() &&
        use.use == table.loss_use()) {
      piece.item.has_loss = true;
      piece.item.loss = LossOfNode(*options_.job, options_.pass.step, what.node,
                                   weights_hash_);
    }
    piece.data = std::make_shared<const std::vector<float>>(
        sum.begin() + static_cast<ptrdiff_t>(chunk.begin),
        sum.begin() + static_cast<ptrdiff_t>(chunk.end));
    staged_bytes_ += piece.item.payload_bytes;
    ++debts_[{part, owner}].pieces;
    push_[owner].queue.push_back(std::move(piece));
    touched.insert(owner);
  }
  for (const uint32_t server : touched) {
    SendPieces(server);
  }
}

void SimPass::SendPieces(uint32_t server) {
  PushLink& link = push_[server];
  while (link.greeted && !link.queue.empty() && !link.ended) {
    BulkHeader header;
    std::vector<BulkPayload> payloads;
    std::vector<Piece> pieces;
    uint64_t bytes = 0;
    while (!link.queue.empty()) {
      const uint64_t more = link.queue.front().item.payload_bytes;
      if (bytes + more > link.credit ||
          (!pieces.empty() && bytes + more > kMessageBytes)) {
        break;
      }
      bytes += more;
      pieces.push_back(std::move(link.queue.front()));
      link.queue.pop_front();
    }
    if (pieces.empty()) {
      return;
    }
    link.credit -= bytes;
    header.kind = BulkKind::kPush;
    header.timeline = options_.pass.timeline;
    header.step = options_.pass.step;
    header.incarnation = options_.pass.incarnation;
    header.placement_version = options_.pass.view.placement_version;
    header.sequence = link.next_sequence++;
    for (const Piece& piece : pieces) {
      header.items.push_back(piece.item);
      payloads.push_back(
          {reinterpret_cast<const std::byte*>(piece.data->data()),
           piece.item.payload_bytes, piece.data});
    }
    pushed_bytes_ += bytes;
    link.unacknowledged.emplace(header.sequence, std::move(pieces));
    link.stream->ClientWrite(MakeBulkMessage(header, std::move(payloads)));
  }
}

void SimPass::OnAcknowledged(uint32_t server, const grpc::ByteBuffer& buffer) {
  if (over_) {
    return;
  }
  const absl::Status status = TakeAcknowledged(server, buffer);
  if (!status.ok()) {
    End(absl::Status(status.code(),
                     absl::StrCat(NameOf(server), ": ", status.message())));
    return;
  }
  Touch();
  if (over_) {
    return;
  }
  SendPieces(server);
  while (!staged_.empty() && staged_bytes_ < options_.staging_bytes) {
    const auto stage = std::move(staged_.front());
    staged_.pop_front();
    stage();
  }
  Advance();
}

absl::Status SimPass::TakeAcknowledged(uint32_t server,
                                       const grpc::ByteBuffer& buffer) {
  BALLAST_ASSIGN_OR_RETURN(const BulkMessage message,
                           BulkMessage::Parse(buffer));
  const BulkHeader& header = message.header();
  PushLink& link = push_[server];
  if (header.kind == BulkKind::kError) {
    return message.error();
  }
  link.credit += header.credit_bytes;
  if (header.kind == BulkKind::kHello) {
    link.greeted = true;
    return absl::OkStatus();
  }
  const auto found = link.unacknowledged.find(header.sequence);
  if (header.kind != BulkKind::kPushAck || found == link.unacknowledged.end()) {
    return absl::InternalError("an acknowledgement of nothing");
  }
  const uint64_t life = options_.pass.view.servers[server].life;
  if (life != 0 && header.incarnation != life) {
    return absl::AbortedError(absl::StrCat("an acknowledgement of incarnation ",
                                           header.incarnation,
                                           "; the gradients went to ", life));
  }
  if (header.items.size() != found->second.size()) {
    return absl::AbortedError(absl::StrCat("took ", header.items.size(), " of ",
                                           found->second.size(), " gradients"));
  }
  for (const Piece& piece : found->second) {
    staged_bytes_ -= piece.item.payload_bytes;
    Debt& debt = debts_[{piece.part, server}];
    --debt.pieces;
    debt.life = header.incarnation;
  }
  link.unacknowledged.erase(found);
  return absl::OkStatus();
}

void SimPass::MaybeFinish() {
  const auto units = static_cast<uint32_t>(options_.job->layout.units.size());
  const uint32_t places = options_.pass.evaluate ? units : 2 * units;
  if (over_ || computing_ || place_ != places || !staged_.empty()) {
    if (!staged_.empty()) {
      waits_for_ = "room to send";
    }
    return;
  }
  if (!told_pushed_) {
    told_pushed_ = true;
    options_.all_pushed();
    if (over_) {
      return;
    }
  }
  for (uint32_t i = 0; i < push_.size(); ++i) {
    const PushLink& link = push_[i];
    if (link.stream != nullptr && (!link.greeted || !link.queue.empty() ||
                                   !link.unacknowledged.empty())) {
      waits_for_ = absl::StrCat(NameOf(i), ": acknowledgements");
      return;
    }
  }
  bool all_ended = true;
  for (size_t i = 0; i < fetch_.size(); ++i) {
    for (Link* link :
         {static_cast<Link*>(&fetch_[i]), static_cast<Link*>(&push_[i])}) {
      if (link->stream != nullptr && !link->ended) {
        all_ended = false;
        if (!finishing_) {
          link->stream->ClientHalfClose();
        }
      }
    }
  }
  finishing_ = true;
  waits_for_ = "the end of the streams";
  if (all_ended) {
    End(absl::OkStatus());
  }
}

void SimPass::CallOff() {
  End(absl::CancelledError("the pass was called off"));
}

void SimPass::Abandon() {
  over_ = true;
  staged_.clear();
}

void SimPass::End(const absl::Status& status) {
  if (over_) {
    return;
  }
  over_ = true;
  staged_.clear();
  if (!status.ok()) {
    for (size_t i = 0; i < fetch_.size(); ++i) {
      for (Link* link :
           {static_cast<Link*>(&fetch_[i]), static_cast<Link*>(&push_[i])}) {
        if (link->stream != nullptr && !link->ended) {
          link->stream->ClientCancel();
        }
      }
    }
  }
  WorkerCore::PassEnd end;
  end.id = options_.pass.id;
  end.status = status;
  for (const auto& [key, debt] : debts_) {
    if (debt.all_queued && debt.pieces == 0) {
      const uint64_t life = debt.life != 0
                                ? debt.life
                                : options_.pass.view.servers[key.second].life;
      end.acks.push_back(
          {options_.pass.parts[key.first].node, key.second, life});
    }
  }
  if (status.ok()) {
    end.losses = losses_;
  }
  end.figures.set_pushed_bytes(pushed_bytes_);
  auto self = shared_from_this();
  options_.world->After(absl::Microseconds(10), options_.life,
                        [self, end] { self->options_.ended(end); });
}

}  // namespace ballast::sim
