// SPDX-License-Identifier: Apache-2.0
// The places of the shard servers: each has a name, and a life or none. What a
// server owns, has voted for and owes hangs on its place, so that it outlives
// the process; what a life has made belongs to that life.
//
// The placement's version changes with the owners of chunks, the addresses'
// version with every life that comes or goes.
//
// Pure. Not thread-safe.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/ballast.pb.h"
#include "ps/membership/holdings.h"

namespace ballast {

struct ServerSlot {
  std::string name;
  uint64_t incarnation = 0;                     // 0: nobody is in.
  std::string address;                          // Of the life that is in.
  absl::Time lost_at = absl::InfiniteFuture();  // While nobody is in.
  // Of this life: the version it has reported; nullopt: it is to load.
  std::optional<uint64_t> version;
  uint64_t loaded = 0;     // The first that it reported.
  uint64_t load_step = 0;  // What it is to load,
  bool load_own = false;   // from its own records,
  uint64_t load_base = 0;  // of which the lowest is of this version.
  // It joined with what redoes the steps up to this one: its votes for them
  // stand.
  uint64_t redoable = 0;
  bool came_back = false;  // After another life of the same timeline.
  // Lowest record that a recovery of this place begins from, as last heard;
  // nullopt: unknown, so nothing may be forgotten that it could need.
  std::optional<uint64_t> base;
  uint32_t chunks = 0;  // How many it owns.
};

class ServerTable {
 public:
  // `address_version` must grow over all lives of the coordinator.
  explicit ServerTable(uint64_t address_version = 0)
      : address_version_(address_version) {}
  // As persisted; nobody is in.
  ServerTable(const v1::Placement& placement, uint64_t address_version);

  // Finds or makes a place.
  uint32_t Add(const std::string& name);
  std::optional<uint32_t> Find(const std::string& name) const;
  std::optional<uint32_t> FindLife(uint64_t incarnation) const;
  uint32_t size() const { return static_cast<uint32_t>(slots_.size()); }
  ServerSlot& at(uint32_t slot) { return slots_[slot]; }
  const ServerSlot& at(uint32_t slot) const { return slots_[slot]; }

  // A life takes its place; what it holds and is to load is the caller's.
  void Enter(uint32_t slot, uint64_t incarnation, const std::string& address);
  // The place is empty.
  void Lose(uint32_t slot, absl::Time now);
  // Everyone is to load anew.
  void ForgetVersions();

  // The first placement, or none.
  void Place(std::vector<uint32_t> owners);
  bool placed() const { return !owners_.empty(); }
  // Chunk `chunk` goes to another place; a version is made of it by Moved().
  void SetOwner(uint32_t chunk, uint32_t slot);
  void Moved() { ++placement_version_; }
  const std::vector<uint32_t>& owners() const { return owners_; }
  bool Owns(uint32_t slot) const { return slots_[slot].chunks > 0; }
  std::vector<uint32_t> ChunksOf(uint32_t slot) const;
  // Places that own chunks: the run cannot do without them.
  std::vector<uint32_t> Owners() const;
  // Owning places where nobody is in.
  std::vector<uint32_t> Missing() const;
  // Whether every owning place has reported a version.
  bool AllLoaded() const;

  uint64_t placement_version() const { return placement_version_; }
  uint64_t address_version() const { return address_version_; }
  // Servers, owners and both versions.
  v1::Placement ToProto() const;

 private:
  std::vector<ServerSlot> slots_;
  std::vector<uint32_t> owners_;  // Slot by chunk.
  uint64_t placement_version_ = 0;
  uint64_t address_version_ = 0;
};

}  // namespace ballast
