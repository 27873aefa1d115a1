// SPDX-License-Identifier: Apache-2.0
#include "common/hash.h"

#include <xxhash.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ballast {

Hash128 HashBytes(const void* data, uint64_t bytes) {
  const XXH128_hash_t hash = XXH3_128bits(data, bytes);
  return {hash.high64, hash.low64};
}

std::string HashHex(const Hash128& hash) {
  return absl::StrCat(absl::Hex(hash.high, absl::kZeroPad16),
                      absl::Hex(hash.low, absl::kZeroPad16));
}

std::optional<Hash128> ParseHashHex(absl::string_view hex) {
  Hash128 hash;
  if (hex.size() != 32 || !absl::SimpleHexAtoi(hex.substr(0, 16), &hash.high) ||
      !absl::SimpleHexAtoi(hex.substr(16), &hash.low) || HashHex(hash) != hex) {
    return std::nullopt;
  }
  return hash;
}

}  // namespace ballast
