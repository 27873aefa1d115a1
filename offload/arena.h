// SPDX-License-Identifier: Apache-2.0
// A fixed amount of memory, mapped and touched once, from which everything
// that a budget covers is taken: a worker's CPU "device", its host staging, a
// shard server's state. It never grows and never returns memory to the kernel;
// a refusal names what was live and by how much the budget is short.
//
// Best fit over holes with coalescing; the space above the highest live buffer
// is used only when no hole fits. So the same sequence of calls gives the same
// offsets under every budget that is large enough: the planner finds the exact
// peak by running a step without memory (see CreateWithoutMemory), and a budget
// of that peak lets the step pass.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/mutex.h"

namespace ballast {

class Arena;

// Exclusive ownership of a part of an arena, given back when destroyed. Must
// not outlive the arena. Movable.
class ArenaBuffer {
 public:
  ArenaBuffer() = default;
  ArenaBuffer(ArenaBuffer&& other) noexcept { *this = std::move(other); }
  ArenaBuffer& operator=(ArenaBuffer&& other) noexcept;
  ~ArenaBuffer() { reset(); }

  void reset();
  explicit operator bool() const { return arena_ != nullptr; }
  // Null in an arena without memory.
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  friend class Arena;
  Arena* arena_ = nullptr;
  uint64_t offset_ = 0;
  uint64_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

// Thread-safe.
class Arena {
 public:
  struct Options {
    std::string name;  // The key a user would raise: "worker.memory".
    uint64_t bytes = 0;
    uint64_t alignment = 64;  // Of every buffer; a power of two up to 4 KiB.
  };

  // Maps and touches the memory (huge pages when the system has them).
  // Errors: RESOURCE_EXHAUSTED  the system refuses.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(const Options& options);
  // The same bookkeeping over no memory, for planning.
  static std::unique_ptr<Arena> CreateWithoutMemory(const Options& options);
  ~Arena();

  // `what` says what it is for ("gradient of h.3.mlp.c_fc.weight").
  // Errors: RESOURCE_EXHAUSTED  would pass the budget; the message names
  //         `what`, the live buffers by kind and the smallest budget that
  //         would have let this call pass.
  absl::StatusOr<ArenaBuffer> Allocate(uint64_t bytes, absl::string_view what);

  uint64_t budget_bytes() const { return options_.bytes; }
  uint64_t used_bytes() const;
  // Highest end of a live buffer so far: what a budget must be at least, for
  // the same sequence of calls.
  uint64_t peak_bytes() const;
  void ResetPeakForTest();

 private:
  friend class ArenaBuffer;
  explicit Arena(const Options& options) : options_(options) {}
  void Free(uint64_t offset, uint64_t bytes);
  absl::Status Refusal(uint64_t bytes, absl::string_view what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  std::byte* base_ = nullptr;
  mutable Mutex mutex_;
  // Holes below top_: offset to bytes.
  std::map<uint64_t, uint64_t> free_ ABSL_GUARDED_BY(mutex_);
  // (bytes, offset): best fit is the first not below.
  std::set<std::pair<uint64_t, uint64_t>> by_size_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::pair<uint64_t, std::string>> live_
      ABSL_GUARDED_BY(mutex_);                // Offset to bytes and what.
  uint64_t top_ ABSL_GUARDED_BY(mutex_) = 0;  // End of the highest buffer.
  uint64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t peak_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ballast
