// SPDX-License-Identifier: Apache-2.0
// Everything that storage asks of a machine's disk, as an interface, because a
// power cut cannot be rehearsed on a real one: kill -9 leaves the page cache
// alone and so never tests a sync. The slab, the gradient log, the data
// directory, the manifests and their readers go through a Disk; PosixDisk is
// the real one, tests/testing/sim_disk.h one in memory that loses, reorders and
// tears whatever was not synced.
//
// What a power cut may take: the bytes of a file that were written after its
// last Sync, in any order and by 512 byte sectors; names made, changed or
// removed in a folder after its last SyncDirectory. Preallocated bytes that
// were never written read as zeros.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "storage/state_store.h"

namespace ballast {

// An open file. Thread-safe but for set_path.
class DiskFile {
 public:
  explicit DiskFile(std::string path) : path_(std::move(path)) {}
  virtual ~DiskFile() = default;

  // For messages. Who renames the file says so here, while nothing else uses
  // it.
  const std::string& path() const { return path_; }
  void set_path(std::string path) { path_ = std::move(path); }
  // Whether transfers go past the page cache (and so want whole pages).
  virtual bool direct() const = 0;

  virtual absl::StatusOr<uint64_t> Bytes() const = 0;
  // Gives bytes [from, to) of the file blocks on the disk; the file is at least
  // `from` long before, and what lies behind counts for nothing, and at least
  // `to` long after. On failure it is `from` long.
  // Errors: RESOURCE_EXHAUSTED  the disk is full (path and bytes named).
  virtual absl::Status Preallocate(uint64_t from, uint64_t to) = 0;
  // Reads exactly out.size() bytes; blocks. Of a direct file all of offset,
  // size and memory are multiples of 4 KiB.
  // Errors: DATA_LOSS  the file ends before, or EIO.
  virtual absl::Status Read(uint64_t offset,
                            absl::Span<std::byte> out) const = 0;
  // fdatasync: what was written before is durable on OK; blocks. After an
  // error nothing in the file that was written since the last OK counts as
  // durable, ever: the kernel reports a lost write once and forgets it.
  // Errors: DATA_LOSS.
  virtual absl::Status Sync() = 0;

 private:
  std::string path_;
};

enum class IoKind { kRead, kWrite, kSync };

struct IoRequest {
  IoKind kind = IoKind::kRead;
  DiskFile* file = nullptr;   // Of the queue's disk; outlives the request.
  uint64_t offset = 0;        // A multiple of 4 KiB, as are `bytes` and `data`.
  std::byte* data = nullptr;  // Valid until `done`; a write only reads it.
  uint64_t bytes = 0;         // 0: only runs `done`, unless it is a sync.
  // Runs on the queue's thread (of the simulated disk: where it is pumped),
  // must not block, may submit.
  // Errors: DATA_LOSS           EIO, or the file ends before, or a failed
  //                             fdatasync.
  //         RESOURCE_EXHAUSTED  the disk is full.
  std::function<void(absl::Status)> done;
};

// Asynchronous transfers and syncs. There is no order among requests: a sync
// covers the writes whose `done` had run when it was submitted, no others.
// Thread-safe.
class IoQueue {
 public:
  struct Options {
    // Requests given to the kernel at once; more wait in order. 1 to 1024.
    uint32_t depth = 16;
    bool use_io_uring = true;
  };
  // Finishes everything that was submitted, completions included.
  virtual ~IoQueue() = default;
  virtual void Submit(IoRequest request) = 0;
};

// Held while the object lives (and not longer than its process).
class DiskLock {
 public:
  virtual ~DiskLock() = default;
};

// Thread-safe. Every call blocks. Errors of all: NOT_FOUND (no such file or
// folder), RESOURCE_EXHAUSTED (full), DATA_LOSS (EIO), FAILED_PRECONDITION
// (refused by rights, or a file where a folder is wanted); each names the path.
class Disk {
 public:
  virtual ~Disk() = default;

  // For reading and writing past the page cache where that is possible, by one
  // process at a time: waits, some seconds at most, for transfers that a killed
  // one has left in flight. Errors: FAILED_PRECONDITION  they do not end.
  virtual absl::StatusOr<std::unique_ptr<DiskFile>> OpenDirect(
      const std::string& path, bool create) = 0;
  // Read-only, through the page cache: no alignment is asked for.
  virtual absl::StatusOr<std::unique_ptr<DiskFile>> OpenForRead(
      const std::string& path) = 0;

  virtual bool Exists(const std::string& path) = 0;
  // Errors: DATA_LOSS  longer than `bytes_max`, or unreadable.
  virtual absl::StatusOr<std::string> ReadFile(const std::string& path,
                                               uint64_t bytes_max) = 0;
  // Replaces `path` as a whole or not at all, durable on return: temporary
  // name beside it ("<path>.tmp"), sync, rename, sync of the folder.
  virtual absl::Status ReplaceFile(const std::string& path,
                                   absl::string_view bytes) = 0;

  // Durable after SyncDirectory of the folder.
  virtual absl::Status Rename(const std::string& from,
                              const std::string& to) = 0;
  virtual absl::Status Unlink(const std::string& path) = 0;
  // Names of the files and folders in a folder, ascending.
  virtual absl::StatusOr<std::vector<std::string>> List(
      const std::string& path) = 0;
  // Creates the folder and its parents, durable on return.
  virtual absl::Status MakeDirectories(const std::string& path) = 0;
  virtual absl::Status SyncDirectory(const std::string& path) = 0;

  // Locks the file `path`, made when it is missing, and writes `owner` into it.
  // Errors: ABORTED  another process holds it; the text is what that wrote, or
  //                  "another process".
  virtual absl::StatusOr<std::unique_ptr<DiskLock>> Lock(
      const std::string& path, const std::string& owner) = 0;

  virtual absl::StatusOr<std::unique_ptr<IoQueue>> StartQueue(
      const IoQueue::Options& options) = 0;
  // As OpenEmbeddedStateStore; RocksDB on the real disk.
  virtual absl::StatusOr<std::unique_ptr<StateStore>> OpenStateStore(
      const std::string& dir, const EmbeddedStoreOptions& options) = 0;
};

// The machine's own file system. It has no state, so one object serves all.
Disk* PosixDisk();

}  // namespace ballast
