// SPDX-License-Identifier: Apache-2.0
// Chunks that change their server: planned from who is to stay, copied while
// the run goes on, and handed over inside a decision.
#include <algorithm>
#include <string>
#include <utility>

#include "ps/membership/coordinator_core.h"
#include "ps/membership/move_planner.h"

namespace ballast {
namespace {

// State that travels between two servers at a time, waiting for its flip.
constexpr uint64_t kBatchBytes = uint64_t{256} << 20;
// Leases after which a server that is away is replaced by its replica.
constexpr int kReplaceAfter = 2;

void FillOrder(const ServerSlot& other, const std::vector<uint32_t>& chunks,
               v1::ReplicaOrder* order) {
  order->set_server(other.name);
  order->set_address(other.address);
  order->set_incarnation(other.incarnation);
  for (const v1::ChunkRange& range : RangesOf(chunks)) {
    *order->add_chunks() = range;
  }
}

}  // namespace

v1::Placement CoordinatorCore::PlacementRecord() const {
  v1::Placement placement = servers_.ToProto();
  placement.set_chunk_elems(chunk_elems_);
  placement.set_timeline(identity_.timeline);
  placement.set_optimizer(
      options_.job.optimizer.kind == OptimizerKind::kAdamW ? "adamw" : "sgd");
  return placement;
}

void CoordinatorCore::PlanMoves() {
  if (!durable() || !servers_.placed() || phase_ == Phase::kForming) {
    return;
  }
  OwnershipPlan plan;
  plan.chunk_bytes = ChunkBytes(*table_, options_.job.optimizer.kind);
  plan.owner = servers_.owners();
  for (uint32_t i = 0; i < servers_.size(); ++i) {
    const ServerSlot& slot = servers_.at(i);
    const WantedMember* wanted = wanted_.Find(slot.name);
    const bool is_there = servers_.Owns(i) || slot.incarnation != 0;
    plan.keeps.push_back(wanted != nullptr && !wanted->draining && is_there);
  }
  if (std::find(plan.keeps.begin(), plan.keeps.end(), true) ==
      plan.keeps.end()) {
    return;
  }
  moves_.SetPlan(MoveBatch(plan, TargetOwners(*table_, plan), kBatchBytes));
}

void CoordinatorCore::TakeInSync(uint32_t slot, const v1::Vote& vote) {
  const std::vector<uint32_t>& owners = servers_.owners();
  for (const v1::ReplicaOrder& order : vote.in_sync()) {
    const auto to = servers_.Find(order.server());
    if (!to.has_value()) {
      continue;
    }
    for (const v1::ChunkRange& range : order.chunks()) {
      const uint64_t end = std::min<uint64_t>(
          owners.size(), uint64_t{range.first()} + range.count());
      for (uint32_t chunk = range.first(); chunk < end; ++chunk) {
        if (owners[chunk] == slot) {
          moves_.Synced(chunk, *to, order.incarnation(), vote.step());
        }
      }
    }
  }
}

void CoordinatorCore::FlipMoves(v1::Decision* decision) {
  std::map<std::pair<uint32_t, uint32_t>, std::vector<uint32_t>> flips;
  for (const PlannedMove& move : moves_.Ready(decision->step(), servers_)) {
    flips[{move.from, move.to}].push_back(move.chunk);
  }
  if (flips.empty()) {
    return;
  }
  for (const auto& [sides, chunks] : flips) {
    v1::ChunkMove* move = decision->add_moves();
    move->set_from(sides.first);
    move->set_to(sides.second);
    for (const v1::ChunkRange& range : RangesOf(chunks)) {
      *move->add_chunks() = range;
    }
    for (const uint32_t chunk : chunks) {
      servers_.SetOwner(chunk, sides.second);
    }
  }
  servers_.Moved();
  decision->set_placement_version(servers_.placement_version());
  actions_.changes.push_back(PutPlacement(PlacementRecord()));
  PlanMoves();
}

// A server that was drained is let go when nothing hangs on it any more.
void CoordinatorCore::RetireServers() {
  if (over() || phase_ == Phase::kForming || !servers_.placed()) {
    return;
  }
  for (const WantedMember& member : std::vector(wanted_.members())) {
    if (member.role != v1::ROLE_SERVER || !member.draining) {
      continue;
    }
    const auto place = servers_.Find(member.name);
    if (place.has_value() &&
        (servers_.Owns(*place) || !checkpoints_.OwedBy(*place).empty())) {
      continue;
    }
    wanted_.Remove(member.name);
    actions_.changes.push_back(PutWanted(wanted_.members()));
  }
}

std::vector<std::optional<uint32_t>> CoordinatorCore::StandingReplicas() const {
  std::vector<bool> keeps;
  for (uint32_t i = 0; i < servers_.size(); ++i) {
    const WantedMember* wanted = wanted_.Find(servers_.at(i).name);
    keeps.push_back(options_.job.server.durability == Durability::kReplica &&
                    servers_.Owns(i) && wanted != nullptr && !wanted->draining);
  }
  return RingReplicas(keeps);
}

void CoordinatorCore::AddOrders(uint32_t slot,
                                v1::ServerDirective* directive) const {
  // One order for each pair: what moves to where the second copies are anyway
  // moves from there.
  std::map<uint32_t, std::vector<uint32_t>> to = moves_.From(slot);
  std::map<uint32_t, std::vector<uint32_t>> from = moves_.To(slot);
  const std::vector<std::optional<uint32_t>> ring = StandingReplicas();
  if (ring[slot].has_value()) {
    to[*ring[slot]] = servers_.ChunksOf(slot);
  }
  for (uint32_t other = 0; other < ring.size(); ++other) {
    if (ring[other] == slot) {
      from[other] = servers_.ChunksOf(other);
    }
  }
  const auto works = [this](uint32_t other) {
    return servers_.at(other).incarnation != 0 &&
           servers_.at(other).version.has_value();
  };
  for (const auto& [other, chunks] : to) {
    if (works(other)) {
      v1::ReplicaOrder* order = directive->add_replicate();
      FillOrder(servers_.at(other), chunks, order);
      order->set_standing(ring[slot] == other);
    }
  }
  for (const auto& [other, chunks] : from) {
    if (works(other)) {
      v1::ReplicaOrder* order = directive->add_receive();
      FillOrder(servers_.at(other), chunks, order);
      order->set_standing(ring[other] == slot);
    }
  }
}

// Durability replica: a server that stays away is replaced by the one that has
// the second copy of its chunks. That one begins a new life, which finds them
// among what it holds; the step in flight is gathered again.
void CoordinatorCore::TakeOver(absl::Time now) {
  const std::vector<std::optional<uint32_t>> ring = StandingReplicas();
  for (const uint32_t slot : servers_.Missing()) {
    const ServerSlot& gone = servers_.at(slot);
    if (!ring[slot].has_value() || over() || phase_ == Phase::kForming ||
        now - gone.lost_at < kReplaceAfter * members_.lease()) {
      continue;
    }
    const uint32_t heir = *ring[slot];
    const uint64_t life = servers_.at(heir).incarnation;
    const std::vector<uint32_t> chunks = servers_.ChunksOf(slot);
    const bool has_all =
        life != 0 &&
        std::all_of(chunks.begin(), chunks.end(), [&](uint32_t chunk) {
          return moves_.IsSynced(chunk, heir, life, committed());
        });
    if (!has_all) {
      continue;
    }
    for (const uint32_t chunk : chunks) {
      servers_.SetOwner(chunk, heir);
    }
    servers_.Moved();
    step_->Withdraw(slot);
    step_->Withdraw(heir);
    for (const StepKey& key : checkpoints_.OwedBy(slot)) {
      checkpoints_.Abandon(key);
      checkpoint_wanted_ = true;
    }
    Remove(life, now);
    PlanMoves();
    actions_.changes.push_back(PutPlacement(PlacementRecord()));
    return;  // Who is in and who owns what has changed.
  }
}

}  // namespace ballast
