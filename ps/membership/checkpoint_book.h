// SPDX-License-Identifier: Apache-2.0
// Which checkpoints exist and which are on the way. One is decided with a step,
// saved by every server in its own time, described by a manifest, and exists
// from the moment the coordinator has logged it. Older ones beyond `keep` are
// dropped only then.
//
// Pure. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
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

  // The decision asks for a checkpoint; these servers will save it.
  void Expect(const v1::Decision& decision,
              const std::vector<uint64_t>& servers);
  // One server has saved its part. Repeated parts and parts of checkpoints that
  // nobody waits for change nothing.
  void AddPart(uint64_t server, const v1::CheckpointSaved& part);
  bool Owes(uint64_t server, const StepKey& key) const;

  // The oldest checkpoint whose parts are all there and whose manifest has not
  // been taken yet, as a manifest without the run's own fields.
  // Errors: INTERNAL  a chunk is missing, saved twice, unknown or of another
  //         version than any server could have; the message names it.
  absl::StatusOr<std::optional<CheckpointManifest>> TakeComplete(
      const ChunkTable& table);

  // The manifest stands on disk: the checkpoint exists. Returns those that are
  // no longer kept, oldest first.
  std::vector<StepKey> Logged(const StepKey& key, const std::string& path);

  // Standing and expected ones: what servers must not drop.
  std::vector<StepKey> Kept() const;
  const std::map<StepKey, std::string>& standing() const { return standing_; }
  // Decided and not logged yet, oldest first.
  std::vector<StepKey> Expected() const;

 private:
  struct Pending {
    v1::Decision decision;
    std::map<uint64_t, std::optional<v1::CheckpointSaved>> parts;
    bool taken = false;
  };
  const uint32_t keep_;
  std::map<StepKey, std::string> standing_;
  std::map<StepKey, Pending> pending_;
};

}  // namespace ballast
