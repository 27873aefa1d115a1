// SPDX-License-Identifier: Apache-2.0
// The text of the golden runs: a small language of 16 words, in which four
// words may follow each, so a model has something to learn in 50 steps. Made
// alike by make_golden.py (golden_text).

#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "common/random.h"

namespace ballast::testing {

inline std::string GoldenText(uint64_t bytes) {
  constexpr uint64_t kWordSeed = 7;
  constexpr uint64_t kOrderSeed = 8;
  std::array<std::string, 16> words;
  for (uint64_t word = 0; word < words.size(); ++word) {
    const uint32_t letters = 3 + Philox(kWordSeed, word, 0)[0] % 4;
    for (uint64_t i = 0; i < letters; ++i) {
      words[word].push_back(
          static_cast<char>('a' + Philox(kWordSeed, word, 1 + i)[0] % 26));
    }
  }
  std::string text;
  uint64_t word = 0;
  for (uint64_t index = 0; text.size() < bytes; ++index) {
    text += words[word] + ' ';
    word = (5 * word + Philox(kOrderSeed, index, 0)[0] % 4) % words.size();
  }
  text.resize(bytes);
  return text;
}

}  // namespace ballast::testing
