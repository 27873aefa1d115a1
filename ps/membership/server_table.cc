// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/server_table.h"

#include <algorithm>
#include <utility>

namespace ballast {

ServerTable::ServerTable(const v1::Placement& placement,
                         uint64_t address_version)
    : owners_(placement.owner().begin(), placement.owner().end()),
      placement_version_(placement.placement_version()),
      address_version_(address_version) {
  for (const v1::ServerEntry& entry : placement.servers()) {
    slots_.emplace_back().name = entry.name();
  }
  for (const uint32_t owner : owners_) {
    ++slots_[owner].chunks;
  }
}

uint32_t ServerTable::Add(const std::string& name) {
  if (const auto slot = Find(name)) {
    return *slot;
  }
  slots_.emplace_back().name = name;
  return size() - 1;
}

std::optional<uint32_t> ServerTable::Find(const std::string& name) const {
  for (uint32_t slot = 0; slot < size(); ++slot) {
    if (slots_[slot].name == name) {
      return slot;
    }
  }
  return std::nullopt;
}

std::optional<uint32_t> ServerTable::FindLife(uint64_t incarnation) const {
  for (uint32_t slot = 0; slot < size() && incarnation != 0; ++slot) {
    if (slots_[slot].incarnation == incarnation) {
      return slot;
    }
  }
  return std::nullopt;
}

void ServerTable::Enter(uint32_t slot, uint64_t incarnation,
                        const std::string& address) {
  ServerSlot& place = slots_[slot];
  place.incarnation = incarnation;
  place.address = address;
  place.version.reset();
  ++address_version_;
}

void ServerTable::Lose(uint32_t slot, absl::Time now) {
  ServerSlot& place = slots_[slot];
  place.lost_at = now;
  place.incarnation = 0;
  place.address.clear();
  place.version.reset();
  ++address_version_;
}

void ServerTable::ForgetVersions() {
  for (ServerSlot& slot : slots_) {
    slot.version.reset();
    slot.base.reset();
    slot.redoable = 0;
    slot.came_back = false;
  }
}

void ServerTable::Place(std::vector<uint32_t> owners) {
  owners_ = std::move(owners);
  for (const uint32_t owner : owners_) {
    ++slots_[owner].chunks;
  }
  ++placement_version_;
}

void ServerTable::SetOwner(uint32_t chunk, uint32_t slot) {
  --slots_[owners_[chunk]].chunks;
  owners_[chunk] = slot;
  ++slots_[slot].chunks;
}

std::vector<uint32_t> ServerTable::ChunksOf(uint32_t slot) const {
  std::vector<uint32_t> chunks;
  for (uint32_t chunk = 0; chunk < owners_.size(); ++chunk) {
    if (owners_[chunk] == slot) {
      chunks.push_back(chunk);
    }
  }
  return chunks;
}

std::vector<uint32_t> ServerTable::Owners() const {
  std::vector<uint32_t> owning;
  for (uint32_t slot = 0; slot < size(); ++slot) {
    if (Owns(slot)) {
      owning.push_back(slot);
    }
  }
  return owning;
}

std::vector<uint32_t> ServerTable::Missing() const {
  std::vector<uint32_t> missing;
  for (const uint32_t slot : Owners()) {
    if (slots_[slot].incarnation == 0) {
      missing.push_back(slot);
    }
  }
  return missing;
}

bool ServerTable::AllLoaded() const {
  const std::vector<uint32_t> owning = Owners();
  return std::all_of(owning.begin(), owning.end(), [this](uint32_t slot) {
    return slots_[slot].version.has_value();
  });
}

v1::Placement ServerTable::ToProto() const {
  v1::Placement placement;
  placement.set_placement_version(placement_version_);
  placement.set_address_version(address_version_);
  for (const ServerSlot& slot : slots_) {
    v1::ServerEntry* entry = placement.add_servers();
    entry->set_name(slot.name);
    entry->set_address(slot.address);
    entry->set_incarnation(slot.incarnation);
  }
  placement.mutable_owner()->Assign(owners_.begin(), owners_.end());
  return placement;
}

}  // namespace ballast
