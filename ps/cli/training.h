// SPDX-License-Identifier: Apache-2.0
// One run on this machine: starts coordinator, shard servers and workers as
// child processes, watches them and the run, starts again who dies, and sees to
// it that all of them have ended when it returns, whatever happened. What it
// decides is in ps/cli/supervisor.h.

#pragma once

#include <cstdint>
#include <string>

#include "common/job_file.h"
#include "ps/cli/chaos.h"
#include "ps/cli/run_folder.h"
#include "ps/cli/tool.h"

namespace ballast {

struct TrainingOptions {
  std::string job_path;  // With its overrides, for messages.
  bool resume = false;
  bool keep = false;        // Hold the cluster up after the last step.
  uint64_t stop_after = 0;  // 0: run.steps.
  ChaosPlan chaos;          // Faults to rehearse; none without rules.
};

// Blocks until the run is over; returns the tool's exit code: 0 when it is
// done or was stopped in good order, 1 when it failed or was ended at once, 78
// when a role refused its configuration. SIGINT, SIGTERM and SIGHUP stop the
// run, a second one ends it at once; they stay blocked afterwards.
int RunTraining(const JobFile& file, const LockedRunFolder& folder,
                const TrainingOptions& options,
                const Surroundings& surroundings);

}  // namespace ballast
