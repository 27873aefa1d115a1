// SPDX-License-Identifier: Apache-2.0
// Which checkpoints exist and which are on the way. One is decided with a step,
// saved by every server in its own time, described by a manifest, and exists
// from the moment the coordinator has logged it. Older ones beyond `keep` are
// dropped only then.
//
// Parts are kept by chunk: it does not matter which life of a server saved one,
// nor how chunks were spread later. A checkpoint that can no longer be finished
// is given up; a newer one that stands ends the wait for older ones.
//
// Pure. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/layout.h"
#include "proto/ballast.pb.h"
#include "ps/membership/run_state.h"
#include "storage/checkpoint.h"

namespace ballast {

class CheckpointBook {
 public:
  // `standing` are logged already; path by key.
  CheckpointBook(uint32_t keep, std::map<StepKey, std::string> standing)
      : keep_(keep), standing_(std::move(standing)) {}

  // The decision asks for a checkpoint. owner_of[chunk] is the place of the
  // server that saves it: the owner once the decision is carried out.
  void Expect(const v1::Decision& decision, std::vector<uint32_t> owner_of);
  // What a server has saved. Repeated chunks and parts of checkpoints that
  // nobody waits for change nothing.
  // Errors: INVALID_ARGUMENT  a chunk that does not exist or that is of a
  //         version that it cannot be; the message names it.
  absl::Status AddPart(const v1::CheckpointSaved& part);
  // Whether chunks of this place are missing.
  bool Owes(uint32_t slot, const StepKey& key) const;
  // Of all that are expected, oldest first.
  std::vector<StepKey> OwedBy(uint32_t slot) const;

  // The oldest checkpoint whose parts are all there and whose manifest has not
  // been taken yet, as a manifest without the run's own fields.
  std::optional<CheckpointManifest> TakeComplete(const ChunkTable& table);

  // The manifest stands on disk: the checkpoint exists. Returns those that are
  // no longer kept, oldest first. Older ones that nobody finished are given up.
  std::vector<StepKey> Logged(const StepKey& key, const std::string& path);
  // Gives one up that is expected; no part of it is waited for.
  void Abandon(const StepKey& key) { pending_.erase(key); }
  void AbandonAll() { pending_.clear(); }

  // Standing and expected ones: what servers must not drop.
  std::vector<StepKey> Kept() const;
  const std::map<StepKey, std::string>& standing() const { return standing_; }
  bool IsExpected(const StepKey& key) const { return pending_.contains(key); }
  // Decided and not logged yet, oldest first.
  std::vector<StepKey> Expected() const;

 private:
  struct Saved {
    v1::SavedRecord record;
    uint32_t directory = 0;  // Index into Pending::directories.
  };
  struct Pending {
    v1::Decision decision;
    std::vector<uint32_t> owner_of;
    std::vector<std::optional<Saved>> saved;  // By chunk.
    std::vector<std::string> directories;
    std::map<uint32_t, uint32_t> missing;  // Chunks by place; none is zero.
    bool taken = false;
  };
  const uint32_t keep_;
  std::map<StepKey, std::string> standing_;
  std::map<StepKey, Pending> pending_;
};

}  // namespace ballast
