// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/base_pass.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "common/crash_point.h"

namespace ballast {
namespace {

// A second write keeps the disk busy, more would only be in the way of others.
constexpr uint32_t kSavesMax = 2;
// A commit is a sync of the slab and one of the index: a few of them a pass.
constexpr size_t kCommitsWanted = 4;

}  // namespace

bool BasePass::IsStale(const ChunkState& chunk) const {
  const CheckpointEntry* base = options_.book->Base(chunk.chunk.id);
  return base == nullptr || base->version != chunk.data_version ||
         base->timeline != chunk.data_timeline;
}

bool BasePass::IsStale() const {
  const std::vector<ChunkState>& chunks = options_.chunks->chunks();
  return std::any_of(chunks.begin(), chunks.end(),
                     [this](const ChunkState& c) { return IsStale(c); });
}

void BasePass::Start() {
  const std::vector<ChunkState>& chunks = options_.chunks->chunks();
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (IsStale(chunks[i])) {
      pending_.push_back(i);
    }
  }
  batch_ = pending_.size() / kCommitsWanted + 1;
}

void BasePass::Work() {
  if (abandoned_ || !active()) {
    return;
  }
  uint32_t saving = 0;
  std::erase_if(pending_, [&](size_t place) {
    ChunkState& chunk = options_.chunks->chunks()[place];
    if (!options_.chunks->IsOnDisk(chunk)) {
      if (saving >= kSavesMax) {
        return false;
      }
      ++saving;
      if (const absl::Status status = options_.chunks->Save(&chunk);
          !status.ok()) {
        options_.fail(status);
        saving = kSavesMax;
      }
      return false;
    }
    CheckpointEntry entry;
    entry.chunk = chunk.chunk.id;
    entry.version = chunk.data_version;
    entry.timeline = chunk.data_timeline;
    entry.extent = *chunk.extent;
    ready_.emplace_back(entry, chunk.extent);
    return true;
  });
  if (!committing_ && !ready_.empty() &&
      (pending_.empty() || ready_.size() >= batch_)) {
    Commit();
  }
}

void BasePass::Commit() {
  committing_ = true;
  // shared: a task must be copyable, and holds the extents meanwhile.
  auto batch =
      std::make_shared<std::vector<std::pair<CheckpointEntry, SharedExtent>>>();
  batch->swap(ready_);
  auto entries = std::make_shared<std::vector<CheckpointEntry>>();
  for (const auto& [entry, extent] : *batch) {
    entries->push_back(entry);
  }
  BALLAST_CRASH_POINT("server.base.before_sync");
  options_.tasks->Run(
      [slab = options_.slab, entries] { return slab->CommitBase(*entries); },
      [this, batch, entries](const absl::Status& status) {
        if (abandoned_) {
          return;
        }
        committing_ = false;
        if (!status.ok()) {
          // A full disk: tried again.
          ready_.insert(ready_.begin(), batch->begin(), batch->end());
          options_.fail(status);
          return;
        }
        for (const CheckpointEntry& entry : *entries) {
          options_.book->SetBase(entry);
        }
        options_.advanced();
      });
}

void BasePass::Abandon() {
  abandoned_ = true;
  pending_.clear();
  ready_.clear();
}

uint64_t BasePass::LowestBase() const {
  uint64_t lowest = std::numeric_limits<uint64_t>::max();
  for (const ChunkState& chunk : options_.chunks->chunks()) {
    const CheckpointEntry* base = options_.book->Base(chunk.chunk.id);
    lowest = std::min(lowest, base == nullptr ? 0 : base->version);
  }
  return lowest;
}

}  // namespace ballast
