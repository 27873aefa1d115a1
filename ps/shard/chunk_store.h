// SPDX-License-Identifier: Apache-2.0
// The chunks of one server: which version each is at, where its bytes are, and
// how they move between memory and the slab. Tiers are those of the residency
// plan; whatever is not resident passes through the window.
//
// Runs on the engine's thread; completions of the disk come back through the
// mailbox.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/layout.h"
#include "offload/arena.h"
#include "offload/residency.h"
#include "ps/shard/mailbox.h"
#include "storage/record.h"
#include "storage/slab_store.h"

namespace ballast {

// An extent whose working owner is whoever holds a copy; the last one lets go.
using SharedExtent = std::shared_ptr<const Extent>;

// Bytes of a chunk in memory: its whole record image, or the prefix.
struct Image {
  ArenaBuffer buffer;
  uint64_t bytes = 0;    // total_bytes or prefix_bytes of the layout.
  bool ready = false;    // False while it is being read.
  bool writing = false;  // On its way to the slab; only read meanwhile.
  bool claimed = false;  // Read for the update, which has not come yet.
  uint32_t sends = 0;    // Replies on their way that point into it.
  uint32_t awaited = 0;  // Streams whose next requests name it.
  uint32_t served = 0;   // Replies it went into since it was made.
};

struct ChunkState {
  Chunk chunk;
  const TensorSpec* tensor = nullptr;
  RecordLayout layout;
  Tier tier = Tier::kStreamed;
  uint64_t version = 0;  // Parameters after this step.
  // Of the last change, which is what a record of it says. Older than
  // `version` after skipped steps.
  uint64_t data_version = 0;
  uint64_t data_timeline = 0;
  std::shared_ptr<Image> resident;  // Of kWeights (prefix) and kWhole.
  // shared: replies and reads on their way outlive its place here.
  std::shared_ptr<Image> window;
  SharedExtent extent;        // Holds data_version; null: memory alone does.
  BlockDigests digests;       // Of data_version when `extent` is set.
  bool save_pending = false;  // A checkpoint waits for it to be written.

  bool is_whole(const Image& image) const {
    return image.bytes == layout.total_bytes;
  }
};

class ChunkStore {
 public:
  struct Options {
    Hash128 run;
    SlabStore* slab = nullptr;  // Not owned; outlives this.
    Arena* resident = nullptr;
    Arena* window = nullptr;
    std::shared_ptr<Mailbox> mailbox;
    // A server cannot go on after this (DATA_LOSS, a failing disk).
    std::function<void(const absl::Status&)> fail;
  };

  // `owned` ascending; tiers[i] belongs to owned[i]. `table` outlives this.
  // Errors: RESOURCE_EXHAUSTED  the resident arena is smaller than planned.
  static absl::StatusOr<std::unique_ptr<ChunkStore>> Create(
      const Options& options, const ChunkTable& table,
      const std::vector<uint32_t>& owned, OptimizerKind optimizer,
      const std::vector<Tier>& tiers);

  // Makes room for chunks that come from elsewhere, `ids` ascending: without a
  // record or a version yet, in memory while there is some to spare. Places and
  // addresses of chunks change.
  void Insert(const std::vector<uint32_t>& ids);
  // Lets go of chunks that went elsewhere; as Insert.
  void Erase(const std::vector<uint32_t>& ids);

  std::vector<ChunkState>& chunks() { return chunks_; }
  // nullptr: this server does not own it.
  ChunkState* Find(uint32_t id);

  // What a fetch of the served field can read now; nullptr: nothing in memory.
  std::shared_ptr<Image> Served(const ChunkState& chunk) const;
  // The whole record, if it is in memory.
  std::shared_ptr<Image> Whole(const ChunkState& chunk) const;

  enum class Need { kAhead, kSoon, kNow };
  // Gets the prefix or the whole record into the window unless it is in memory
  // or on its way. kAhead takes free memory only and what every worker has
  // had; kSoon takes what is not awaited; kNow takes whatever can be given up.
  // False: no room; try again after something changed.
  bool Bring(ChunkState* chunk, bool whole, Need need);
  // Takes memory of the window for a copy; empty when there is no room.
  ArenaBuffer TakeWindow(uint64_t bytes, absl::string_view what, Need need);

  // Takes an extent for a record of the chunk. Before a change is made in
  // memory that must be written: a full disk then only delays it.
  // Errors: RESOURCE_EXHAUSTED  the disk is full; try again later.
  absl::StatusOr<SharedExtent> TakeExtent(const ChunkState& chunk);
  // Seals `image` (whole, of data_version) and writes it to `extent`, which
  // becomes the chunk's.
  void Write(ChunkState* chunk, const std::shared_ptr<Image>& image,
             SharedExtent extent);
  // Starts the write of a resident chunk that only memory holds; nothing for
  // others. Errors: as TakeExtent.
  absl::Status Save(ChunkState* chunk);
  // Its extent holds data_version: what was begun is written.
  bool IsOnDisk(const ChunkState& chunk) const;
  // Reads the resident image, whole or prefix, from the chunk's extent.
  void FillResident(ChunkState* chunk);
  // Takes an extent of the slab that holds the chunk's data_version.
  void Adopt(ChunkState* chunk, const Extent& extent);

  RecordId IdOf(const ChunkState& chunk) const;
  uint64_t in_flight() const { return in_flight_; }
  // Workers that fetch every version: after so many sends an image is done.
  void set_readers(uint32_t readers) { readers_ = readers; }

 private:
  ChunkStore(const Options& options, const ChunkTable& table,
             OptimizerKind optimizer)
      : options_(options), table_(table), optimizer_(optimizer) {}
  ChunkState MakeState(uint32_t id, Tier tier) const;
  void Reindex();
  void Read(ChunkState* chunk, const std::shared_ptr<Image>& image);
  bool MakeRoom(uint64_t bytes, Need need);
  bool CanGiveUp(const ChunkState& chunk, Need need) const;
  void OnRead(uint32_t id, const std::shared_ptr<Image>& image,
              const RecordId& wanted, const absl::Status& status);
  SharedExtent Share(const Extent& extent);

  const Options options_;
  const ChunkTable& table_;
  const OptimizerKind optimizer_;
  std::vector<ChunkState> chunks_;
  std::vector<int64_t> index_;  // By chunk id; -1: not ours.
  uint64_t in_flight_ = 0;
  uint32_t readers_ = 1;
};

}  // namespace ballast
