// SPDX-License-Identifier: Apache-2.0
// The safetensors file format: an 8-byte little-endian header length, a JSON
// header, then the tensors. Written as a stream, so an export never needs the
// model in memory.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/dtype.h"

namespace ballast {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<uint64_t> shape;
  // Elements that the source is asked for at once (fewer at the end). At
  // least 1; a multiple of the blocks in which the source can read.
  uint64_t piece_elems = 1 << 20;
};

// Fills `out` with elements [begin, begin + out.size()) of entry `index`.
using SafetensorsSource = std::function<absl::Status(
    size_t index, uint64_t begin, absl::Span<float> out)>;

// Writes to a temporary name beside `path`, syncs, renames.
// Errors: ALREADY_EXISTS  `path` exists and not `overwrite`; RESOURCE_EXHAUSTED
//         the disk is full; whatever the source returns. Nothing is left over.
absl::Status WriteSafetensors(
    const std::string& path, const std::vector<SafetensorsEntry>& entries,
    const std::map<std::string, std::string>& metadata, bool overwrite,
    const SafetensorsSource& source);

}  // namespace ballast
