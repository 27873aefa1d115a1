// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/fault_table.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ps/cli/text_table.h"

namespace ballast {
namespace {

std::string RoleOf(const std::string& member) {
  return member.substr(0, member.rfind('-'));
}

std::string Seconds(double seconds) { return absl::StrFormat("%.2f", seconds); }

// `sorted` is not empty.
double Median(const std::vector<double>& sorted) {
  const size_t half = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[half]
                                : (sorted[half - 1] + sorted[half]) / 2;
}

std::vector<std::string> Row(const std::string& role, int count,
                             std::vector<double> seconds) {
  std::vector<std::string> row = {role, absl::StrCat(count)};
  if (seconds.empty()) {
    row.insert(row.end(), {"-", "-", "-"});
  } else {
    std::sort(seconds.begin(), seconds.end());
    row.insert(row.end(), {Seconds(seconds.front()), Seconds(Median(seconds)),
                           Seconds(seconds.back())});
  }
  const size_t open = static_cast<size_t>(count) - seconds.size();
  row.push_back(open == 0 ? "" : absl::StrCat(open, " without a step since"));
  return row;
}

}  // namespace

std::string FaultTable(const std::vector<v1::Fault>& faults) {
  if (faults.empty()) {
    return "";
  }
  std::map<std::string, std::pair<int, std::vector<double>>> by_role;
  for (const v1::Fault& fault : faults) {
    auto& [count, seconds] = by_role[RoleOf(fault.member())];
    ++count;
    if (fault.recovered_seconds() >= 0) {
      seconds.push_back(fault.recovered_seconds());
    }
  }
  std::vector<std::vector<std::string>> rows = {
      {"faults", "count", "min s", "median s", "max s",
       "from the notice to the next committed step"}};
  for (const auto& [role, found] : by_role) {
    rows.push_back(Row(role, found.first, found.second));
  }
  return FormatTable(rows, {false, true, true, true, true, false});
}

std::string FaultList(const std::vector<v1::Fault>& faults, size_t most) {
  if (faults.empty()) {
    return "";
  }
  std::vector<std::vector<std::string>> rows = {
      {"fault", "kind", "after step", "next step", ""}};
  const size_t first = faults.size() - std::min(most, faults.size());
  for (size_t i = first; i < faults.size(); ++i) {
    const v1::Fault& fault = faults[i];
    rows.push_back(
        {fault.member(), fault.kind(), absl::StrCat(fault.step()),
         fault.recovered_seconds() < 0
             ? "not yet"
             : absl::StrCat(Seconds(fault.recovered_seconds()), " s later"),
         fault.detail()});
  }
  return absl::StrCat(
      FormatTable(rows, {false, false, true, true, false}),
      first == 0 ? "" : absl::StrCat("and ", first, " before them\n"));
}

}  // namespace ballast
