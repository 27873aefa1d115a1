// SPDX-License-Identifier: Apache-2.0
#include "storage/slab_store.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/crash_point.h"
#include "common/mutex.h"
#include "common/rule.h"
#include "common/status_macros.h"
#include "storage/checkpoint_index.h"
#include "storage/data_dir.h"
#include "storage/extent_map.h"
#include "storage/file.h"
#include "storage/record.h"
#include "storage/state_store.h"

namespace ballast {
namespace {

constexpr int kGrowRoundsMax = 64;

bool IsWholePages(const Extent& extent) {
  return extent.bytes > 0 && extent.bytes % kPageBytes == 0 &&
         extent.offset % kPageBytes == 0;
}

using BaseMap = std::map<uint32_t, CheckpointEntry>;

class SlabStoreImpl final : public SlabStore {
 public:
  SlabStoreImpl(const Options& options, DataDirectory directory,
                std::unique_ptr<DiskFile> slab,
                std::unique_ptr<StateStore> index, ExtentMap extents,
                std::vector<StoredCheckpoint> checkpoints, BaseMap bases,
                std::unique_ptr<IoQueue> queue)
      : extend_bytes_(
            RoundUp(std::max<uint64_t>(options.extend_bytes, 1), kPageBytes)),
        directory_(std::move(directory)),
        slab_(std::move(slab)),
        index_(std::move(index)),
        extents_(std::move(extents)),
        checkpoints_(std::move(checkpoints)),
        bases_(std::move(bases)),
        queue_(std::move(queue)) {}

  std::vector<StoredCheckpoint> checkpoints() const override {
    MutexLock lock(&mutex_);
    return checkpoints_;
  }

  absl::StatusOr<Extent> Allocate(uint64_t bytes) override;
  void Release(const Extent& extent) override {
    MutexLock lock(&mutex_);
    extents_.Release(extent);
  }
  void Adopt(const Extent& extent) override {
    MutexLock lock(&mutex_);
    BALLAST_CHECK(extents_.Adopt(extent));
  }

  void Write(const Extent& extent, const std::byte* data, Done done) override {
    WritePiece(extent, 0, extent.bytes, data, std::move(done));
  }
  void Read(const Extent& extent, uint64_t bytes, std::byte* data,
            Done done) override {
    ReadPiece(extent, 0, bytes, data, std::move(done));
  }
  void WritePiece(const Extent& extent, uint64_t offset, uint64_t bytes,
                  const std::byte* data, Done done) override {
    bytes_written_.fetch_add(bytes, std::memory_order_relaxed);
    // A request names one kind of pointer for both directions; a write only
    // reads through it.
    Transfer(extent, IoKind::kWrite, offset, bytes,
             const_cast<std::byte*>(data), std::move(done));
  }
  void ReadPiece(const Extent& extent, uint64_t offset, uint64_t bytes,
                 std::byte* data, Done done) override {
    bytes_read_.fetch_add(bytes, std::memory_order_relaxed);
    Transfer(extent, IoKind::kRead, offset, bytes, data, std::move(done));
  }

  absl::Status Commit(const StoredCheckpoint& checkpoint) override;
  absl::Status Drop(uint64_t timeline, uint64_t step) override;

  std::vector<CheckpointEntry> bases() const override {
    MutexLock lock(&mutex_);
    std::vector<CheckpointEntry> bases;
    bases.reserve(bases_.size());
    for (const auto& [chunk, entry] : bases_) {
      bases.push_back(entry);
    }
    return bases;
  }
  absl::Status CommitBase(const std::vector<CheckpointEntry>& entries) override;
  absl::Status DropBase(const std::vector<uint32_t>& chunks) override;

  SlabIoStats stats() const override {
    return {bytes_written_.load(std::memory_order_relaxed),
            bytes_read_.load(std::memory_order_relaxed),
            syncs_.load(std::memory_order_relaxed)};
  }
  const std::string& slab_path() const override { return slab_->path(); }

