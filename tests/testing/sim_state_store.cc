// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "tests/testing/sim_machine.h"

namespace ballast::testing {
namespace {

void ApplyTo(const std::vector<StateChange>& changes,
             SimStoreContents::Pairs* pairs) {
  for (const StateChange& change : changes) {
    if (change.value) {
      (*pairs)[change.key] = *change.value;
    } else {
      pairs->erase(change.key);
    }
  }
}

class SimStateStore final : public StateStore {
 public:
  SimStateStore(SimMachine* machine, std::string dir,
                std::shared_ptr<SimStoreContents> contents)
      : machine_(machine),
        dir_(std::move(dir)),
        contents_(std::move(contents)),
        life_(machine->life) {}

  absl::StatusOr<std::string> Get(absl::string_view key) override {
    MutexLock lock(&machine_->mutex);
    BALLAST_RETURN_IF_ERROR(machine_->Alive(life_));
    BALLAST_RETURN_IF_ERROR(
        machine_->TakeFault(SimDisk::Operation::kRead, dir_));
    const auto it = contents_->now.find(std::string(key));
    if (it == contents_->now.end()) {
      return absl::NotFoundError(absl::StrCat(dir_, ": no key '", key, "'"));
    }
    return it->second;
  }

  absl::Status CompareAndSwap(
      absl::string_view key, const std::optional<std::string>& expected,
      const std::vector<StateChange>& changes) override {
    MutexLock lock(&machine_->mutex);
    BALLAST_RETURN_IF_ERROR(machine_->Alive(life_));
    const auto it = contents_->now.find(std::string(key));
    const bool found = it != contents_->now.end();
    if (found != expected.has_value() || (found && it->second != *expected)) {
      return absl::AbortedError(absl::StrCat(
          "key '", key, "' ", found ? "holds another value" : "does not exist",
          "; read it again"));
    }
    return Write(changes);
  }

  absl::Status Apply(const std::vector<StateChange>& changes) override {
    MutexLock lock(&machine_->mutex);
    BALLAST_RETURN_IF_ERROR(machine_->Alive(life_));
    return Write(changes);
  }

  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Range(
      absl::string_view begin, absl::string_view end, uint64_t limit) override {
    MutexLock lock(&machine_->mutex);
    BALLAST_RETURN_IF_ERROR(machine_->Alive(life_));
    std::vector<std::pair<std::string, std::string>> pairs;
    for (auto it = contents_->now.lower_bound(std::string(begin));
         it != contents_->now.end() && it->first < end && pairs.size() < limit;
         ++it) {
      pairs.push_back(*it);
    }
    return pairs;
  }

 private:
  // The write of the batch, then its sync; either may be cut.
  absl::Status Write(const std::vector<StateChange>& changes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(machine_->mutex) {
    uint64_t bytes = 0;
    for (const StateChange& change : changes) {
      bytes += change.key.size() + change.value.value_or("").size();
    }
    BALLAST_RETURN_IF_ERROR(machine_->CheckRoom(bytes, dir_));
    BALLAST_RETURN_IF_ERROR(
        machine_->TakeFault(SimDisk::Operation::kWrite, dir_));
    const bool cut = machine_->CutsNow();
    if (!cut || machine_->Flip()) {
      ApplyTo(changes, &contents_->now);
      contents_->unsynced.push_back(changes);
      contents_->wrote_in_life = machine_->life;
    }
    BALLAST_RETURN_IF_ERROR(machine_->Alive(life_));
    const bool happens =
        machine_->Syncs(SimDisk::Sync::Of::kStore, dir_, /*wrote=*/true);
    BALLAST_RETURN_IF_ERROR(
        machine_->TakeFault(SimDisk::Operation::kSync, dir_));
    if (const bool cuts = machine_->CutsNow();
        happens && (!cuts || machine_->Flip())) {
      for (const std::vector<StateChange>& batch : contents_->unsynced) {
        ApplyTo(batch, &contents_->disk);
      }
      contents_->unsynced.clear();
    }
    return machine_->Alive(life_);
  }

  SimMachine* const machine_;
  const std::string dir_;
  const std::shared_ptr<SimStoreContents> contents_;
  const uint64_t life_;
};

}  // namespace

std::unique_ptr<StateStore> MakeSimStateStore(
    SimMachine* machine, std::string dir,
    std::shared_ptr<SimStoreContents> contents) {
  return std::make_unique<SimStateStore>(machine, std::move(dir),
                                         std::move(contents));
}

}  // namespace ballast::testing
