// SPDX-License-Identifier: Apache-2.0
// Puts the digests that servers report of their chunks together to the hash of
// the whole state, which knows nothing of chunks and servers.
//
// Pure. Not thread-safe.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/layout.h"
#include "proto/ballast.pb.h"
#include "storage/checkpoint.h"

namespace ballast {

class HashCollector {
 public:
  // Opens the hash of version `step`; `fields` per element
  // (HashedFields(optimizer)). `table` outlives the collector.
  void Begin(uint64_t step, const ChunkTable* table, uint32_t fields);
  // Asks for nothing any more.
  void End() { step_.reset(); }
  // The version asked for last; nullopt before the first.
  const std::optional<uint64_t>& step() const { return step_; }

  // Takes digests; those of another version and repeated chunks change nothing.
  // Errors: INVALID_ARGUMENT  a chunk does not exist or its digests have
  //         another length than its blocks want.
  absl::Status Add(const v1::StateDigests& report);
  bool HasChunk(uint32_t chunk) const { return seen_[chunk]; }
  bool Done() const { return step_.has_value() && missing_ == 0; }
  // 32 hex digits. Only when Done().
  std::string Hash() const;

 private:
  std::optional<uint64_t> step_;
  const ChunkTable* table_ = nullptr;
  uint32_t fields_ = 0;
  std::vector<BlockDigests> digests_;  // By tensor, field-major.
  std::vector<bool> seen_;             // By chunk.
  uint64_t missing_ = 0;
};

}  // namespace ballast
