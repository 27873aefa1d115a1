// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/wanted_list.h"

#include "absl/strings/str_cat.h"

namespace ballast {

WantedList::WantedList(uint32_t servers, uint32_t workers) {
  AddNew(v1::ROLE_SERVER, servers);
  AddNew(v1::ROLE_WORKER, workers);
}

const WantedMember* WantedList::Find(absl::string_view name) const {
  for (const WantedMember& member : members_) {
    if (member.name == name) {
      return &member;
    }
  }
  return nullptr;
}

std::vector<std::string> WantedList::Names(v1::Role role) const {
  std::vector<std::string> names;
  for (const WantedMember& member : members_) {
    if (member.role == role) {
      names.push_back(member.name);
    }
  }
  return names;
}

uint32_t WantedList::CountStaying(v1::Role role) const {
  uint32_t count = 0;
  for (const WantedMember& member : members_) {
    count += member.role == role && !member.draining ? 1 : 0;
  }
  return count;
}

void WantedList::Add(const std::string& name, v1::Role role) {
  for (WantedMember& member : members_) {
    if (member.name == name) {
      member.draining = false;
      return;
    }
  }
  members_.push_back({name, role, false});
}

std::vector<std::string> WantedList::AddNew(v1::Role role, uint32_t count) {
  const char* prefix = role == v1::ROLE_SERVER ? "server-" : "worker-";
  std::vector<std::string> names;
  for (uint32_t index = 0; names.size() < count; ++index) {
    std::string name = absl::StrCat(prefix, index);
    if (!Has(name)) {
      members_.push_back({name, role, false});
      names.push_back(std::move(name));
    }
  }
  return names;
}

void WantedList::Drain(absl::string_view name) {
  for (WantedMember& member : members_) {
    member.draining = member.draining || member.name == name;
  }
}

void WantedList::Remove(absl::string_view name) {
  std::erase_if(members_, [name](const WantedMember& member) {
    return member.name == name;
  });
}

}  // namespace ballast
