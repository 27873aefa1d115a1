// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/leadership.h"

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/status_macros.h"
#include "ps/membership/run_state.h"

namespace ballast {
namespace {

std::string FreshLife() {
  std::random_device device;
  return absl::StrFormat("%08x%08x", device(), device());
}

// The term that the next leader's first write makes the run's.
absl::StatusOr<uint64_t> NextTerm(StateStore* store) {
  const absl::StatusOr<std::string> run = store->Get("run");
  if (absl::IsNotFound(run.status())) {
    return 1;
  }
  BALLAST_RETURN_IF_ERROR(run.status());
  BALLAST_ASSIGN_OR_RETURN(const RunState state,
                           ParseRunState({{"run", *run}}));
  return state.identity->term + 1;
}

}  // namespace

std::string LeaderRecord::Encode() const {
  return absl::StrCat("term=", term, " address=", address, " life=", life);
}

absl::StatusOr<LeaderRecord> LeaderRecord::Decode(absl::string_view text) {
  const std::map<std::string, std::string> fields = [text] {
    std::map<std::string, std::string> found;
    for (const absl::string_view word : absl::StrSplit(text, ' ')) {
      const std::pair<std::string, std::string> field =
          absl::StrSplit(word, absl::MaxSplits('=', 1));
      found.insert(field);
    }
    return found;
  }();
  LeaderRecord record;
  if (fields.size() != 3 || !fields.contains("term") ||
      !fields.contains("address") || !fields.contains("life") ||
      !absl::SimpleAtoi(fields.at("term"), &record.term)) {
    return absl::DataLossError(absl::StrCat(
        "the key '", kLeaderKey, "' holds '", text,
        "'; want what a coordinator writes; is this another program's store?"));
  }
  record.address = fields.at("address");
  record.life = fields.at("life");
  return record;
}

absl::StatusOr<std::unique_ptr<Leadership>> Leadership::Take(
    SharedStateStore* store, const std::string& address, absl::Duration ttl) {
  const absl::StatusOr<std::string> standing = store->Get(kLeaderKey);
  if (standing.ok()) {
    BALLAST_ASSIGN_OR_RETURN(const LeaderRecord leader,
                             LeaderRecord::Decode(*standing));
    return absl::AbortedError(absl::StrCat("leader is ", leader.address));
  }
  if (!absl::IsNotFound(standing.status())) {
    return standing.status();
  }
  LeaderRecord record;
  BALLAST_ASSIGN_OR_RETURN(record.term, NextTerm(store));
  record.address = address;
  record.life = FreshLife();
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<StoreLease> lease,
                           store->Lease(kLeaderKey, record.Encode(), ttl));
  // A leader may have come and gone since the term was read.
  BALLAST_ASSIGN_OR_RETURN(const uint64_t term, NextTerm(store));
  if (term != record.term) {
    return absl::AbortedError("a leader came and went meanwhile");
  }
  return std::unique_ptr<Leadership>(
      new Leadership(store, std::move(record), std::move(lease)));
}

absl::Status Leadership::Apply(const std::vector<StateChange>& changes) {
  // The last change of a key counts.
  std::map<std::string, std::optional<std::string>> last;
  for (const StateChange& change : changes) {
    last[change.key] = change.value;
  }
  std::vector<StateChange> puts;
  std::vector<StateChange> deletions;
  for (auto& [key, value] : last) {
    auto& kind = value.has_value() ? puts : deletions;
    kind.push_back({key, std::move(value)});
  }
  // What is deleted is no longer needed, so it may stay a little; what is put
  // belongs together. A small batch is one batch all the same.
  if (puts.size() + deletions.size() <= store_->batch_max()) {
    puts.insert(puts.end(), deletions.begin(), deletions.end());
    deletions.clear();
  }
  BALLAST_RETURN_IF_ERROR(store_->CompareAndSwap(kLeaderKey, value_, puts));
  const auto most = static_cast<ptrdiff_t>(
      std::min<uint64_t>(store_->batch_max(), deletions.size()));
  while (!deletions.empty()) {
    const auto end =
        deletions.begin() +
        std::min<ptrdiff_t>(most, static_cast<ptrdiff_t>(deletions.size()));
    BALLAST_RETURN_IF_ERROR(
        store_->CompareAndSwap(kLeaderKey, value_, {deletions.begin(), end}));
    deletions.erase(deletions.begin(), end);
  }
  return absl::OkStatus();
}

}  // namespace ballast
