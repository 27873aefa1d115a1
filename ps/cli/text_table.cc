// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/text_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ballast {

std::string FormatTable(const std::vector<std::vector<std::string>>& rows,
                        const std::vector<bool>& right) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string fill(widths[i] - row[i].size(), ' ');
      const bool to_right = i < right.size() && right[i];
      absl::StrAppend(&line, i == 0 ? "" : "  ", to_right ? fill : "", row[i],
                      to_right ? "" : fill);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

std::string WithCommas(uint64_t number) {
  const std::string digits = absl::StrCat(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) {
      text += ',';
    }
    text += digits[i];
  }
  return text;
}

std::string FormatSpan(absl::Duration duration) {
  const int64_t seconds = std::max<int64_t>(0, absl::ToInt64Seconds(duration));
  if (seconds >= 3600) {
    return absl::StrFormat("%dh%02dm", seconds / 3600, seconds / 60 % 60);
  }
  if (seconds >= 60) {
    return absl::StrFormat("%dm%02ds", seconds / 60, seconds % 60);
  }
  return absl::StrCat(seconds, "s");
}

std::string FormatRatio(uint64_t value, uint64_t over) {
  return over == 0 ? "-"
                   : absl::StrFormat("%.2fx", static_cast<double>(value) /
                                                  static_cast<double>(over));
}

}  // namespace ballast
