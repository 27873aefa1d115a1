// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/move_book.h"

#include "common/rule.h"

namespace ballast {

void MoveBook::Clear() {
  plan_.clear();
  synced_.clear();
}

void MoveBook::Synced(uint32_t chunk, uint32_t to, uint64_t life,
                      uint64_t step) {
  synced_[{chunk, to}] = {life, step};
}

bool MoveBook::IsSynced(uint32_t chunk, uint32_t to, uint64_t life,
                        uint64_t step) const {
  const auto synced = synced_.find({chunk, to});
  return synced != synced_.end() && synced->second.life == life &&
         synced->second.step >= step;
}

std::vector<PlannedMove> MoveBook::Ready(uint64_t step,
                                         const ServerTable& servers) const {
  std::vector<PlannedMove> ready;
  for (const PlannedMove& move : plan_) {
    const ServerSlot& to = servers.at(move.to);
    if (to.incarnation == 0 || !to.version.has_value()) {
      continue;
    }
    if (IsSynced(move.chunk, move.to, to.incarnation, step) ||
        !BALLAST_RULE(kOnlySyncedReplicaMoves)) {
      ready.push_back(move);
    }
  }
  return ready;
}

std::map<uint32_t, std::vector<uint32_t>> MoveBook::From(uint32_t slot) const {
  std::map<uint32_t, std::vector<uint32_t>> chunks;
  for (const PlannedMove& move : plan_) {
    if (move.from == slot) {
      chunks[move.to].push_back(move.chunk);
    }
  }
  return chunks;
}

std::map<uint32_t, std::vector<uint32_t>> MoveBook::To(uint32_t slot) const {
  std::map<uint32_t, std::vector<uint32_t>> chunks;
  for (const PlannedMove& move : plan_) {
    if (move.to == slot) {
      chunks[move.from].push_back(move.chunk);
    }
  }
  return chunks;
}

}  // namespace ballast
