// SPDX-License-Identifier: Apache-2.0
// Which bytes of a slab are free and who holds the others. A pure data
// structure: no file, no lock, no clock.
//
// An extent is held by working owners (one that allocated it, any that adopted
// it, I/O in flight) and by pins (checkpoints that name it); it is free when
// both counts are zero. Free neighbours are always merged, and an allocation
// takes the smallest free range that fits, the lowest of equals.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "storage/slab_store.h"

namespace ballast {

// Thread-compatible.
class ExtentMap {
 public:
  // A slab of `bytes`, all free.
  explicit ExtentMap(uint64_t bytes) { Grow(bytes); }

  // An extent of exactly `bytes` with one working owner; nullopt when no free
  // range is that long. bytes > 0.
  std::optional<Extent> Allocate(uint64_t bytes);
  // Appends `bytes` of free space at the end of the slab.
  void Grow(uint64_t bytes);

  // A further working owner of an extent that is held; false when it is not.
  bool Adopt(const Extent& extent);
  // A working owner lets go. There must be one: anything else is our bug.
  void Release(const Extent& extent);

  // A further pin on a held extent, or the first on a range that is free;
  // false when the range is outside the slab or overlaps another extent.
  bool Pin(const Extent& extent);
  void Unpin(const Extent& extent);

  bool IsHeld(const Extent& extent) const;
  uint64_t size_bytes() const { return size_bytes_; }
  uint64_t free_bytes() const { return free_bytes_; }
  uint64_t free_range_count() const { return free_.size(); }
  // Length of the free range that ends where the slab ends; 0 if none does.
  uint64_t free_tail_bytes() const;

 private:
  struct Held {
    uint64_t bytes = 0;
    uint32_t owners = 0;
    uint32_t pins = 0;
  };

  Held* Find(const Extent& extent);
  void AddFree(uint64_t offset, uint64_t bytes);
  // Cuts [offset, offset + bytes) out of the free range that starts at `at`.
  void TakeFree(uint64_t at, uint64_t offset, uint64_t bytes);
  void FreeIfUnheld(const Extent& extent, const Held& held);

  uint64_t size_bytes_ = 0;
  uint64_t free_bytes_ = 0;
  std::map<uint64_t, uint64_t> free_;                 // Offset -> bytes.
  std::set<std::pair<uint64_t, uint64_t>> by_bytes_;  // (bytes, offset).
  std::map<uint64_t, Held> held_;                     // By offset.
};

}  // namespace ballast
