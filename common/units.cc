// SPDX-License-Identifier: Apache-2.0
#include "common/units.h"

#include <array>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace ballast {
namespace {

struct Unit {
  const char* suffix;
  double factor;
};

// Longer suffixes first, so that "mib" is not read as "b".
constexpr std::array<Unit, 9> kUnits = {{{"kib", 1024.0},
                                         {"mib", 1048576.0},
                                         {"gib", 1073741824.0},
                                         {"tib", 1099511627776.0},
                                         {"kb", 1e3},
                                         {"mb", 1e6},
                                         {"gb", 1e9},
                                         {"tb", 1e12},
                                         {"b", 1.0}}};

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(absl::string_view text) {
  const std::string lower =
      absl::AsciiStrToLower(absl::StripAsciiWhitespace(text));
  absl::string_view number = lower;
  double factor = 1.0;
  for (const Unit& unit : kUnits) {
    if (absl::ConsumeSuffix(&number, unit.suffix)) {
      factor = unit.factor;
      break;
    }
  }
  number = absl::StripAsciiWhitespace(number);
  double value = 0;
  const bool digits =
      !number.empty() && number.find_first_not_of("0123456789.") == number.npos;
  if (!digits || !absl::SimpleAtod(number, &value) ||
      value * factor >= 9223372036854775808.0) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text,
                     "' is not a size; want a number of bytes or "
                     "one with a unit, such as 4MiB"));
  }
  return static_cast<uint64_t>(std::llround(value * factor));
}

std::string FormatBytes(uint64_t bytes) {
  static constexpr std::array<const char*, 5> kNames = {"B", "KiB", "MiB",
                                                        "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  // The bounds are those of the rounded figure, not of the exact one.
  while (value >= 1023.5 && unit + 1 < kNames.size()) {
    value /= 1024.0;
    ++unit;
  }
  if (unit == 0 || value >= 99.95) {
    return absl::StrFormat("%.0f %s", value, kNames[unit]);
  }
  if (value >= 9.995) {
    return absl::StrFormat("%.1f %s", value, kNames[unit]);
  }
  return absl::StrFormat("%.2f %s", value, kNames[unit]);
}

}  // namespace ballast
