// SPDX-License-Identifier: Apache-2.0
#include "tests/testing/sim_machine.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "storage/file.h"

namespace ballast::testing {
namespace {

constexpr uint64_t kSectorsPerPage = kPageBytes / kSectorBytes;

SimPage::Bytes NewPage() { return std::make_unique<std::byte[]>(kPageBytes); }

// What the disk has of a page, before a sector of it changes for the first
// time since a sync.
void KeepDisk(SimPage* page) {
  if (page->now == nullptr) {
    page->now = NewPage();  // And `disk` stays null: zeros.
    return;
  }
  if (page->dirty == 0 && page->lost == 0) {
    page->disk = NewPage();
    std::memcpy(page->disk.get(), page->now.get(), kPageBytes);
  }
}

void CopySector(uint64_t sector, const std::byte* from, std::byte* to) {
  std::byte* target = to + sector * kSectorBytes;
  if (from == nullptr) {
    std::memset(target, 0, kSectorBytes);
  } else {
    std::memcpy(target, from + sector * kSectorBytes, kSectorBytes);
  }
}

// Takes the names that a changed folder would have on the disk.
void ApplyName(const SimNameChange& change,
               std::map<std::string, SimMachine::NodePointer>* names) {
  if (!change.from.empty()) {
    const auto it = names->find(change.from);
    if (it != names->end() &&
        (change.node == nullptr || it->second == change.node)) {
      names->erase(it);
    }
  }
  if (!change.to.empty()) {
    (*names)[change.to] = change.node;
  }
}

}  // namespace

void SimNode::Write(uint64_t offset, absl::Span<const std::byte> data,
                    const Chooses& chooses) {
  bytes = std::max(bytes, offset + data.size());
  while (!data.empty()) {
    const uint64_t index = offset / kPageBytes;
    const uint64_t within = offset % kPageBytes;
    const uint64_t sector = within / kSectorBytes;
    const uint64_t count =
        std::min<uint64_t>(data.size(), kSectorBytes - within % kSectorBytes);
    if (chooses()) {
      SimPage& page = pages[index];
      KeepDisk(&page);
      if (page.dirty == 0) {
        unsynced.push_back(index);
      }
      const auto bit = static_cast<uint8_t>(1u << sector);
      page.dirty = static_cast<uint8_t>(page.dirty | bit);
      page.lost = static_cast<uint8_t>(page.lost & ~bit);
      std::memcpy(page.now.get() + within, data.data(), count);
    }
    offset += count;
    data.remove_prefix(count);
  }
}

void SimNode::Read(uint64_t offset, absl::Span<std::byte> out) const {
  while (!out.empty()) {
    const uint64_t within = offset % kPageBytes;
    const uint64_t count = std::min<uint64_t>(out.size(), kPageBytes - within);
    const auto it = pages.find(offset / kPageBytes);
    if (it == pages.end()) {
      std::memset(out.data(), 0, count);
    } else {
      std::memcpy(out.data(), it->second.now.get() + within, count);
    }
    offset += count;
    out.remove_prefix(count);
  }
}

void SimNode::Resize(uint64_t to) {
  bytes = to;
  std::erase_if(
      pages, [to](const auto& page) { return page.first * kPageBytes >= to; });
}

void SimNode::SyncAll() {
  std::vector<uint64_t> left;
  for (const uint64_t index : unsynced) {
    const auto it = pages.find(index);
    if (it == pages.end()) {
      continue;
    }
    SimPage& page = it->second;
    if (page.lost == 0) {
      page.disk.reset();
    } else if (page.dirty != 0 && page.disk == nullptr) {
      page.disk = NewPage();
    }
    for (uint64_t sector = 0; sector < kSectorsPerPage && page.lost != 0;
         ++sector) {
      if ((page.dirty >> sector & 1) != 0) {
        CopySector(sector, page.now.get(), page.disk.get());
      }
    }
    page.dirty = 0;
    if (page.lost != 0) {
      left.push_back(index);
    }
  }
  unsynced = std::move(left);
  disk_bytes = bytes;
}

void SimNode::LoseUnsynced() {
  for (const uint64_t index : unsynced) {
    const auto it = pages.find(index);
    if (it != pages.end()) {
      SimPage& page = it->second;
      page.lost = static_cast<uint8_t>(page.lost | page.dirty);
      page.dirty = 0;
    }
  }
}

void SimNode::CutPower(std::mt19937_64* random) {
  for (const uint64_t index : unsynced) {
    const auto it = pages.find(index);
    if (it == pages.end()) {
      continue;
    }
    SimPage& page = it->second;
    const auto kept = static_cast<uint8_t>((*random)());
    const auto gone = static_cast<uint8_t>(page.lost | (page.dirty & ~kept));
    for (uint64_t sector = 0; sector < kSectorsPerPage; ++sector) {
      if ((gone >> sector & 1) != 0) {
        CopySector(sector, page.disk.get(), page.now.get());
      }
    }
    page.dirty = page.lost = 0;
    page.disk.reset();
  }
  unsynced.clear();
  if (bytes != disk_bytes) {
    const uint64_t low = std::min(bytes, disk_bytes);
    const uint64_t high = std::max(bytes, disk_bytes);
    const uint64_t third = (*random)() % 3;
    Resize(third == 0   ? low
           : third == 1 ? high
                        : low + (*random)() % (high - low + 1));
  }
  disk_bytes = bytes;
}

absl::Status SimMachine::Alive(uint64_t of_life) const {
  if (stopped || of_life != life) {
    return absl::UnavailableError("the machine is off");
  }
  return absl::OkStatus();
}

bool SimMachine::CutsNow() {
  ++changes;
  if (!cut_at || changes < *cut_at) {
    return false;
  }
  Stop();
  return true;
}

void SimMachine::Stop() {
  cut_at.reset();
  if (!stopped) {
    stopped = true;
    stops_queues();
  }
}

absl::Status SimMachine::TakeFault(SimDisk::Operation operation,
                                   const std::string& path) {
  for (SimFault& fault : faults) {
    if (fault.operation != operation || fault.times == 0 ||
        !absl::StrContains(path, fault.part)) {
      continue;
    }
    if (fault.skip > 0) {
      --fault.skip;
      continue;
    }
    --fault.times;
    return absl::Status(fault.status.code(),
                        absl::StrCat(path, ": ", fault.status.message()));
  }
  return absl::OkStatus();
}

uint64_t SimMachine::UsedBytes() const {
  uint64_t used = 0;
  for (const auto& [path, node] : names) {
    used += node->bytes;
  }
  for (const auto& [path, store] : stores) {
    for (const auto& [key, value] : store->now) {
      used += key.size() + value.size();
    }
  }
  return used;
}

absl::Status SimMachine::CheckRoom(uint64_t more,
                                   const std::string& path) const {
  if (capacity == ~uint64_t{0} || UsedBytes() + more <= capacity) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot give ", path, " another ", more,
                   " bytes: No space left on device"));
}

