// SPDX-License-Identifier: Apache-2.0
// The disk of one machine, in memory: what was not synced can be lost, in any
// order and by sectors, when the power goes. For the power-loss tests and the
// simulator; sparse, so a preallocated file costs nothing.
//
// Everything random follows from the seed. Asynchronous requests happen, and
// their completions run, when the owner pumps them, in a random order. A life
// of the process on the machine ends with Stop(): from then on nothing changes
// and every operation fails (UNAVAILABLE), so its objects can be destroyed;
// Restart() begins the next one.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "storage/disk.h"

namespace ballast::testing {

inline constexpr uint64_t kSectorBytes = 512;

struct SimMachine;  // Everything that the parts of a disk share.
struct SimNode;     // A file or folder, by whatever name.

// A file of the simulated disk. One that Create made also takes bytes at its
// end, through the page cache.
class SimFile final : public DiskFile {
 public:
  SimFile(SimMachine* machine, std::shared_ptr<SimNode> node, std::string path,
          bool direct);
  ~SimFile() override;
  bool direct() const override { return direct_; }
  absl::StatusOr<uint64_t> Bytes() const override;
  absl::Status Preallocate(uint64_t from, uint64_t to) override;
  absl::Status Read(uint64_t offset, absl::Span<std::byte> out) const override;
  absl::Status Sync() override;
  absl::Status Append(absl::string_view bytes);

 private:
  friend class SimQueue;
  SimMachine* const machine_;
  const std::shared_ptr<SimNode> node_;
  const bool direct_;
  const uint64_t life_;
};

// Thread-safe (RocksDB has threads of its own), and deterministic when one
// thread uses it. Outlives everything that was opened.
class SimDisk : public Disk {
 public:
  explicit SimDisk(uint64_t seed);
  ~SimDisk() override;

  // -- Disk.
  absl::StatusOr<std::unique_ptr<DiskFile>> OpenDirect(const std::string& path,
                                                       bool create) override;
  absl::StatusOr<std::unique_ptr<DiskFile>> OpenForRead(
      const std::string& path) override;
  bool Exists(const std::string& path) override;
  absl::StatusOr<std::string> ReadFile(const std::string& path,
                                       uint64_t bytes_max) override;
  absl::Status ReplaceFile(const std::string& path,
                           absl::string_view bytes) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Unlink(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> List(
      const std::string& path) override;
  absl::Status MakeDirectories(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<DiskLock>> Lock(
      const std::string& path, const std::string& owner) override;
  absl::StatusOr<std::unique_ptr<IoQueue>> StartQueue(
      const IoQueue::Options& options) override;
  // In memory too: batches reach the disk in their order.
  absl::StatusOr<std::unique_ptr<StateStore>> OpenStateStore(
      const std::string& dir, const EmbeddedStoreOptions& options) override;

  // A new, empty file, or an empty one in the place of another.
  absl::StatusOr<std::unique_ptr<SimFile>> Create(const std::string& path);

  // -- Asynchronous requests.
  uint64_t pending() const;
  // Does one of the pending requests and runs its completion; false when there
  // is none.
  bool PumpOne();
  // Until nothing is pending (completions may submit).
  void Pump();

  // -- The machine.
  // Writes, syncs, renames, unlinks, creations and batches since the start.
  uint64_t changes() const;
  // As Stop() in the middle of the n-th change from now, n >= 1: a write has
  // reached some of its sectors, a sync may or may not have happened.
  void CutAfter(uint64_t n);
  // The process is dead. Pending writes have reached some of their sectors.
  void Stop();
  bool stopped() const;
  enum class End {
    kKill,   // kill -9: the page cache, and so everything, is still there.
    kPower,  // A random part of what was not synced is gone.
  };
  // The next life. Locks of the old one are gone. Whatever is still open from
  // it keeps failing.
  void Restart(End end);

  // -- Faults. `part` is any part of the path.
  enum class Operation { kRead, kWrite, kSync, kPreallocate };
  // The next `times` such operations, after `skip` others, fail with `status`.
  // A failed write has reached some sectors. After a failed sync what it should
  // have covered is never durable, whatever later syncs say.
  void Fail(Operation operation, const std::string& part, absl::Status status,
            uint32_t skip = 0, uint32_t times = 1);
  // What all files may take together; the excess is RESOURCE_EXHAUSTED.
  void set_capacity(uint64_t bytes);
  uint64_t used_bytes() const;
  // Flips a bit of what is on the disk now.
  void FlipBit(const std::string& path, uint64_t offset);

  // A sync, as a test that takes one out sees it.
  struct Sync {
    enum class Of { kFile, kFolder, kStore };
    Of of = Of::kFile;
    std::string path;
    // Whether anything was written there in this life: a sync without is one on
    // open.
    bool wrote = false;
    std::string
        newest;  // Of a folder: the name that changed last in this life.
  };
  // Syncs for which `skips` is true report OK and do nothing.
  void SkipSyncs(std::function<bool(const Sync&)> skips);
  // Told of every sync that is about to happen.
  void OnSync(std::function<void(const Sync&)> hears);

 private:
  const std::unique_ptr<SimMachine> machine_;
};

}  // namespace ballast::testing
