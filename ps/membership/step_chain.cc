// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/step_chain.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/hash.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

constexpr size_t kChainBytes = 16;

std::string Name(const StepKey& key) {
  return absl::StrCat("step ", key.step, " of timeline ", key.timeline);
}

StepKey ParentOf(const RunState& state, uint64_t timeline) {
  const auto branch = state.branches.find(timeline);
  return branch == state.branches.end() ? StepKey{} : branch->second.parent;
}

// The step before `key` in its own history; step 0 before the first. A branch
// that was left where it began has no step of its own to go back to.
StepKey Before(const RunState& state, const StepKey& key) {
  StepKey before = {key.timeline, key.step - 1};
  // Each turn goes to an older timeline.
  while (before.timeline > 0) {
    const StepKey parent = ParentOf(state, before.timeline);
    if (before.step > parent.step || parent.timeline >= before.timeline) {
      break;
    }
    before.timeline = parent.timeline;
  }
  return before;
}

// OK when the record's chain is right, or when nothing is there to check it
// against: then *checked stays.
absl::Status CheckRecord(const RunState& state, const StepKey& key,
                         const v1::Decision& record, uint64_t* checked) {
  if (record.chain().size() != kChainBytes) {
    return absl::DataLossError(absl::StrCat(
        "the step log's record of ", Name(key), " has ",
        record.chain().empty() ? "no chain" : "a chain of another length",
        "; want ", kChainBytes, " bytes"));
  }
  std::string previous;
  if (key.step > 1) {
    const StepKey before = Before(state, key);
    const auto found = state.decisions.find(before);
    if (found == state.decisions.end()) {
      return absl::OkStatus();
    }
    previous = found->second.chain();
  }
  const std::string want = ChainOf(previous, record);
  if (record.chain() != want) {
    return absl::DataLossError(
        absl::StrCat("the step log's record of ", Name(key), " has the chain ",
                     absl::BytesToHexString(record.chain()), "; want ",
                     absl::BytesToHexString(want),
                     ": it or the record before it was changed"));
  }
  ++*checked;
  return absl::OkStatus();
}

}  // namespace

std::string ChainOf(absl::string_view previous, const v1::Decision& record) {
  v1::Decision bare = record;
  bare.clear_chain();
  const Hash128 hash =
      HashBytes(absl::StrCat(previous, bare.SerializeAsString()));
  ByteWriter writer;
  writer.Put(hash.high);
  writer.Put(hash.low);
  return writer.Take();
}

absl::StatusOr<ChainReport> CheckChain(const RunState& state) {
  ChainReport report;
  uint64_t timeline = 0;
  for (const auto& [key, record] : state.decisions) {
    ++report.records;
    report.timelines += key.timeline != timeline ? 1 : 0;
    timeline = key.timeline;
    BALLAST_RETURN_IF_ERROR(CheckRecord(state, key, record, &report.checked));
  }
  const std::vector<v1::Decision> history = state.History();
  if (history.empty()) {
    return report;
  }
  report.first_step = history.front().step();
  report.last_step = history.back().step();
  report.head = history.back().chain();
  for (size_t i = 1; i < history.size(); ++i) {
    if (history[i].step() != history[i - 1].step() + 1) {
      return absl::DataLossError(
          absl::StrCat("the step log has no record of step ",
                       history[i - 1].step() + 1, ", though it has those of ",
                       history[i - 1].step(), " and ", history[i].step()));
    }
  }
  return report;
}

}  // namespace ballast
