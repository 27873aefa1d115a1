// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/model/family.h"
#include "worker/model/gpt2.h"

namespace ballast {
namespace {

struct Entry {
  absl::string_view name;
  absl::StatusOr<std::unique_ptr<ModelFamily>> (*make)(const Job& job);
};

constexpr std::array kFamilies = {Entry{"gpt2", MakeGpt2}};

}  // namespace

absl::StatusOr<std::unique_ptr<ModelFamily>> MakeModelFamily(const Job& job) {
  std::vector<absl::string_view> names;
  for (const Entry& entry : kFamilies) {
    if (entry.name == job.model.family) {
      return entry.make(job);
    }
    names.push_back(entry.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("model.family is '", job.model.family, "'; want one of ",
                   absl::StrJoin(names, ", ")));
}

}  // namespace ballast
