// SPDX-License-Identifier: Apache-2.0
// From a job file and a run folder to a core that is ready to run: reads the
// coordinator's state, the checkpoint to resume from, and puts the folder in
// order.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/job_file.h"
#include "ps/coordinator/leadership.h"
#include "ps/coordinator/run_folder.h"
#include "ps/membership/coordinator_core.h"
#include "storage/state_store.h"

namespace ballast {

struct CoordinatorFlags {
  bool resume = false;
  // Go on with the run where a coordinator left it, or begin it; what a
  // supervisor passes.
  bool continue_run = false;
  bool keep_up = false;
  std::optional<uint64_t> stop_after;
};

struct OpenedRun {
  std::unique_ptr<RunFolder> folder;
  // Null when there is nothing to go on with: the run has ended.
  std::unique_ptr<CoordinatorCore> core;
  std::string ended;                 // Says so, then.
  std::vector<StepMetrics> earlier;  // Of a continued run; see ReadMeasured.
};

// The store of the run: embedded in <run.dir>/coordinator, or the one that
// `url` names, "etcd://host:port[,host:port]".
// Errors: INVALID_ARGUMENT  the URL is none; others are the store's.
absl::StatusOr<std::unique_ptr<SharedStateStore>> OpenStore(
    const Job& job, const std::string& url);

// Opens <run.dir>. Only a leader may: it puts files in order.
//
// A resume under server.durability checkpoint takes the newest checkpoint that
// can be read in full; damaged ones are put aside and named in the log.
// Errors: those of CoordinatorCore::Create, of the store and of the checkpoint.
absl::StatusOr<OpenedRun> OpenRun(const JobFile& file,
                                  const CoordinatorFlags& flags,
                                  Leadership* leadership, absl::Time now);

// All pairs of the store.
absl::StatusOr<RunState> ReadRunState(StateStore* store);

}  // namespace ballast