absl::Status SimMachine::WriteNode(SimNode* node, const std::string& path,
                                   uint64_t offset,
                                   absl::Span<const std::byte> data) {
  const uint64_t end = offset + data.size();
  if (end > node->bytes) {
    BALLAST_RETURN_IF_ERROR(CheckRoom(end - node->bytes, path));
  }
  node->wrote_in_life = life;
  absl::Status fault = TakeFault(SimDisk::Operation::kWrite, path);
  const bool cut = CutsNow();
  if (!fault.ok() || cut) {
    WriteInPart(node, offset, data);
    return fault.ok() ? Alive(life) : fault;
  }
  node->Write(offset, data, [] { return true; });
  return absl::OkStatus();
}

void SimMachine::WriteInPart(SimNode* node, uint64_t offset,
                             absl::Span<const std::byte> data) {
  // Often all or nothing, as of a write that was done or not begun.
  const uint64_t kind = random() % 4;
  node->Write(offset, data,
              [this, kind] { return kind == 0 || (kind != 1 && Flip()); });
}

bool SimMachine::Syncs(SimDisk::Sync::Of of, const std::string& path,
                       bool wrote, const std::string& newest) const {
  const SimDisk::Sync sync = {of, path, wrote, newest};
  if (hears) {
    hears(sync);
  }
  return !skips || !skips(sync);
}

