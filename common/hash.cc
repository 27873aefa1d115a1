// SPDX-License-Identifier: Apache-2.0
#include "common/hash.h"

#include <xxhash.h>

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

}  // namespace ballast
