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

void CoordinatorCore::AddOrders(uint32_t slot,
                                v1::ServerDirective* directive) const {
  const auto works = [this](uint32_t other) {
    return servers_.at(other).incarnation != 0 &&
           servers_.at(other).version.has_value();
  };
  for (const auto& [to, chunks] : moves_.From(slot)) {
    if (works(to)) {
      FillOrder(servers_.at(to), chunks, directive->add_replicate());
    }
  }
  for (const auto& [from, chunks] : moves_.To(slot)) {
    if (works(from)) {
      FillOrder(servers_.at(from), chunks, directive->add_receive());
    }
  }
}

}  // namespace ballast
