// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/redo_book.h"

#include <algorithm>
#include <limits>

namespace ballast {
namespace {

const LogPosition* FindChunk(const VoteMark& mark, uint32_t chunk) {
  const auto found = std::lower_bound(
      mark.gradients.begin(), mark.gradients.end(), chunk,
      [](const auto& entry, uint32_t id) { return entry.first < id; });
  return found != mark.gradients.end() && found->first == chunk ? &found->second
                                                                : nullptr;
}

}  // namespace

void RedoBook::Fill(const std::vector<CheckpointEntry>& bases,
                    const LogContents& contents) {
  SetBases(bases);
  for (const VoteMark& mark : contents.marks) {
    AddVote(mark);
  }
}

void RedoBook::SetBases(const std::vector<CheckpointEntry>& bases) {
  bases_.clear();
  for (const CheckpointEntry& base : bases) {
    SetBase(base);
  }
}

void RedoBook::AddVote(VoteMark mark) {
  std::sort(mark.gradients.begin(), mark.gradients.end());
  std::string owner = mark.owner;
  votes_[{mark.step, mark.timeline}][std::move(owner)] = std::move(mark);
}

void RedoBook::DropThrough(uint64_t step) {
  votes_.erase(
      votes_.begin(),
      votes_.upper_bound({step, std::numeric_limits<uint64_t>::max()}));
}

const CheckpointEntry* RedoBook::Base(uint32_t chunk) const {
  const auto found = bases_.find(chunk);
  return found == bases_.end() ? nullptr : &found->second;
}

const VoteMark* RedoBook::Vote(uint64_t timeline, uint64_t step,
                               const std::string& owner) const {
  const auto votes = votes_.find({step, timeline});
  if (votes == votes_.end()) {
    return nullptr;
  }
  const auto found = votes->second.find(owner);
  return found == votes->second.end() ? nullptr : &found->second;
}

const LogPosition* RedoBook::Gradient(uint64_t timeline, uint64_t step,
                                      uint32_t chunk) const {
  const auto votes = votes_.find({step, timeline});
  if (votes == votes_.end()) {
    return nullptr;
  }
  for (const auto& [owner, mark] : votes->second) {
    if (const LogPosition* position = FindChunk(mark, chunk)) {
      return position;
    }
  }
  return nullptr;
}

RedoBook::Reach RedoBook::ReachOf(const CheckpointEntry& base) const {
  Reach reach = {base.version, base.timeline};
  while (true) {
    const uint64_t step = reach.step + 1;
    const uint64_t oldest = reach.timeline;
    bool found = false;
    for (auto it = votes_.lower_bound({step, oldest});
         it != votes_.end() && it->first.first == step; ++it) {
      if (Gradient(it->first.second, step, base.chunk) != nullptr) {
        reach = {step, it->first.second};
        found = true;
      }
    }
    if (!found) {
      return reach;
    }
  }
}

void RedoBook::FillHeld(v1::JoinRequest* join) const {
  std::map<std::vector<uint64_t>, std::vector<uint32_t>> groups;
  for (const auto& [chunk, base] : bases_) {
    const Reach reach = ReachOf(base);
    groups[{base.timeline, base.version, reach.step, reach.timeline}].push_back(
        chunk);
  }
  join->clear_held();
  for (const auto& [figures, chunks] : groups) {
    v1::HeldChunks* held = join->add_held();
    held->set_timeline(figures[0]);
    held->set_version(figures[1]);
    held->set_redoable(figures[2]);
    held->set_redoable_timeline(figures[3]);
    for (const uint32_t chunk : chunks) {
      v1::ChunkRange* last =
          held->chunks().empty()
              ? nullptr
              : held->mutable_chunks(held->chunks_size() - 1);
      if (last != nullptr && last->first() + last->count() == chunk) {
        last->set_count(last->count() + 1);
      } else {
        last = held->add_chunks();
        last->set_first(chunk);
        last->set_count(1);
      }
    }
  }
}

}  // namespace ballast
