// SPDX-License-Identifier: Apache-2.0
// What a person sees of a run: the table at its start, the progress block of a
// terminal, the plain line without one, the summary at its end. Pure functions
// of what the coordinator says, and one small class that prints them.

#pragma once

#include <cstdio>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "common/job.h"
#include "proto/ballast.pb.h"

namespace ballast {

// Whether all workers of the job have told their plans.
bool KnowsPlans(const Job& job, const v1::StatusReply& status);

// Device budget against weights, against a usual trainer, state against the
// servers' RAM, and what the planner chose. Needs KnowsPlans.
std::string StartTable(const Job& job, const v1::StatusReply& status);

// Several lines, for a terminal that redraws them.
std::string ProgressBlock(const Job& job, const v1::StatusReply& status);

// One line, for a log.
std::string ProgressLine(const Job& job, const v1::StatusReply& status);

// The whole of it, for `ballast status`.
std::string StatusText(const v1::StatusReply& status);

// Of a run folder's summary.json; empty when there is none or it is not whole.
std::string SummaryText(const std::string& run_dir);

// Thread-compatible.
class ProgressPrinter {
 public:
  // Writes to `out`, not owned. A terminal gets a block that is drawn over.
  ProgressPrinter(const Job& job, bool terminal, std::FILE* out);

  // Shows the start table once it is known, then progress: on a terminal at
  // each call, else a line every few seconds and when a validation loss came.
  void Show(const v1::StatusReply& status, absl::Time now);
  // Prints text that stays, above the block.
  void Say(const std::string& text);

 private:
  void Erase();

  const Job job_;
  const bool terminal_;
  std::FILE* const out_;
  bool table_shown_ = false;
  int block_lines_ = 0;
  absl::Time next_line_ = absl::InfinitePast();
  uint64_t step_shown_ = 0;
  uint64_t validation_shown_ = 0;
  std::string phase_shown_;
};

}  // namespace ballast
