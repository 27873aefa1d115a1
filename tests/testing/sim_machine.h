// SPDX-License-Identifier: Apache-2.0
// What is on a simulated disk and what would be left of it without power. A
// part of SimDisk; tests include tests/testing/sim_disk.h.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/mutex.h"
#include "storage/record.h"
#include "storage/state_store.h"
#include "tests/testing/sim_disk.h"

namespace ballast::testing {

class SimQueue;

// 4 KiB of a file. Pages that are not there are zeros.
struct SimPage {
  using Bytes = std::unique_ptr<std::byte[]>;
  Bytes now;          // As a reader sees it.
  Bytes disk;         // As the disk has it, if any bit below is set; null then
                      // means zeros.
  uint8_t dirty = 0;  // Sectors that the next sync makes durable.
  uint8_t lost = 0;   // Sectors that a failed sync has given up.
};

struct SimNode {
  bool folder = false;
  uint64_t bytes = 0;
  uint64_t disk_bytes = 0;  // Its length as the disk has it.
  std::unordered_map<uint64_t, SimPage> pages;
  std::vector<uint64_t> unsynced;  // Pages with a bit set; may repeat.
  uint64_t wrote_in_life = 0;

  // Which of the sectors that [offset, offset + data.size()) touches change.
  using Chooses = std::function<bool()>;
  void Write(uint64_t offset, absl::Span<const std::byte> data,
             const Chooses& chooses);
  void Read(uint64_t offset, absl::Span<std::byte> out) const;
  void Resize(uint64_t to);
  void SyncAll();
  void LoseUnsynced();
  void CutPower(std::mt19937_64* random);
};

// A change of the names in one folder, not synced yet. `node` gets the name
// `to`; a `from` goes away.
struct SimNameChange {
  std::string from;
  std::string to;
  std::shared_ptr<SimNode> node;
};

struct SimStoreContents {
  using Pairs = std::map<std::string, std::string>;
  Pairs now;
  Pairs disk;
  std::vector<std::vector<StateChange>> unsynced;  // Batches, in order.
  uint64_t wrote_in_life = 0;
};

struct SimFault {
  SimDisk::Operation operation;
  std::string part;
  absl::Status status;
  uint32_t skip = 0;
  uint32_t times = 1;
};

// Thread-safe; its public members are for the parts of SimDisk, under `mutex`.
struct SimMachine {
  explicit SimMachine(uint64_t seed) : random(seed) {}

  using NodePointer = std::shared_ptr<SimNode>;

  // OK while this life of the machine goes on.
  absl::Status Alive(uint64_t of_life) const;
  // Counts a change. True: the process ended in the middle of it.
  bool CutsNow();
  void Stop();
  bool Flip() { return (random() & 1) != 0; }
  absl::Status TakeFault(SimDisk::Operation operation, const std::string& path);
  absl::Status CheckRoom(uint64_t more, const std::string& path) const;
  uint64_t UsedBytes() const;

  absl::Status WriteNode(SimNode* node, const std::string& path,
                         uint64_t offset, absl::Span<const std::byte> data);
  // Some sectors of a write that the end of the process has met.
  void WriteInPart(SimNode* node, uint64_t offset,
                   absl::Span<const std::byte> data);
  absl::Status SyncNode(SimNode* node, const std::string& path);
  absl::StatusOr<NodePointer> Find(const std::string& path) const;
  absl::Status ChangeName(const std::string& from, const std::string& to,
                          NodePointer node);
  absl::Status SyncFolder(const std::string& path);
  // Whether a sync happens; tells who listens.
  bool Syncs(SimDisk::Sync::Of of, const std::string& path, bool wrote,
             const std::string& newest = "") const;
  void CutPower();

  mutable Mutex mutex;
  std::mt19937_64 random;
  uint64_t life = 1;
  bool stopped = false;
  uint64_t changes = 0;
  std::optional<uint64_t> cut_at;
  uint64_t capacity = ~uint64_t{0};
  std::map<std::string, NodePointer> names;       // By path, as seen now.
  std::map<std::string, NodePointer> disk_names;  // As the disk has them.
  std::map<std::string, std::vector<SimNameChange>> name_changes;  // By folder.
  std::map<std::string, std::string> newest_names;  // By folder; this life's.
  std::map<std::string, std::shared_ptr<SimStoreContents>> stores;
  std::map<std::string, std::string> locks;  // Owner by path.
  std::vector<SimFault> faults;
  std::vector<SimQueue*> queues;
  std::function<void()> stops_queues;  // Set by SimDisk.
  std::function<bool(const SimDisk::Sync&)> skips;
  std::function<void(const SimDisk::Sync&)> hears;
};

std::unique_ptr<StateStore> MakeSimStateStore(
    SimMachine* machine, std::string dir,
    std::shared_ptr<SimStoreContents> contents);

}  // namespace ballast::testing