absl::Status SimMachine::SyncNode(SimNode* node, const std::string& path) {
  const bool happens =
      Syncs(SimDisk::Sync::Of::kFile, path, node->wrote_in_life == life);
  if (const absl::Status fault = TakeFault(SimDisk::Operation::kSync, path);
      !fault.ok()) {
    node->LoseUnsynced();
    return fault;
  }
  if (const bool cut = CutsNow(); happens && (!cut || Flip())) {
    node->SyncAll();
  }
  return Alive(life);
}

absl::StatusOr<SimMachine::NodePointer> SimMachine::Find(
    const std::string& path) const {
  const auto it = names.find(path);
  if (it == names.end()) {
    return absl::NotFoundError(
        absl::StrCat("cannot open ", path, ": No such file or directory"));
  }
  return it->second;
}

absl::Status SimMachine::ChangeName(const std::string& from,
                                    const std::string& to, NodePointer node) {
  const std::string folder = ParentDirectory(to.empty() ? from : to);
  if (folder != "/" && names.count(folder) == 0) {
    return absl::NotFoundError(
        absl::StrCat(folder, ": No such file or directory"));
  }
  const bool cut = CutsNow();
  if (!cut || Flip()) {
    const SimNameChange change = {from, to, std::move(node)};
    ApplyName(change, &names);
    name_changes[folder].push_back(change);
    newest_names[folder] = to.empty() ? absl::StrCat("-", from) : to;
  }
  return Alive(life);
}

absl::Status SimMachine::SyncFolder(const std::string& path) {
  const auto newest = newest_names.find(path);
  const bool wrote = newest != newest_names.end();
  const bool happens = Syncs(SimDisk::Sync::Of::kFolder, path, wrote,
                             wrote ? newest->second : "");
  BALLAST_RETURN_IF_ERROR(TakeFault(SimDisk::Operation::kSync, path));
  if (const bool cut = CutsNow(); happens && (!cut || Flip())) {
    for (const SimNameChange& change : name_changes[path]) {
      ApplyName(change, &disk_names);
    }
    name_changes.erase(path);
  }
  return Alive(life);
}

void SimMachine::CutPower() {
  for (const auto& [folder, changed] : name_changes) {
    for (const SimNameChange& change : changed) {
      if (Flip()) {
        ApplyName(change, &disk_names);
      }
    }
  }
  name_changes.clear();
  // What stood in a folder that is gone is gone.
  std::erase_if(disk_names, [this](const auto& name) {
    const std::string folder = ParentDirectory(name.first);
    return folder != "/" && disk_names.count(folder) == 0;
  });
  names = disk_names;
  std::set<SimNode*> cut;
  for (const auto& [path, node] : names) {
    if (cut.insert(node.get()).second) {
      node->CutPower(&random);
    }
  }
  std::erase_if(stores, [this](const auto& store) {
    return names.count(store.first) == 0;
  });
  for (const auto& [path, store] : stores) {
    const uint64_t kept =
        store->unsynced.empty() ? 0 : random() % (store->unsynced.size() + 1);
    store->now = store->disk;
    for (uint64_t i = 0; i < kept; ++i) {
      for (const StateChange& change : store->unsynced[i]) {
        if (change.value) {
          store->now[change.key] = *change.value;
        } else {
          store->now.erase(change.key);
        }
      }
    }
    store->disk = store->now;
    store->unsynced.clear();
  }
}

}  // namespace ballast::testing
