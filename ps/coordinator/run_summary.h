// SPDX-License-Identifier: Apache-2.0
// summary.json: what a run came to, in figures that scripts rely on.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/job.h"
#include "ps/membership/coordinator_core.h"
#include "ps/membership/step_metrics.h"

namespace ballast {

// Thread-compatible.
class RunSummary {
 public:
  explicit RunSummary(const Job& job) : job_(job) {}

  // A step's line has been written; `own_faults` are this process's minor page
  // faults so far.
  void Add(const StepMetrics& line, uint64_t own_faults);

  // The same of a step that an earlier life of the coordinator has written.
  void AddEarlier(const StepMetrics& line);

  // The summary of a run that is over. Budgets and peaks are of one process,
  // the largest; bytes of state and weights are totals. What is not known is
  // null.
  std::string Json(const CoordinatorCore& core, absl::Time now) const;

 private:
  // Page faults of one step, in steady state none.
  struct Faults {
    uint64_t workers = 0;
    uint64_t servers = 0;
    uint64_t own = 0;  // Since the process started.
  };

  const Job job_;
  uint64_t tokens_ = 0;
  uint64_t pushed_bytes_ = 0;  // In whole_steps_.
  uint64_t whole_steps_ = 0;   // Whose every worker has reported.
  double seconds_ = 0.0;
  double earlier_seconds_ = 0.0;
  uint64_t measured_steps_ = 0;
  uint64_t log_bytes_ = 0;
  double log_seconds_ = 0.0;
  std::vector<Faults> faults_;
};

}  // namespace ballast
