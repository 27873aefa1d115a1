// SPDX-License-Identifier: Apache-2.0
// What a run leaves for people and scripts: metrics.jsonl, evaluations.jsonl,
// summary.json, checkpoints/ and the coordinator's address.
//
// The step log is the truth. metrics.jsonl is derived from it: when a
// coordinator starts, lines of abandoned steps are taken out and lines that a
// crash swallowed are filled in, and a step that has its line gets no other, so
// it has one line a committed step, always.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/membership/coordinator_core.h"
#include "ps/membership/run_state.h"
#include "ps/membership/step_metrics.h"
#include "storage/file.h"

namespace ballast {

// One line of metrics.jsonl, without the newline. What was not measured, or is
// not a number, is null.
std::string MetricsJson(const StepMetrics& metrics);
// One line of evaluations.jsonl, without the newline.
std::string EvaluationJson(const EvaluationRecord& evaluation);

// Whether a checkpoints folder holds the folder of any checkpoint, damaged or
// not. False when it does not exist.
bool HoldsCheckpoints(const std::string& checkpoints_dir);

// Thread-compatible. Calls block on the disk. Errors: those of the file system;
// the message names the path.
class RunFolder {
 public:
  // Creates what is missing; dir() is absolute.
  static absl::StatusOr<std::unique_ptr<RunFolder>> Open(
      const std::string& dir);

  const std::string& dir() const { return dir_; }
  std::string checkpoints_dir() const { return dir_ + "/checkpoints"; }
  // Where WriteManifest puts the manifest of a step.
  std::string ManifestPath(uint64_t step) const;

  // Makes metrics and evaluations say exactly what led to version `step` of
  // `state`, and removes manifests that the state does not list. Call before
  // the first Append. A coordinator that wrote here before and still runs
  // writes to files that have no name any more.
  absl::Status Reconcile(const RunState& state, uint64_t step);
  // The history went back to `step`: takes out the lines after it.
  absl::Status RollBack(uint64_t step);

  // What the lines of steps that were measured say of tokens, seconds and the
  // log; for a summary of the whole run.
  absl::StatusOr<std::vector<StepMetrics>> ReadMeasured() const;

  // Appends lines of steps that have none yet. On an error nothing has been
  // appended.
  absl::Status AppendMetrics(const std::vector<StepMetrics>& lines);
  absl::Status AppendEvaluations(const std::vector<EvaluationRecord>& lines);
  // Makes appended metrics durable: before their step-log records are dropped.
  absl::Status Sync();
  // Removes a checkpoint's manifest and its folder.
  absl::Status RemoveManifest(const std::string& path);
  // Puts a damaged checkpoint's folder aside, for people; returns its new path.
  // A folder that is gone is fine.
  absl::StatusOr<std::string> PutAside(const std::string& manifest_path);
  absl::Status WriteSummary(const std::string& json);
  absl::Status WriteConfig(const std::string& yaml);
  absl::Status WriteAddress(const std::string& address);
  void RemoveAddress();

 private:
  explicit RunFolder(std::string dir) : dir_(std::move(dir)) {}
  // Lines by step, appended to as the run goes on.
  struct History {
    StorageFile file;
    uint64_t bytes = 0;  // Up to the end of the last whole line.
    uint64_t last = 0;   // Step of the last line.
  };
  absl::Status Rewrite(const std::map<uint64_t, std::string>& lines,
                       History* history);
  static absl::Status Append(const std::string& text, uint64_t last,
                             History* history);

  const std::string dir_;
  History metrics_;
  History evaluations_;
};

}  // namespace ballast
