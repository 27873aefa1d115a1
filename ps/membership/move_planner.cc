// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/move_planner.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "common/check.h"
#include "ps/membership/placement.h"

namespace ballast {
namespace {

// Whole units are kept spread over the servers, as PlaceChunks spread them.
std::vector<uint32_t> UnitOfChunk(const ChunkTable& table) {
  const ModelLayout& layout = table.layout();
  std::vector<int64_t> unit_of_tensor(layout.tensors.size(), -1);
  for (size_t unit = 0; unit < layout.units.size(); ++unit) {
    for (const TensorUse& use : layout.units[unit].tensors) {
      if (unit_of_tensor[use.tensor] < 0) {
        unit_of_tensor[use.tensor] = static_cast<int64_t>(unit);
      }
    }
  }
  std::vector<uint32_t> unit;
  unit.reserve(table.chunks().size());
  for (const Chunk& chunk : table.chunks()) {
    unit.push_back(static_cast<uint32_t>(unit_of_tensor[chunk.tensor]));
  }
  return unit;
}

// Owners being changed, with the sums that the choices need.
class Balance {
 public:
  Balance(const ChunkTable& table, const OwnershipPlan& now)
      : bytes_(now.chunk_bytes),
        keeps_(now.keeps),
        unit_(UnitOfChunk(table)),
        owner_(now.owner),
        total_(now.keeps.size(), 0),
        of_unit_(now.keeps.size(),
                 std::vector<uint64_t>(table.layout().units.size(), 0)) {
    for (uint32_t chunk = 0; chunk < owner_.size(); ++chunk) {
      total_[owner_[chunk]] += bytes_[chunk];
      of_unit_[owner_[chunk]][unit_[chunk]] += bytes_[chunk];
      largest_ = std::max(largest_, bytes_[chunk]);
      sum_ += bytes_[chunk];
    }
    const auto servers =
        static_cast<uint64_t>(std::count(keeps_.begin(), keeps_.end(), true));
    BALLAST_CHECK(servers > 0);
    slack_ = std::max(largest_, sum_ / servers / 20);
  }

  // Gives away what lies on servers that keep nothing: the largest chunks
  // first, each to the server that has least of its unit among those that it
  // does not make too full.
  void Empty() {
    std::vector<uint32_t> homeless;
    for (uint32_t chunk = 0; chunk < owner_.size(); ++chunk) {
      if (!keeps_[owner_[chunk]]) {
        homeless.push_back(chunk);
      }
    }
    std::stable_sort(
        homeless.begin(), homeless.end(),
        [this](uint32_t a, uint32_t b) { return bytes_[a] > bytes_[b]; });
    for (const uint32_t chunk : homeless) {
      Give(chunk, HomeFor(chunk));
    }
  }

  // From the fullest to the emptiest until they are within the slack. Every
  // step brings the two closer, so it ends.
  void Level() {
    while (true) {
      const uint32_t fullest = Extreme(/*most=*/true);
      const uint32_t emptiest = Extreme(/*most=*/false);
      if (total_[fullest] - total_[emptiest] <= slack_) {
        return;
      }
      Give(BestOf(fullest, emptiest), emptiest);
    }
  }

  std::vector<uint32_t> TakeOwners() { return std::move(owner_); }

 private:
  void Give(uint32_t chunk, uint32_t to) {
    const uint32_t from = owner_[chunk];
    total_[from] -= bytes_[chunk];
    of_unit_[from][unit_[chunk]] -= bytes_[chunk];
    total_[to] += bytes_[chunk];
    of_unit_[to][unit_[chunk]] += bytes_[chunk];
    owner_[chunk] = to;
  }

  // Ties go to the lower index.
  uint32_t Extreme(bool most) const {
    std::optional<uint32_t> best;
    for (uint32_t s = 0; s < total_.size(); ++s) {
      if (keeps_[s] && (!best || (most ? total_[s] > total_[*best]
                                       : total_[s] < total_[*best]))) {
        best = s;
      }
    }
    return *best;
  }