 private:
  void Transfer(const Extent& extent, IoKind kind, uint64_t offset,
                uint64_t bytes, std::byte* data, Done done);
  std::optional<StoredCheckpoint> Find(uint64_t timeline, uint64_t step) const;
  // A pin on each entry's extent, or on none; `what` names them in an error.
  absl::Status Pin(const std::vector<CheckpointEntry>& entries,
                   const std::string& what);
  void Unpin(const std::vector<CheckpointEntry>& entries);
  // Removes what a failed commit may have left in the index.
  absl::Status SettleDoubts() ABSL_EXCLUSIVE_LOCKS_REQUIRED(commit_mutex_);
  absl::Status SyncSlab() ABSL_EXCLUSIVE_LOCKS_REQUIRED(commit_mutex_);

  const uint64_t extend_bytes_;
  const DataDirectory directory_;
  const std::unique_ptr<DiskFile> slab_;
  const std::unique_ptr<StateStore> index_;

  // Order: commit_mutex_, grow_mutex_, mutex_. The first two exist to put
  // changes of the index and of the slab's length in a row, so they are held
  // across that I/O; mutex_ never is.
  Mutex commit_mutex_;
  absl::Status poisoned_ ABSL_GUARDED_BY(commit_mutex_);
  // Commits whose batch failed: on the disk or not. At most one.
  std::vector<StoredCheckpoint> doubtful_ ABSL_GUARDED_BY(commit_mutex_);
  std::vector<CheckpointEntry> doubtful_bases_ ABSL_GUARDED_BY(commit_mutex_);
  Mutex grow_mutex_;
  mutable Mutex mutex_;
  ExtentMap extents_ ABSL_GUARDED_BY(mutex_);
  std::vector<StoredCheckpoint> checkpoints_ ABSL_GUARDED_BY(mutex_);
  BaseMap bases_ ABSL_GUARDED_BY(mutex_);

  // Plain counters: no other memory hangs on them.
  std::atomic<uint64_t> bytes_written_ = 0;
  std::atomic<uint64_t> bytes_read_ = 0;
  std::atomic<uint64_t> syncs_ = 0;

  // Last: its completions use what stands above.
  const std::unique_ptr<IoQueue> queue_;
};

absl::StatusOr<Extent> SlabStoreImpl::Allocate(uint64_t bytes) {
  BALLAST_CHECK(bytes > 0 && bytes % kPageBytes == 0);
  {
    MutexLock lock(&mutex_);
    if (const auto extent = extents_.Allocate(bytes)) {
      return *extent;
    }
  }
  MutexLock grow_lock(&grow_mutex_);
  // Each round after the first means that other threads took what the round
  // before had added.
  for (int round = 0; round < kGrowRoundsMax; ++round) {
    uint64_t size = 0;
    uint64_t missing = 0;
    {
      MutexLock lock(&mutex_);
      if (const auto extent = extents_.Allocate(bytes)) {
        return *extent;
      }
      size = extents_.size_bytes();
      missing = bytes - extents_.free_tail_bytes();
    }
    uint64_t added = RoundUp(missing, extend_bytes_);
    absl::Status grown = slab_->Preallocate(size, size + added);
    if (absl::IsResourceExhausted(grown) && added > missing) {
      added = missing;
      grown = slab_->Preallocate(size, size + added);
    }
    BALLAST_RETURN_IF_ERROR(grown);
    MutexLock lock(&mutex_);
    extents_.Grow(added);
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      slab_->path(), " lost every race for ", bytes, " bytes; try again"));
}

void SlabStoreImpl::Transfer(const Extent& extent, IoKind kind, uint64_t offset,
                             uint64_t bytes, std::byte* data, Done done) {
  BALLAST_CHECK(offset <= extent.bytes && bytes <= extent.bytes - offset);
  {
    MutexLock lock(&mutex_);
    BALLAST_CHECK(extents_.Adopt(extent));  // I/O in flight holds it too.
  }
  IoRequest request;
  request.kind = kind;
  request.file = slab_.get();
  request.offset = extent.offset + offset;
  request.data = data;
  request.bytes = bytes;
  request.done = [this, extent, done = std::move(done)](absl::Status status) {
    Release(extent);
    done(std::move(status));
  };
  queue_->Submit(std::move(request));
}

std::optional<StoredCheckpoint> SlabStoreImpl::Find(uint64_t timeline,
                                                    uint64_t step) const {
  MutexLock lock(&mutex_);
  for (const StoredCheckpoint& checkpoint : checkpoints_) {
    if (checkpoint.timeline == timeline && checkpoint.step == step) {
      return checkpoint;
    }
  }
  return std::nullopt;
}

absl::Status SlabStoreImpl::Pin(const std::vector<CheckpointEntry>& entries,
                                const std::string& what) {
  MutexLock lock(&mutex_);
  for (const CheckpointEntry& entry : entries) {
    if (!extents_.IsHeld(entry.extent)) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, " names the extent at ", entry.extent.offset, " (",
                       entry.extent.bytes, " bytes) for chunk ", entry.chunk,
                       ", which nobody holds"));
    }
  }
  for (const CheckpointEntry& entry : entries) {
    BALLAST_CHECK(extents_.Pin(entry.extent));
  }
  return absl::OkStatus();
}

