// SPDX-License-Identifier: Apache-2.0
// From a job file and a run folder to a core that is ready to run: reads the
// coordinator's state, the checkpoint to resume from, and puts the folder in
// order.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/job_file.h"
#include "ps/coordinator/run_folder.h"
#include "ps/membership/coordinator_core.h"
#include "storage/state_store.h"

namespace ballast {

struct CoordinatorFlags {
  bool resume = false;
  bool keep_up = false;
  std::optional<uint64_t> stop_after;
};

struct OpenedRun {
  std::unique_ptr<StateStore> store;
  std::unique_ptr<RunFolder> folder;
  std::unique_ptr<CoordinatorCore> core;
};

// Opens <run.dir> and the state store in <run.dir>/coordinator.
// Errors: those of CoordinatorCore::Create, of the store and of the checkpoint.
absl::StatusOr<OpenedRun> OpenRun(const JobFile& file,
                                  const CoordinatorFlags& flags,
                                  absl::Time now);

// All pairs of the store.
absl::StatusOr<RunState> ReadRunState(StateStore* store);

}  // namespace ballast
