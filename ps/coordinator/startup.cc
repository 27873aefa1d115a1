// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/startup.h"

#include <filesystem>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "storage/checkpoint.h"
#include "storage/etcd_store.h"

namespace ballast {
namespace {

constexpr uint64_t kPairsPerRead = 4096;

std::string NewRunId() {
  std::random_device device;
  return absl::StrFormat("%08x%08x%08x%08x", device(), device(), device(),
                         device());
}

// Every promise of the run is kept and nobody is left to be told so.
bool HasEnded(const RunState& state) {
  return state.identity.has_value() && state.members.empty() &&
         state.ends.contains(state.identity->timeline);
}

// Whether every record of the checkpoint can be read here. The folders of
// servers on other machines cannot be, and those servers will tell.
absl::Status CheckRecords(const CheckpointManifest& manifest) {
  for (const std::string& directory : manifest.directories) {
    std::error_code error;
    if (!std::filesystem::exists(directory, error)) {
      return absl::OkStatus();
    }
  }
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                           CheckpointReader::Open(manifest));
  return reader->Verify().status();
}

// The newest checkpoint of the history that is whole; nullopt when there is
// none at all. Newer, damaged ones are forgotten: in the store, in `state` and
// in the folder.
// Errors: DATA_LOSS  all of them are damaged; says how the newest is.
absl::StatusOr<std::optional<CheckpointManifest>> TakeCheckpoint(
    const Job& job, Leadership* leadership, RunFolder* folder,
    RunState* state) {
  std::optional<CheckpointManifest> taken;
  absl::Status newest_error;
  std::vector<StepKey> damaged;
  for (auto place = state->checkpoints.rbegin();
       place != state->checkpoints.rend() && !taken.has_value(); ++place) {
    absl::StatusOr<CheckpointManifest> manifest = ReadManifest(place->second);
    absl::Status status = manifest.status();
    // The only one is left to the servers, which read it anyhow; so is one
    // that their logs go beyond.
    if (status.ok() && state->checkpoints.size() > 1 &&
        job.server.durability == Durability::kCheckpoint) {
      LogEvent(Severity::kInfo, "verifying", {{"manifest", place->second}});
      status = CheckRecords(*manifest);
    }
    if (status.ok()) {
      taken = *std::move(manifest);
      LogEvent(Severity::kInfo, "resuming",
               {{"step", place->first.step}, {"manifest", place->second}});
      continue;
    }
    LogEvent(Severity::kError, "checkpoint_damaged",
             {{"step", place->first.step},
              {"reason", std::string(status.message())}});
    newest_error.Update(status);
    damaged.push_back(place->first);
  }
  if (!taken.has_value()) {
    return newest_error.ok()
               ? absl::StatusOr<std::optional<CheckpointManifest>>(std::nullopt)
               : newest_error;
  }
  for (const StepKey& key : damaged) {
    BALLAST_RETURN_IF_ERROR(leadership->Apply({DeleteCheckpoint(key)}));
    BALLAST_ASSIGN_OR_RETURN(const std::string aside,
                             folder->PutAside(state->checkpoints.at(key)));
    state->checkpoints.erase(key);
    LogEvent(Severity::kWarn, "checkpoint_put_aside",
             {{"step", key.step}, {"path", aside}});
  }
  return taken;
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

absl::StatusOr<std::unique_ptr<SharedStateStore>> OpenStore(
    const Job& job, const std::string& url) {
  if (url.empty()) {
    BALLAST_RETURN_IF_ERROR(MakeDirectories(job.run.dir));
    return OpenEmbeddedStateStore(absl::StrCat(job.run.dir, "/coordinator"));
  }
  EtcdOptions options;
  BALLAST_ASSIGN_OR_RETURN(options.endpoints, ParseEtcdUrl(url));
  options.prefix = absl::StrCat("ballast/", job.run.name, "/");
  return OpenEtcdStateStore(std::move(options));
}

absl::StatusOr<OpenedRun> OpenRun(const JobFile& file,
                                  const CoordinatorFlags& flags,
                                  Leadership* leadership, absl::Time now) {
  const Job& job = file.job;
  OpenedRun run;
  BALLAST_ASSIGN_OR_RETURN(RunState state, ReadRunState(leadership->store()));
  if (!state.identity.has_value() &&
      HoldsCheckpoints(absl::StrCat(job.run.dir, "/checkpoints"))) {
    return absl::FailedPreconditionError(absl::StrCat(
        job.run.dir,
        "/checkpoints holds checkpoints, but the coordinator's state knows of "
        "no run; it belongs into ",
        job.run.dir,
        "/coordinator or where --state-store says: restore it, or choose "
        "another run.dir"));
  }
  BALLAST_ASSIGN_OR_RETURN(run.folder, RunFolder::Open(job.run.dir));
  if (flags.continue_run && HasEnded(state)) {
    run.ended =
        absl::StrCat("the run '", state.identity->name, "' has ended at step ",
                     state.ends.at(state.identity->timeline).step,
                     "; pass --resume to train on");
    return run;
  }
  std::optional<CheckpointManifest> checkpoint;
  if (flags.resume) {
    BALLAST_ASSIGN_OR_RETURN(
        checkpoint, TakeCheckpoint(job, leadership, run.folder.get(), &state));
  }
  CoreOptions options;
  options.job = job;
  options.config = EffectiveYaml(file);
  options.numerics = NumericsFields(job);
  options.new_run_id = NewRunId();
  options.resume = flags.resume;
  options.continue_run = flags.continue_run;
  options.keep_up = flags.keep_up;
  options.stop_after = flags.stop_after;
  const std::string config = options.config;
  BALLAST_ASSIGN_OR_RETURN(run.core,
                           CoordinatorCore::Create(std::move(options), state,
                                                   std::move(checkpoint), now));
  BALLAST_RETURN_IF_ERROR(run.folder->Reconcile(state, run.core->committed()));
  BALLAST_RETURN_IF_ERROR(run.folder->WriteConfig(config));
  if (flags.continue_run) {
    BALLAST_ASSIGN_OR_RETURN(run.earlier, run.folder->ReadMeasured());
  }
  return run;
}

}  // namespace ballast