void SlabStoreImpl::Unpin(const std::vector<CheckpointEntry>& entries) {
  MutexLock lock(&mutex_);
  for (const CheckpointEntry& entry : entries) {
    extents_.Unpin(entry.extent);
  }
}

absl::Status SlabStoreImpl::SyncSlab() {
  BALLAST_RETURN_IF_ERROR(poisoned_);
  if (!BALLAST_RULE(kBodyBeforePointer)) {
    return absl::OkStatus();
  }
  if (const absl::Status status = slab_->Sync(); !status.ok()) {
    // The kernel reports a lost write once and then forgets it: a second
    // fdatasync would succeed over missing bytes.
    poisoned_ = absl::DataLossError(absl::StrCat(
        status.message(),
        "; what was written since the last checkpoint may be lost, so no "
        "further one is taken: restart the server"));
    return poisoned_;
  }
  syncs_.fetch_add(1, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::Status SlabStoreImpl::Commit(const StoredCheckpoint& checkpoint) {
  MutexLock commit_lock(&commit_mutex_);
  if (const auto found = Find(checkpoint.timeline, checkpoint.step)) {
    return found->entries == checkpoint.entries
               ? absl::OkStatus()
               : absl::AlreadyExistsError(absl::StrCat(
                     "timeline ", checkpoint.timeline, " step ",
                     checkpoint.step, " has a checkpoint of other records"));
  }
  BALLAST_RETURN_IF_ERROR(SettleDoubts());
  BALLAST_RETURN_IF_ERROR(
      Pin(checkpoint.entries,
          absl::StrCat("checkpoint of step ", checkpoint.step)));
  if (const absl::Status status = SyncSlab(); !status.ok()) {
    Unpin(checkpoint.entries);
    return status;
  }
  if (const absl::Status status = AddCheckpoint(checkpoint, index_.get());
      !status.ok()) {
    // It may be on the disk all the same, and then the next open must find
    // these extents untouched: they stay pinned until it is surely gone.
    doubtful_.push_back(checkpoint);
    return status;
  }
  MutexLock lock(&mutex_);
  checkpoints_.push_back(checkpoint);
  return absl::OkStatus();
}

absl::Status SlabStoreImpl::SettleDoubts() {
  while (!doubtful_.empty()) {
    BALLAST_RETURN_IF_ERROR(RemoveCheckpoint(doubtful_.back(), index_.get()));
    Unpin(doubtful_.back().entries);
    doubtful_.pop_back();
  }
  if (doubtful_bases_.empty()) {
    return absl::OkStatus();
  }
  // Back to what stands in memory.
  std::vector<CheckpointEntry> put;
  std::vector<uint32_t> removed;
  {
    MutexLock lock(&mutex_);
    for (const CheckpointEntry& entry : doubtful_bases_) {
      const auto it = bases_.find(entry.chunk);
      if (it != bases_.end()) {
        put.push_back(it->second);
      } else {
        removed.push_back(entry.chunk);
      }
    }
  }
  BALLAST_RETURN_IF_ERROR(ChangeBases(put, removed, index_.get()));
  Unpin(doubtful_bases_);
  doubtful_bases_.clear();
  return absl::OkStatus();
}

absl::Status SlabStoreImpl::Drop(uint64_t timeline, uint64_t step) {
  MutexLock commit_lock(&commit_mutex_);
  BALLAST_RETURN_IF_ERROR(SettleDoubts());
  const auto found = Find(timeline, step);
  if (!found) {
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(RemoveCheckpoint(*found, index_.get()));
  Unpin(found->entries);
  MutexLock lock(&mutex_);
  std::erase_if(checkpoints_, [&](const StoredCheckpoint& checkpoint) {
    return checkpoint.timeline == timeline && checkpoint.step == step;
  });
  return absl::OkStatus();
}

absl::Status SlabStoreImpl::CommitBase(
    const std::vector<CheckpointEntry>& entries) {
  MutexLock commit_lock(&commit_mutex_);
  BALLAST_RETURN_IF_ERROR(SettleDoubts());
  std::vector<CheckpointEntry> fresh;  // Without those that stand already.
  std::set<uint32_t> chunks;
  {
    MutexLock lock(&mutex_);
    for (const CheckpointEntry& entry : entries) {
      BALLAST_CHECK(chunks.insert(entry.chunk).second);
      const auto it = bases_.find(entry.chunk);
      if (it == bases_.end() || it->second != entry) {
        fresh.push_back(entry);
      }
    }
  }
  if (fresh.empty()) {
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(Pin(fresh, "a base"));
  if (const absl::Status status = SyncSlab(); !status.ok()) {
    Unpin(fresh);
    return status;
  }
  BALLAST_CRASH_POINT("server.base.before_index");
  if (const absl::Status status = ChangeBases(fresh, {}, index_.get());
      !status.ok()) {
    doubtful_bases_ = std::move(fresh);  // As of a checkpoint.
    return status;
  }
  BALLAST_CRASH_POINT("server.base.after_index");
  MutexLock lock(&mutex_);
  for (const CheckpointEntry& entry : fresh) {
    const auto it = bases_.find(entry.chunk);
    if (it != bases_.end()) {
      extents_.Unpin(it->second.extent);
    }
    bases_[entry.chunk] = entry;
  }
  return absl::OkStatus();
}

absl::Status SlabStoreImpl::DropBase(const std::vector<uint32_t>& chunks) {
  MutexLock commit_lock(&commit_mutex_);
  BALLAST_RETURN_IF_ERROR(SettleDoubts());
  std::vector<uint32_t> found;
  {
    MutexLock lock(&mutex_);
    for (const uint32_t chunk : chunks) {
      if (bases_.count(chunk) != 0) {
        found.push_back(chunk);
      }
    }
  }
  if (found.empty()) {
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(ChangeBases({}, found, index_.get()));
  MutexLock lock(&mutex_);
  for (const uint32_t chunk : found) {
    if (const auto it = bases_.find(chunk); it != bases_.end()) {
      extents_.Unpin(it->second.extent);
      bases_.erase(it);
    }
  }
  return absl::OkStatus();
}

// Pins what an index entry names: it must lie within the slab, whole pages, and
// no two extents may overlap unless they are the same.
absl::Status PinEntry(const DiskFile& slab, const CheckpointEntry& entry,
                      const std::string& what, ExtentMap* extents) {
  if (IsWholePages(entry.extent) && extents->Pin(entry.extent)) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat(
      slab.path(), " has ", extents->size_bytes(), " bytes of pages and cannot",
      " hold the extent at ", entry.extent.offset, " (", entry.extent.bytes,
      " bytes) of chunk ", entry.chunk, " that ", what, " names"));
}

absl::StatusOr<ExtentMap> MapExtents(
    const DiskFile& slab, uint64_t slab_bytes,
    const std::vector<StoredCheckpoint>& checkpoints, const BaseMap& bases) {
  ExtentMap extents(slab_bytes / kPageBytes * kPageBytes);
  for (const StoredCheckpoint& checkpoint : checkpoints) {
    for (const CheckpointEntry& entry : checkpoint.entries) {
      BALLAST_RETURN_IF_ERROR(PinEntry(
          slab, entry, absl::StrCat("the checkpoint of step ", checkpoint.step),
          &extents));
    }
  }
  for (const auto& [chunk, entry] : bases) {
    BALLAST_RETURN_IF_ERROR(PinEntry(
        slab, entry, absl::StrCat("its base of version ", entry.version),
        &extents));
  }
  return extents;
}

// What the index names.
struct Named {
  std::vector<StoredCheckpoint> checkpoints;
  BaseMap bases;
};

absl::StatusOr<Named> ReadIndex(StateStore* index) {
  Named named;
  BALLAST_ASSIGN_OR_RETURN(named.checkpoints, ReadCheckpoints(index));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> bases,
                           ReadBases(index));
  for (const CheckpointEntry& entry : bases) {
    named.bases[entry.chunk] = entry;
  }
  return named;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SlabStore>> SlabStore::Open(
    const Options& options) {
  Disk* disk = options.disk;
  BALLAST_ASSIGN_OR_RETURN(
      DataDirectory directory,
      DataDirectory::Open(disk, options.dir, options.run, options.owner));
  // A directory is made in the order IDENTITY, index, slab: where a slab is,
  // an index must be, and an index that names extents must have a slab.
  // Anything else is loss, never a reason to start afresh.
  const std::string slab_path = options.dir + "/slab";
  const bool has_slab = disk->Exists(slab_path);
  EmbeddedStoreOptions index_options;
  index_options.memory_bytes = options.index_memory_bytes;
  index_options.create = !has_slab;
  BALLAST_ASSIGN_OR_RETURN(
      std::unique_ptr<StateStore> index,
      disk->OpenStateStore(options.dir + "/index", index_options));
  absl::StatusOr<Named> named = ReadIndex(index.get());
  if (!named.ok()) {
    return absl::Status(
        named.status().code(),
        absl::StrCat(options.dir, "/index: ", named.status().message()));
  }
  if (!has_slab && !(named->checkpoints.empty() && named->bases.empty())) {
    return absl::DataLossError(absl::StrCat(
        slab_path, " is missing; the index names ", named->checkpoints.size(),
        " checkpoints and ", named->bases.size(), " bases in it"));
  }
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<DiskFile> slab,
                           disk->OpenDirect(slab_path, /*create=*/!has_slab));
  // Also of a slab that is there: the life that made it may have been killed
  // before its name was durable.
  if (!has_slab || BALLAST_RULE(kSyncOnOpen)) {
    BALLAST_RETURN_IF_ERROR(disk->SyncDirectory(options.dir));
  }
  BALLAST_ASSIGN_OR_RETURN(const uint64_t slab_bytes, slab->Bytes());
  BALLAST_ASSIGN_OR_RETURN(
      ExtentMap extents,
      MapExtents(*slab, slab_bytes, named->checkpoints, named->bases));
  IoQueue::Options queue_options;
  queue_options.depth = options.queue_depth;
  queue_options.use_io_uring = options.use_io_uring;
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<IoQueue> queue,
                           disk->StartQueue(queue_options));
  return std::unique_ptr<SlabStore>(std::make_unique<SlabStoreImpl>(
      options, std::move(directory), std::move(slab), std::move(index),
      std::move(extents), std::move(named->checkpoints),
      std::move(named->bases), std::move(queue)));
}

}  // namespace ballast
