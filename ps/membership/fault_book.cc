// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/fault_book.h"

#include <algorithm>
#include <utility>

namespace ballast {

FaultBook::FaultBook(const std::map<uint64_t, v1::Fault>& faults,
                     absl::Time now)
    : faults_(faults) {
  for (const auto& [number, fault] : faults_) {
    if (fault.recovered_seconds() < 0) {
      open_[number] = now;
    }
    last_ = number;
  }
}

uint64_t FaultBook::Add(uint64_t incarnation, v1::Fault fault,
                        absl::Time noticed, std::vector<StateChange>* changes) {
  fault.set_recovered_seconds(-1);
  const uint64_t number = ++last_;
  changes->push_back(PutFault(number, fault));
  faults_[number] = std::move(fault);
  open_[number] = noticed;
  if (incarnation != 0) {
    of_life_[incarnation] = number;
  }
  while (faults_.size() > kMax) {
    const uint64_t oldest = faults_.begin()->first;
    changes->push_back(DeleteFault(oldest));
    faults_.erase(oldest);
    open_.erase(oldest);
    std::erase_if(of_life_, [oldest](const auto& entry) {
      return entry.second == oldest;
    });
  }
  return number;
}

bool FaultBook::Amend(uint64_t incarnation, const std::string& kind,
                      const std::string& detail,
                      std::vector<StateChange>* changes) {
  const auto place = of_life_.find(incarnation);
  if (place == of_life_.end()) {
    return false;
  }
  v1::Fault& fault = faults_.at(place->second);
  fault.set_kind(kind);
  fault.set_detail(detail);
  changes->push_back(PutFault(place->second, fault));
  of_life_.erase(place);
  return true;
}

void FaultBook::Committed(absl::Time now, std::vector<StateChange>* changes) {
  for (const auto& [number, noticed] : open_) {
    v1::Fault& fault = faults_.at(number);
    fault.set_recovered_seconds(
        std::max(0.0, absl::ToDoubleSeconds(now - noticed)));
    changes->push_back(PutFault(number, fault));
  }
  open_.clear();
}

}  // namespace ballast
