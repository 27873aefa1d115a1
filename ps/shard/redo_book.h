// SPDX-License-Identifier: Apache-2.0
// What a server can rebuild after its death: of each chunk the record that redo
// begins from (its base), and of each voted step where the synced gradients lie
// that redo it. Kept in memory beside what the slab's index and the gradient
// log hold on disk, and filled from them when a life begins.
//
// A step counts when its vote's mark is durable with every gradient that the
// mark names, never by gradients alone: without the mark the vote cannot be
// given again (docs/PROTOCOL.md, section 5). Pure; thread-compatible.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "proto/ballast.pb.h"
#include "storage/gradient_log.h"
#include "storage/slab_store.h"

namespace ballast {

class RedoBook {
 public:
  // What an earlier life left.
  void Fill(const std::vector<CheckpointEntry>& bases,
            const LogContents& contents);

  // The index has these and no others.
  void SetBases(const std::vector<CheckpointEntry>& bases);
  // The index has it.
  void SetBase(const CheckpointEntry& base) { bases_[base.chunk] = base; }
  void DropBase(uint32_t chunk) { bases_.erase(chunk); }
  // The log has synced it. Its gradients are in ascending order of chunks.
  void AddVote(VoteMark mark);
  // Bases of a later step are durable.
  void DropThrough(uint64_t step);

  // nullptr: it has none.
  const CheckpointEntry* Base(uint32_t chunk) const;
  // The vote that the slot `owner` gave or may have given; nullptr: none.
  const VoteMark* Vote(uint64_t timeline, uint64_t step,
                       const std::string& owner) const;
  // The complete gradient of a step that was voted for; nullptr: none.
  const LogPosition* Gradient(uint64_t timeline, uint64_t step,
                              uint32_t chunk) const;

  struct Reach {
    uint64_t step = 0;      // The base's version, or that of the newest
    uint64_t timeline = 0;  // gradient in a row behind it.
  };
  // Of a chunk with a base. Where several timelines have a gradient of a step,
  // the newest counts, and nothing older behind it.
  Reach ReachOf(const CheckpointEntry& base) const;

  // Fills `held`: chunks with a base, in ranges of equal figures.
  void FillHeld(v1::JoinRequest* join) const;

 private:
  using StepKey = std::pair<uint64_t, uint64_t>;              // Step, timeline.
  std::map<uint32_t, CheckpointEntry> bases_;                 // By chunk.
  std::map<StepKey, std::map<std::string, VoteMark>> votes_;  // By owner.
};

}  // namespace ballast
