// SPDX-License-Identifier: Apache-2.0
#include "offload/residency.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/round_up.h"
#include "common/units.h"

namespace ballast {
namespace {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kPage = 4 * kKiB;
// Below this RocksDB cannot hold one memtable of a manifest batch.
constexpr uint64_t kIndexMin = 256 * kKiB;
constexpr uint64_t kIndexMax = 8 * kKiB * kKiB;
// Two bounce buffers of the log: one fills while the other is written.
constexpr uint64_t kLogMin = 128 * kKiB;
constexpr uint64_t kLogMax = 8 * kKiB * kKiB;
// Bookkeeping of one chunk: names, versions, digests, tree nodes.
constexpr uint64_t kTableBytesPerChunk = 512;
// More records than this in flight at once gain nothing: one is read, one
// updated, one written, one waits to be fetched.
constexpr uint64_t kWindowRecords = 4;

struct Totals {
  uint64_t record_max = 0;
  uint64_t prefix_max = 0;
  uint64_t gradient_max = 0;
  uint64_t records = 0;
  uint64_t gradient_nodes = 0;  // All that can wait at the same time.
};

Totals Sum(const ResidencyRequest& request) {
  Totals totals;
  // One worker pushes whole sums; several push nodes that wait for siblings.
  const uint64_t nodes = request.workers == 1 ? 1 : request.workers + 1;
  for (const ChunkFootprint& chunk : request.chunks) {
    const uint64_t gradient = RoundUp(chunk.gradient_bytes, kPage);
    totals.record_max = std::max(totals.record_max, chunk.record_bytes);
    totals.prefix_max = std::max(totals.prefix_max, chunk.prefix_bytes);
    totals.gradient_max = std::max(totals.gradient_max, gradient);
    totals.records += chunk.record_bytes;
    totals.gradient_nodes += gradient * nodes * chunk.uses;
  }
  if (request.copy_sources > 0) {
    const ChunkFootprint& largest = request.largest;
    const uint64_t gradient = RoundUp(largest.gradient_bytes, kPage);
    totals.record_max = std::max(totals.record_max, largest.record_bytes);
    totals.prefix_max = std::max(totals.prefix_max, largest.prefix_bytes);
    totals.gradient_max = std::max(totals.gradient_max, gradient);
    totals.gradient_nodes = std::max(totals.gradient_nodes, gradient);
  }
  return totals;
}

// Takes at most `wanted` of what is left.
uint64_t Take(uint64_t wanted, uint64_t* left) {
  const uint64_t taken = std::min(wanted, *left) / kPage * kPage;
  *left -= taken;
  return taken;
}

class Planner {
 public:
  explicit Planner(const ResidencyRequest& request)
      : request_(request), totals_(Sum(request)) {
    plan_.tiers.assign(request.chunks.size(), Tier::kStreamed);
  }

  absl::StatusOr<ResidencyPlan> Plan() {
    const uint64_t all_in_memory = FillAmple();
    if (request_.budget_bytes >= all_in_memory) {
      GrowAmple(request_.budget_bytes - all_in_memory);
      Itemise();
      // Streaming may need less than everything in memory, or (for a model of
      // one chunk) more.
      ResidencyPlan ample = plan_;
      ample.smallest_budget_bytes =
          Smallest(std::min(all_in_memory, FillScarce()));
      return ample;
    }
    const uint64_t scarce = FillScarce();
    plan_.smallest_budget_bytes = Smallest(std::min(scarce, all_in_memory));
    if (request_.budget_bytes < scarce) {
      return Refusal();
    }
    GrowScarce(request_.budget_bytes - scarce);
    Itemise();
    return plan_;
  }

 private:
  uint64_t Used() const {
    return plan_.index_bytes + plan_.tables_bytes + plan_.log_buffer_bytes +
           plan_.credit_bytes * request_.workers + plan_.resident_bytes +
           plan_.window_bytes + plan_.gradient_bytes + plan_.scratch_bytes +
           CopiesBytes();
  }

  // A message of each source, one on its way to the disk and one that leaves.
  uint64_t CopiesBytes() const {
    return plan_.copy_sources == 0
               ? 0
               : plan_.copy_bytes * (plan_.copy_sources + 2);
  }

  // `needed` is for this budget; a smaller one lends RocksDB less.
  uint64_t Smallest(uint64_t needed) const {
    const uint64_t fixed = needed - IndexBytes(request_.budget_bytes);
    uint64_t smallest = fixed + kIndexMin;
    for (uint64_t next = 0; next != smallest;) {
      next = smallest;
      smallest = fixed + IndexBytes(smallest);
    }
    return smallest;
  }

  void FillCommon() {
    plan_.index_bytes = IndexBytes(request_.budget_bytes);
    plan_.tables_bytes =
        RoundUp(request_.chunks.size() * kTableBytesPerChunk, kPage);
    plan_.credit_bytes = totals_.gradient_max;
    // With an ample budget too: workers that die leave more spans behind than
    // were planned for.
    plan_.log_buffer_bytes = kLogMin;
    plan_.scratch_bytes = totals_.gradient_max;
    plan_.copy_sources = request_.copy_sources;
    plan_.copy_bytes =
        request_.copy_sources == 0 ? 0 : std::max(totals_.gradient_max, kPage);
  }

