// SPDX-License-Identifier: Apache-2.0
// A shard server's data directory: chunk records in a slab file (O_DIRECT,
// io_uring), and RocksDB for what must be transactional: which extents a
// checkpoint consists of.
//
// The swap file and the checkpoint are the same thing. Working versions live in
// extents that only memory knows; a checkpoint is a synced RocksDB batch that
// names the extents of one version, written after an fdatasync of the slab.
// Under durability `step` each chunk has a base besides: the record that redo
// begins from, whose version may differ from chunk to chunk. The free list is
// never stored: at open, what no checkpoint and no base names is free.
//
// An extent is held by its working owner (Allocate .. Release), by each
// checkpoint that names it and by the base; it is free when nobody holds it. A
// record is never overwritten in place.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/hash.h"
#include "storage/disk.h"

namespace ballast {

// Bytes of the slab; both multiples of 4 KiB.
struct Extent {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  friend bool operator==(const Extent&, const Extent&) = default;
};

// One chunk's record in a checkpoint, or its base.
struct CheckpointEntry {
  uint32_t chunk = 0;
  uint64_t version = 0;   // Older than the checkpoint's for unchanged chunks.
  uint64_t timeline = 0;  // Of the record.
  Extent extent;
  friend bool operator==(const CheckpointEntry&,
                         const CheckpointEntry&) = default;
};

struct StoredCheckpoint {
  uint64_t timeline = 0;
  uint64_t step = 0;
  std::vector<CheckpointEntry> entries;
};

struct SlabIoStats {
  uint64_t bytes_written = 0;
  uint64_t bytes_read = 0;
  uint64_t syncs = 0;
};

// Thread-safe. Completions run on the store's own I/O thread and must not
// block; they may submit.
class SlabStore {
 public:
  using Done = std::function<void(absl::Status)>;

  struct Options {
    Disk* disk = PosixDisk();  // Not owned.
    std::string dir;           // Created when missing.
    // Identity of the run the directory belongs to. Who does not know it yet
    // asks ReadDataDirectoryRun (storage/data_dir.h).
    Hash128 run;
    std::string owner;  // Written into LOCK: "ps-0 pid 123 of run austen".
    uint64_t extend_bytes = 64 << 20;  // Preallocation step of the slab.
    uint32_t queue_depth = 16;         // Requests in flight at most.
    // RocksDB's memtables and block cache together stay below this.
    uint64_t index_memory_bytes = 1 << 20;
    // False: pread and pwrite, as where the kernel has no io_uring.
    bool use_io_uring = true;
  };

  // Locks the directory (flock on LOCK) for the life of the object.
  // Errors:
  //   FAILED_PRECONDITION  another process owns it (named), or it belongs to
  //                        another run, or is a non-empty folder that is not a
  //                        data directory. Nothing is changed or wiped.
  //   DATA_LOSS            the index or the slab is damaged or cut short.
  static absl::StatusOr<std::unique_ptr<SlabStore>> Open(
      const Options& options);
  virtual ~SlabStore() = default;

  // Checkpoints found at open or committed since, oldest first.
  virtual std::vector<StoredCheckpoint> checkpoints() const = 0;

  // Takes a free extent; extends the slab when there is none. `bytes` is a
  // multiple of 4 KiB, not 0.
  // Errors: RESOURCE_EXHAUSTED  the disk is full (path and bytes named).
  virtual absl::StatusOr<Extent> Allocate(uint64_t bytes) = 0;
  // The working owner lets go; a checkpoint may still hold it, and so does I/O
  // in flight.
  virtual void Release(const Extent& extent) = 0;
  // Makes the caller the working owner of an extent that a checkpoint names.
  virtual void Adopt(const Extent& extent) = 0;

  // `data` is 4 KiB aligned, extent.bytes long, and stays valid until `done`.
  // Errors given to done: DATA_LOSS (EIO), RESOURCE_EXHAUSTED (ENOSPC).
  virtual void Write(const Extent& extent, const std::byte* data,
                     Done done) = 0;
  // Reads the first `bytes` (a multiple of 4 KiB) of the extent.
  virtual void Read(const Extent& extent, uint64_t bytes, std::byte* data,
                    Done done) = 0;
  // The same for `bytes` from `offset` of the extent on, both multiples of
  // 4 KiB: how a record travels that is larger than a message.
  virtual void WritePiece(const Extent& extent, uint64_t offset, uint64_t bytes,
                          const std::byte* data, Done done) = 0;
  virtual void ReadPiece(const Extent& extent, uint64_t offset, uint64_t bytes,
                         std::byte* data, Done done) = 0;

  // Commits a checkpoint: fdatasync of the slab, then one synced batch. Blocks.
  // Call after the writes of all entries are done. After a failed fdatasync the
  // store refuses every further commit. The same commit again is OK.
  // Errors: INVALID_ARGUMENT     nobody holds an entry's extent.
  //         ALREADY_EXISTS       another checkpoint of this timeline and step.
  //         DATA_LOSS            the sync failed, now or earlier.
  //         RESOURCE_EXHAUSTED   the disk is full; try again later.
  virtual absl::Status Commit(const StoredCheckpoint& checkpoint) = 0;
  // Forgets a checkpoint; its extents become free unless held otherwise.
  // OK when there is no such checkpoint. Blocks.
  virtual absl::Status Drop(uint64_t timeline, uint64_t step) = 0;

  // The base of every chunk that has one, by chunk.
  virtual std::vector<CheckpointEntry> bases() const = 0;
  // Makes the entries the bases of their chunks, all or none: fdatasync of the
  // slab, then one synced batch. What the old bases named becomes free unless
  // held otherwise. Blocks. Call after the writes of all entries are done;
  // drop log records only after it returned OK. The same call again is OK.
  // Errors: as of Commit (no ALREADY_EXISTS).
  virtual absl::Status CommitBase(
      const std::vector<CheckpointEntry>& entries) = 0;
  // Forgets the bases of chunks that went to another server, or of all chunks
  // that an abandoned timeline had. Chunks without one are passed over. Blocks.
  virtual absl::Status DropBase(const std::vector<uint32_t>& chunks) = 0;

  virtual SlabIoStats stats() const = 0;
  virtual const std::string& slab_path() const = 0;
};

}  // namespace ballast
