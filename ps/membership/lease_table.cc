// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/lease_table.h"

#include <algorithm>

namespace ballast {

void LeaseTable::Renew(uint64_t incarnation, absl::Time now) {
  const auto [place, fresh] = renewed_.try_emplace(incarnation, now);
  if (!fresh) {
    place->second = std::max(place->second, now);
  }
}

void LeaseTable::Remove(uint64_t incarnation) { renewed_.erase(incarnation); }

std::vector<uint64_t> LeaseTable::TakeExpired(absl::Time now) {
  std::vector<uint64_t> expired;
  for (const auto& [incarnation, renewed] : renewed_) {
    if (now - renewed >= lease_) {
      expired.push_back(incarnation);
    }
  }
  for (const uint64_t incarnation : expired) {
    renewed_.erase(incarnation);
  }
  return expired;
}

absl::Duration LeaseTable::Silence(uint64_t incarnation, absl::Time now) const {
  const auto place = renewed_.find(incarnation);
  return place == renewed_.end() ? absl::ZeroDuration() : now - place->second;
}

}  // namespace ballast
