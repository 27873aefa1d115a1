// SPDX-License-Identifier: Apache-2.0
// Sizes as people write them (`4MiB`, `1.5 GB`, `4096`) and read them.

#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast {

// Bytes in `text`: a number and an optional unit B, KB, MB, GB, TB (powers of
// 1000) or KiB, MiB, GiB, TiB (powers of 1024), upper or lower case.
// Errors: INVALID_ARGUMENT  not such a size, negative, or beyond 2^63.
absl::StatusOr<uint64_t> ParseBytes(absl::string_view text);

// "3.36 MiB", "512 B": three significant digits; four from 1000 to 1023.
std::string FormatBytes(uint64_t bytes);

}  // namespace ballast
