// SPDX-License-Identifier: Apache-2.0
// Reads the state of a running cluster by tensor name, from the shard servers
// that hold it, while training goes on.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/layout.h"
#include "proto/ballast.pb.h"

namespace ballast {

// Elements [begin, end) of a tensor, flattened row by row.
struct ElementSlice {
  uint64_t begin = 0;
  uint64_t end = 0;
  friend bool operator==(const ElementSlice&, const ElementSlice&) = default;
};

// "a:b", "a:", ":b" or "" of a tensor of `elem_count` elements.
// Errors: INVALID_ARGUMENT  not such a text; OUT_OF_RANGE  b beyond the end or
//         not above a.
absl::StatusOr<ElementSlice> ParseSlice(absl::string_view text,
                                        uint64_t elem_count);

// The model and who holds what, as a placement says it. Immutable.
class ShardMap {
 public:
  // Errors: DATA_LOSS  the placement does not fit its own layout.
  static absl::StatusOr<ShardMap> FromPlacement(v1::Placement placement);

  const ChunkTable& chunks() const { return chunks_; }
  const v1::Placement& placement() const { return placement_; }
  const v1::ServerEntry& owner(uint32_t chunk) const {
    return placement_.servers(
        static_cast<int>(placement_.owner(static_cast<int>(chunk))));
  }
  // Index of the tensor.
  // Errors: NOT_FOUND  names the nearest tensor.
  absl::StatusOr<uint32_t> FindTensor(absl::string_view name) const;

 private:
  ShardMap(v1::Placement placement, ChunkTable chunks)
      : placement_(std::move(placement)), chunks_(std::move(chunks)) {}
  v1::Placement placement_;
  ChunkTable chunks_;
};

// storage/record.h's number of a field, as --field names it: param, exp_avg,
// exp_avg_sq, or momentum_buffer of SGD.
// Errors: INVALID_ARGUMENT  no such field of this optimizer.
absl::StatusOr<uint8_t> FieldNumber(absl::string_view name,
                                    absl::string_view optimizer);

struct SliceValues {
  uint64_t step = 0;  // All elements are of this version.
  std::vector<float> values;
};

// Blocks for at most `timeout`.
// Errors: ABORTED  the run committed steps faster than the slice could be
//         read; read fewer elements. Else what a server answered.
absl::StatusOr<SliceValues> FetchSlice(const ShardMap& map, uint32_t tensor,
                                       uint8_t field, ElementSlice slice,
                                       absl::Duration timeout);

}  // namespace ballast
