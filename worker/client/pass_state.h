// SPDX-License-Identifier: Apache-2.0
// What the links of one worker share: the lock, the first failure of a pass,
// the identity that goes into every message, and the memory in which gradients
// wait on their way out.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "offload/arena.h"

namespace ballast {

// Fences every message of a pass: under it the inputs were fetched.
struct PassIdentity {
  uint64_t timeline = 0;
  uint64_t step = 0;  // Of pushes.
  uint64_t incarnation = 0;
  uint64_t placement_version = 0;
};

// Thread-safe.
struct PassState {
  explicit PassState(std::unique_ptr<Arena> staging_arena)
      : staging(std::move(staging_arena)) {}

  const std::unique_ptr<Arena> staging;
  Mutex mutex;
  CondVar changed;  // For the thread that runs the step.
  absl::Status failure ABSL_GUARDED_BY(mutex);

  // Keeps the first; `who` is named in it.
  void Fail(const std::string& who, const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (failure.ok()) {
      failure =
          absl::Status(why.code(), absl::StrCat(who, ": ", why.message()));
    }
    changed.NotifyAll();
  }
};

}  // namespace ballast
