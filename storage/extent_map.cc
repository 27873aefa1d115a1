// SPDX-License-Identifier: Apache-2.0
#include "storage/extent_map.h"

#include <iterator>

#include "common/check.h"
#include "common/rule.h"

namespace ballast {

std::optional<Extent> ExtentMap::Allocate(uint64_t bytes) {
  BALLAST_CHECK(bytes > 0);
  const auto fit = by_bytes_.lower_bound({bytes, 0});
  if (fit == by_bytes_.end()) {
    return std::nullopt;
  }
  const uint64_t offset = fit->second;
  TakeFree(offset, offset, bytes);
  held_[offset] = {bytes, 1, 0};
  return Extent{offset, bytes};
}

void ExtentMap::Grow(uint64_t bytes) {
  if (bytes > 0) {
    AddFree(size_bytes_, bytes);
    size_bytes_ += bytes;
  }
}

bool ExtentMap::Adopt(const Extent& extent) {
  Held* held = Find(extent);
  if (held == nullptr) {
    return false;
  }
  ++held->owners;
  return true;
}

void ExtentMap::Release(const Extent& extent) {
  Held* held = Find(extent);
  BALLAST_CHECK(held != nullptr && held->owners > 0);
  --held->owners;
  FreeIfUnheld(extent, *held);
}

bool ExtentMap::Pin(const Extent& extent) {
  if (Held* held = Find(extent); held != nullptr) {
    ++held->pins;
    return true;
  }
  auto after = free_.upper_bound(extent.offset);
  if (extent.bytes == 0 || after == free_.begin()) {
    return false;
  }
  const auto& [offset, bytes] = *--after;
  const uint64_t skipped = extent.offset - offset;
  if (skipped > bytes || extent.bytes > bytes - skipped) {
    return false;
  }
  TakeFree(offset, extent.offset, extent.bytes);
  held_[extent.offset] = {extent.bytes, 0, 1};
  return true;
}

void ExtentMap::Unpin(const Extent& extent) {
  Held* held = Find(extent);
  if (!BALLAST_RULE(kExtentKeptWhileHeld) &&
      (held == nullptr || held->pins == 0)) {
    return;  // It was freed under the pin.
  }
  BALLAST_CHECK(held != nullptr && held->pins > 0);
  --held->pins;
  FreeIfUnheld(extent, *held);
}

bool ExtentMap::IsHeld(const Extent& extent) const {
  const auto it = held_.find(extent.offset);
  return it != held_.end() && it->second.bytes == extent.bytes;
}

uint64_t ExtentMap::free_tail_bytes() const {
  if (free_.empty()) {
    return 0;
  }
  const auto& [offset, bytes] = *free_.rbegin();
  return offset + bytes == size_bytes_ ? bytes : 0;
}

ExtentMap::Held* ExtentMap::Find(const Extent& extent) {
  const auto it = held_.find(extent.offset);
  return it != held_.end() && it->second.bytes == extent.bytes ? &it->second
                                                               : nullptr;
}

void ExtentMap::AddFree(uint64_t offset, uint64_t bytes) {
  free_bytes_ += bytes;
  auto next = free_.upper_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    by_bytes_.erase({next->second, next->first});
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      by_bytes_.erase({before->second, before->first});
      before->second += bytes;
      by_bytes_.insert({before->second, before->first});
      return;
    }
  }
  free_[offset] = bytes;
  by_bytes_.insert({bytes, offset});
}

void ExtentMap::TakeFree(uint64_t at, uint64_t offset, uint64_t bytes) {
  const auto it = free_.find(at);
  const uint64_t end = at + it->second;
  by_bytes_.erase({it->second, at});
  free_.erase(it);
  free_bytes_ -= bytes;
  if (offset > at) {
    free_[at] = offset - at;
    by_bytes_.insert({offset - at, at});
  }
  if (end > offset + bytes) {
    free_[offset + bytes] = end - offset - bytes;
    by_bytes_.insert({end - offset - bytes, offset + bytes});
  }
}

void ExtentMap::FreeIfUnheld(const Extent& extent, const Held& held) {
  if (held.owners == 0 &&
      (held.pins == 0 || !BALLAST_RULE(kExtentKeptWhileHeld))) {
    held_.erase(extent.offset);
    AddFree(extent.offset, extent.bytes);
  }
}

}  // namespace ballast
