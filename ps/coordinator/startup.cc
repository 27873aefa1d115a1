// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/startup.h"

#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "storage/checkpoint.h"

namespace ballast {
namespace {

constexpr uint64_t kPairsPerRead = 4096;

std::string NewRunId() {
  std::random_device device;
  return absl::StrFormat("%08x%08x%08x%08x", device(), device(), device(),
                         device());
}

}  // namespace

absl::StatusOr<RunState> ReadRunState(StateStore* store) {
  std::vector<std::pair<std::string, std::string>> all;
  std::string begin;
  while (true) {
    std::vector<std::pair<std::string, std::string>> some;
    BALLAST_ASSIGN_OR_RETURN(some, store->Range(begin, "\xff", kPairsPerRead));
    if (some.empty()) {
      return ParseRunState(all);
    }
    begin = some.back().first + '\0';
    all.insert(all.end(), some.begin(), some.end());
  }
}

absl::StatusOr<OpenedRun> OpenRun(const JobFile& file,
                                  const CoordinatorFlags& flags,
                                  absl::Time now) {
  const Job& job = file.job;
  OpenedRun run;
  BALLAST_RETURN_IF_ERROR(MakeDirectories(job.run.dir));
  BALLAST_ASSIGN_OR_RETURN(run.store, OpenEmbeddedStateStore(absl::StrCat(
                                          job.run.dir, "/coordinator")));
  BALLAST_ASSIGN_OR_RETURN(const RunState state, ReadRunState(run.store.get()));
  if (!state.identity.has_value() &&
      HoldsCheckpoints(absl::StrCat(job.run.dir, "/checkpoints"))) {
    return absl::FailedPreconditionError(absl::StrCat(
        job.run.dir, "/checkpoints holds checkpoints, but ", job.run.dir,
        "/coordinator knows of no run; restore that folder, or choose another "
        "run.dir"));
  }
  std::optional<CheckpointManifest> checkpoint;
  const std::optional<StepKey> newest = state.newest_checkpoint();
  if (flags.resume && newest.has_value()) {
    BALLAST_ASSIGN_OR_RETURN(checkpoint,
                             ReadManifest(state.checkpoints.at(*newest)));
    LogEvent(
        Severity::kInfo, "resuming",
        {{"step", newest->step}, {"manifest", state.checkpoints.at(*newest)}});
  }
  CoreOptions options;
  options.job = job;
  options.config = EffectiveYaml(file);
  options.numerics = NumericsFields(job);
  options.new_run_id = NewRunId();
  options.resume = flags.resume;
  options.keep_up = flags.keep_up;
  options.stop_after = flags.stop_after;
  const std::string config = options.config;
  BALLAST_ASSIGN_OR_RETURN(run.core,
                           CoordinatorCore::Create(std::move(options), state,
                                                   std::move(checkpoint), now));
  BALLAST_ASSIGN_OR_RETURN(run.folder, RunFolder::Open(job.run.dir));
  BALLAST_RETURN_IF_ERROR(run.folder->Reconcile(state, run.core->committed()));
  BALLAST_RETURN_IF_ERROR(run.folder->WriteConfig(config));
  return run;
}

}  // namespace ballast
