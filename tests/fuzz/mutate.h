// SPDX-License-Identifier: Apache-2.0
// Damage for decoders: a few random edits of valid bytes, from a seed that the
// test prints, so that a failure can be repeated.

#pragma once

#include <cstdint>
#include <random>
#include <string>

namespace ballast::testing {

// One to four edits: a bit flipped, a byte replaced, a stretch removed, or a
// stretch of the input copied elsewhere. `bytes` is not empty.
inline std::string Mutate(std::string bytes, std::mt19937_64* random) {
  const uint64_t edits = 1 + (*random)() % 4;
  for (uint64_t i = 0; i < edits && !bytes.empty(); ++i) {
    const uint64_t at = (*random)() % bytes.size();
    const uint64_t length = 1 + (*random)() % 16;
    switch ((*random)() % 4) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << ((*random)() % 8)));
        break;
      case 1:
        bytes[at] = static_cast<char>((*random)());
        break;
      case 2:
        bytes.erase(at, length);
        break;
      default:
        bytes.insert((*random)() % bytes.size(), bytes.substr(at, length));
        break;
    }
  }
  return bytes;
}

}  // namespace ballast::testing
