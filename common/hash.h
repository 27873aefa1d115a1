// SPDX-License-Identifier: Apache-2.0
// XXH3-128: the checksum of every block of state on disk and, the same value,
// the leaf of state_hash. Not cryptographic: it guards against faults.

#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ballast {

struct Hash128 {
  uint64_t high = 0;
  uint64_t low = 0;
  friend bool operator==(const Hash128&, const Hash128&) = default;
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 misreads <=>.
  friend auto operator<=>(const Hash128&, const Hash128&) = default;
};

Hash128 HashBytes(const void* data, uint64_t bytes);
inline Hash128 HashBytes(absl::string_view bytes) {
  return HashBytes(bytes.data(), bytes.size());
}

// 32 lower-case hex digits, high half first.
std::string HashHex(const Hash128& hash);
// The hash that HashHex writes as `hex`; nullopt for any other text.
std::optional<Hash128> ParseHashHex(absl::string_view hex);

}  // namespace ballast
