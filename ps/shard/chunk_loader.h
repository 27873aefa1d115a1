// SPDX-License-Identifier: Apache-2.0
// How a server's chunks come to be: initial values, or a checkpoint that any
// number of servers with any chunk size wrote.

#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "common/hash.h"
#include "common/job.h"
#include "ps/shard/chunk_store.h"
#include "ps/shard/mailbox.h"
#include "storage/checkpoint.h"
#include "storage/slab_store.h"

namespace ballast {

struct LoadRequest {
  uint64_t timeline = 0;  // Of what is written now.
  uint64_t step = 0;      // The version that every chunk gets.
  uint64_t seed = 0;      // run.seed, for initial values.
  std::string manifest;   // Path; empty: initial values.
  std::string data_dir;   // Ours, absolute.
  Hash128 run;
  SlabStore* slab = nullptr;   // Not owned.
  Mailbox* mailbox = nullptr;  // Run here while the disk works.
  // Asked between chunks and while waiting: what ended the server, if anything.
  std::function<absl::Status()> failure;
};

// Makes every chunk of `chunks` be at request.step. Records of a checkpoint
// that lie in our own slab with the same range are taken as they are; others
// are copied. Blocks, on the engine's thread.
// Errors: DATA_LOSS           the checkpoint is damaged, naming where.
//         NOT_FOUND           no such manifest, or a slab is missing.
//         INVALID_ARGUMENT    it is of another model or optimizer.
//         RESOURCE_EXHAUSTED  the disk is full.
absl::Status LoadChunks(const LoadRequest& request, OptimizerKind optimizer,
                        const ModelLayout& layout, ChunkStore* chunks);

}  // namespace ballast
