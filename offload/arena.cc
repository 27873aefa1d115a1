// SPDX-License-Identifier: Apache-2.0
#include "offload/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/round_up.h"
#include "common/units.h"

namespace ballast {

ArenaBuffer& ArenaBuffer::operator=(ArenaBuffer&& other) noexcept {
  if (this != &other) {
    reset();
    arena_ = std::exchange(other.arena_, nullptr);
    offset_ = other.offset_;
    bytes_ = other.bytes_;
    data_ = std::exchange(other.data_, nullptr);
  }
  return *this;
}

void ArenaBuffer::reset() {
  if (arena_ != nullptr) {
    std::exchange(arena_, nullptr)->Free(offset_, bytes_);
    data_ = nullptr;
  }
}

std::unique_ptr<Arena> Arena::CreateWithoutMemory(const Options& options) {
  return std::unique_ptr<Arena>(new Arena(options));
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(const Options& options) {
  std::unique_ptr<Arena> arena = CreateWithoutMemory(options);
  if (options.bytes == 0) {
    return arena;
  }
  void* base = mmap(nullptr, options.bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", options.bytes, " bytes for ", options.name,
                     ": ", std::strerror(errno), "; lower it or free memory"));
  }
  madvise(base, options.bytes, MADV_HUGEPAGE);
  arena->base_ = static_cast<std::byte*>(base);
  // Touch every page now: a fault later would cost more than the copy it is
  // part of.
  for (uint64_t offset = 0; offset < options.bytes; offset += 4096) {
    arena->base_[offset] = std::byte{0};
  }
  return arena;
}

Arena::~Arena() {
  if (base_ != nullptr) {
    munmap(base_, options_.bytes);
  }
}

absl::StatusOr<ArenaBuffer> Arena::Allocate(uint64_t bytes,
                                            absl::string_view what) {
  const uint64_t rounded =
      std::max(RoundUp(bytes, options_.alignment), options_.alignment);
  MutexLock lock(&mutex_);
  uint64_t offset = top_;
  const auto fit = by_size_.lower_bound({rounded, 0});
  if (fit != by_size_.end()) {
    const uint64_t hole_bytes = fit->first;
    offset = fit->second;
    by_size_.erase(fit);
    free_.erase(offset);
    if (hole_bytes > rounded) {
      free_[offset + rounded] = hole_bytes - rounded;
      by_size_.insert({hole_bytes - rounded, offset + rounded});
    }
  } else if (rounded > options_.bytes || top_ > options_.bytes - rounded) {
    return Refusal(rounded, what);
  } else {
    top_ += rounded;
  }
  live_[offset] = {rounded, std::string(what)};
  used_ += rounded;
  peak_ = std::max(peak_, top_);
  ArenaBuffer buffer;
  buffer.arena_ = this;
  buffer.offset_ = offset;
  buffer.bytes_ = rounded;
  buffer.data_ = base_ == nullptr ? nullptr : base_ + offset;
  return buffer;
}

void Arena::Free(uint64_t offset, uint64_t bytes) {
  MutexLock lock(&mutex_);
  live_.erase(offset);
  used_ -= bytes;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    by_size_.erase({next->second, next->first});
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      by_size_.erase({previous->second, previous->first});
      free_.erase(previous);
    }
  }
  if (offset + bytes == top_) {
    top_ = offset;
    return;
  }
  free_[offset] = bytes;
  by_size_.insert({bytes, offset});
}

absl::Status Arena::Refusal(uint64_t bytes, absl::string_view what) {
  std::map<std::string, uint64_t> by_what;
  for (const auto& [offset, buffer] : live_) {
    by_what[buffer.second] += buffer.first;
  }
  std::vector<std::pair<uint64_t, std::string>> largest;
  for (const auto& [name, total] : by_what) {
    largest.push_back({total, name});
  }
  std::sort(largest.rbegin(), largest.rend());
  std::vector<std::string> lines;
  for (size_t i = 0; i < std::min<size_t>(largest.size(), 6); ++i) {
    lines.push_back(
        absl::StrCat(largest[i].second, " ", FormatBytes(largest[i].first)));
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      options_.name, " is ", options_.bytes, " bytes; ", what, " needs ", bytes,
      " more than ", used_, " in use",
      lines.empty() ? "" : absl::StrCat(" (", absl::StrJoin(lines, ", "), ")"),
      "; want at least ", top_ + bytes, " bytes"));
}

uint64_t Arena::used_bytes() const {
  MutexLock lock(&mutex_);
  return used_;
}

uint64_t Arena::peak_bytes() const {
  MutexLock lock(&mutex_);
  return peak_;
}

void Arena::ResetPeakForTest() {
  MutexLock lock(&mutex_);
  peak_ = top_;
}

}  // namespace ballast
