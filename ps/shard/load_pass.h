// SPDX-License-Identifier: Apache-2.0
// How a server's chunks come to be: initial values, or a checkpoint that any
// number of servers with any chunk size wrote. A pass that is worked on bit by
// bit, so that a load of minutes stops neither heartbeats nor a new directive.
//
// Runs on the engine's thread.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/hash.h"
#include "common/job.h"
#include "ps/shard/chunk_store.h"
#include "storage/checkpoint.h"
#include "storage/slab_store.h"

namespace ballast {

class LoadPass {
 public:
  struct Options {
    uint64_t timeline = 0;  // Of what is written now.
    uint64_t step = 0;      // The version that every chunk gets.
    uint64_t seed = 0;      // run.seed, for initial values.
    std::string manifest;   // Path; empty: initial values.
    std::string data_dir;   // Ours, absolute.
    Hash128 run;
    Disk* disk = nullptr;  // Not owned, as below.
    SlabStore* slab = nullptr;
    ChunkStore* chunks = nullptr;  // Of no version yet.
    // Whether records must say `step`, as the bases of a redo log do: older
    // ones (of a checkpoint of skipped steps) are copied then.
    bool exact = false;
    std::vector<size_t> places;  // Of the chunks to load, in the store.
  };
  explicit LoadPass(Options options) : options_(std::move(options)) {}

  // Opens what it reads from.
  // Errors: DATA_LOSS           the checkpoint is damaged, naming where.
  //         NOT_FOUND           no such manifest, or a slab is missing.
  //         INVALID_ARGUMENT    it is of another model or optimizer.
  absl::Status Start(OptimizerKind optimizer, const ModelLayout& layout);

  // Makes the next chunk, if there is room for it. Records of a checkpoint
  // that lie in our own slab with the same range are taken as they are; others
  // are copied. `worked`: there may be more to do at once.
  // Errors: as Start; RESOURCE_EXHAUSTED  the disk is full.
  absl::Status Work(bool* worked);
  // Every chunk is there, on disk or in memory.
  bool IsDone() const;
  uint64_t loaded() const { return next_; }  // Chunks.

 private:
  absl::Status OpenManifest(OptimizerKind optimizer, const ModelLayout& layout);
  // False: no room yet.
  absl::StatusOr<bool> Load(ChunkState* chunk);
  // True when the checkpoint's record of the chunk is in our slab.
  bool Adopt(ChunkState* chunk);
  absl::Status Fill(const ChunkState& chunk, const Image& image);

  const Options options_;
  size_t next_ = 0;  // Of the places.
  std::optional<CheckpointManifest> manifest_;
  std::unique_ptr<CheckpointReader> reader_;
  std::map<std::string, uint32_t> tensors_;  // Of the manifest, by name.
  // Records of our own slab that a checkpoint of the store names:
  // (tensor of the manifest, begin) to the record.
  std::map<std::pair<uint32_t, uint64_t>, const ManifestRecord*> own_;
};

}  // namespace ballast