  // Everything in memory. Returns what it takes at least.
  uint64_t FillAmple() {
    FillCommon();
    plan_.resident_bytes = totals_.records;
    plan_.window_bytes = std::max(totals_.prefix_max, totals_.gradient_max);
    if (request_.copy_sources > 0) {  // Chunks that come stream at first.
      plan_.window_bytes = std::max(plan_.window_bytes, totals_.record_max);
    }
    plan_.gradient_bytes = totals_.gradient_nodes;
    plan_.tiers.assign(request_.chunks.size(), Tier::kWhole);
    return Used();
  }

  void GrowAmple(uint64_t left) {
    plan_.credit_bytes +=
        Take(3 * totals_.gradient_max * request_.workers, &left) /
        request_.workers / kPage * kPage;
  }

  // The least that works: one record at a time, one gradient at a time.
  uint64_t FillScarce() {
    FillCommon();
    plan_.resident_bytes = 0;
    plan_.window_bytes = totals_.record_max;
    plan_.gradient_bytes = totals_.gradient_max;
    plan_.tiers.assign(request_.chunks.size(), Tier::kStreamed);
    return Used();
  }

  // A gradient more, so that one is summed while another is written to the
  // log; room to read ahead; then weights, more window, state, gradients.
  void GrowScarce(uint64_t left) {
    plan_.gradient_bytes += Take(totals_.gradient_max, &left);
    plan_.window_bytes +=
        Take(totals_.record_max + request_.workers * totals_.prefix_max, &left);
    plan_.log_buffer_bytes +=
        Take(std::min(kLogMax - kLogMin, request_.budget_bytes / 64), &left);
    plan_.credit_bytes +=
        Take(std::min(totals_.gradient_max * request_.workers, left / 16),
             &left) /
        request_.workers / kPage * kPage;
    // What rounding left over comes back.
    left = request_.budget_bytes - Used();
    const uint64_t window_more =
        std::min(totals_.record_max * (kWindowRecords - 2), left / 4);
    left -= window_more;
    Promote(Tier::kWeights, &left);
    left += window_more;
    plan_.window_bytes += Take(window_more, &left);
    Promote(Tier::kWhole, &left);
    plan_.gradient_bytes +=
        Take(totals_.gradient_nodes -
                 std::min(totals_.gradient_nodes, plan_.gradient_bytes),
             &left);
  }

  // Raises chunks in forward order to `tier` while they fit.
  void Promote(Tier tier, uint64_t* left) {
    for (size_t i = 0; i < request_.chunks.size(); ++i) {
      const ChunkFootprint& chunk = request_.chunks[i];
      const uint64_t has =
          plan_.tiers[i] == Tier::kWeights ? chunk.prefix_bytes : 0;
      const uint64_t wants =
          tier == Tier::kWeights ? chunk.prefix_bytes : chunk.record_bytes;
      if (plan_.tiers[i] >= tier || wants - has > *left) {
        continue;
      }
      plan_.tiers[i] = tier;
      plan_.resident_bytes += wants - has;
      *left -= wants - has;
    }
  }

  void Itemise() {
    plan_.items = {
        {"index (RocksDB)", plan_.index_bytes},
        {"tables of chunks", plan_.tables_bytes},
        {"gradient log buffers", plan_.log_buffer_bytes},
        {absl::StrCat("pushes in flight of ", request_.workers, " workers"),
         plan_.credit_bytes * request_.workers},
        {"chunks kept in memory", plan_.resident_bytes},
        {"window for chunks on disk", plan_.window_bytes},
        {"gradients", plan_.gradient_bytes},
        {"gradient being added", plan_.scratch_bytes},
        {"copies between servers", CopiesBytes()}};
    plan_.used_bytes = Used();
  }

  absl::Status Refusal() {
    Itemise();
    std::vector<std::string> lines;
    for (const BudgetItem& item : plan_.items) {
      if (item.bytes > 0) {
        lines.push_back(absl::StrCat(item.what, " ", item.bytes));
      }
    }
    return absl::ResourceExhaustedError(absl::StrCat(
        "server.memory is ", request_.budget_bytes, " bytes; want at least ",
        plan_.smallest_budget_bytes, " (", absl::StrJoin(lines, ", "),
        "); raise it or lower server.chunk_elems: the largest chunk takes ",
        FormatBytes(totals_.record_max)));
  }

  const ResidencyRequest& request_;
  const Totals totals_;
  ResidencyPlan plan_;
};

}  // namespace

uint64_t IndexBytes(uint64_t budget_bytes) {
  return std::clamp(budget_bytes / 64 / kPage * kPage, kIndexMin, kIndexMax);
}

absl::StatusOr<ResidencyPlan> PlanResidency(const ResidencyRequest& request) {
  if (request.workers == 0) {
    return absl::InvalidArgumentError("workers is 0; want at least 1");
  }
  return Planner(request).Plan();
}

}  // namespace ballast
