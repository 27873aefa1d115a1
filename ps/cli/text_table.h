// SPDX-License-Identifier: Apache-2.0
// Plain-text columns for people, and the words that numbers are printed with.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace ballast {

// Rows of cells as lines with aligned columns, two spaces apart. A column whose
// name in `right` is set is right-aligned. Rows may be shorter than the widest.
std::string FormatTable(const std::vector<std::vector<std::string>>& rows,
                        const std::vector<bool>& right = {});

// "1,608,960".
std::string WithCommas(uint64_t number);

// "1h02m", "3m07s", "12s".
std::string FormatSpan(absl::Duration duration);

// "4.35x"; "-" when `over` is 0.
std::string FormatRatio(uint64_t value, uint64_t over);

}  // namespace ballast