  uint32_t HomeFor(uint32_t chunk) const {
    const uint64_t limit = total_[Extreme(/*most=*/false)] + slack_;
    std::optional<uint32_t> best;
    for (uint32_t s = 0; s < total_.size(); ++s) {
      if (!keeps_[s] || total_[s] + bytes_[chunk] > limit) {
        continue;
      }
      const auto key = [this, chunk](uint32_t server) {
        return std::pair(of_unit_[server][unit_[chunk]], total_[server]);
      };
      if (!best || key(s) < key(*best)) {
        best = s;
      }
    }
    return *best;  // The emptiest can always take it: slack_ >= largest_.
  }

  // The chunk of `from` whose unit `to` misses most, then the largest: few
  // chunks travel. The difference of the two is more than the slack, so
  // whatever chunk goes, it shrinks.
  uint32_t BestOf(uint32_t from, uint32_t to) const {
    std::optional<uint32_t> best;
    const auto key = [this, from, to](uint32_t chunk) {
      const auto more = static_cast<int64_t>(of_unit_[from][unit_[chunk]]) -
                        static_cast<int64_t>(of_unit_[to][unit_[chunk]]);
      return std::pair(more, bytes_[chunk]);
    };
    for (uint32_t chunk = 0; chunk < owner_.size(); ++chunk) {
      if (owner_[chunk] == from && bytes_[chunk] > 0 &&
          (!best || key(chunk) > key(*best))) {
        best = chunk;
      }
    }
    BALLAST_CHECK(best.has_value());
    return *best;
  }

  const std::vector<uint64_t>& bytes_;
  const std::vector<bool>& keeps_;
  const std::vector<uint32_t> unit_;
  std::vector<uint32_t> owner_;
  std::vector<uint64_t> total_;                 // Bytes, by server.
  std::vector<std::vector<uint64_t>> of_unit_;  // By server and unit.
  uint64_t largest_ = 0;
  uint64_t sum_ = 0;
  uint64_t slack_ = 0;
};

}  // namespace

std::vector<uint64_t> ChunkBytes(const ChunkTable& table,
                                 OptimizerKind optimizer) {
  std::vector<uint64_t> bytes;
  bytes.reserve(table.chunks().size());
  for (const Chunk& chunk : table.chunks()) {
    bytes.push_back(chunk.elem_count() *
                    StateBytesPerElem(table.tensor_of(chunk.id), optimizer));
  }
  return bytes;
}

std::vector<uint32_t> TargetOwners(const ChunkTable& table,
                                   const OwnershipPlan& now) {
  BALLAST_CHECK(now.owner.size() == table.chunks().size() &&
                now.chunk_bytes.size() == table.chunks().size());
  Balance balance(table, now);
  balance.Empty();
  balance.Level();
  return balance.TakeOwners();
}

std::vector<PlannedMove> MoveBatch(const OwnershipPlan& now,
                                   const std::vector<uint32_t>& target,
                                   uint64_t bytes_max) {
  BALLAST_CHECK(target.size() == now.owner.size());
  std::vector<PlannedMove> batch;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> bytes;  // By pair.
  for (uint32_t chunk = 0; chunk < target.size(); ++chunk) {
    if (now.owner[chunk] == target[chunk]) {
      continue;
    }
    uint64_t& of_pair = bytes[{now.owner[chunk], target[chunk]}];
    // Once one does not fit, none behind it goes: smaller ones would change
    // places with it from batch to batch.
    if (of_pair > 0 && of_pair + now.chunk_bytes[chunk] > bytes_max) {
      of_pair = bytes_max + 1;
      continue;
    }
    of_pair += std::max<uint64_t>(now.chunk_bytes[chunk], 1);
    batch.push_back({chunk, now.owner[chunk], target[chunk]});
  }
  return batch;
}

std::vector<std::optional<uint32_t>> RingReplicas(
    const std::vector<bool>& keeps) {
  const auto servers = static_cast<uint32_t>(keeps.size());
  std::vector<std::optional<uint32_t>> replica(servers);
  for (uint32_t s = 0; s < servers; ++s) {
    for (uint32_t hop = 1; keeps[s] && hop < servers; ++hop) {
      if (const uint32_t next = (s + hop) % servers; keeps[next]) {
        replica[s] = next;
        break;
      }
    }
  }
  return replica;
}

}  // namespace ballast
