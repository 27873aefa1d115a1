// SPDX-License-Identifier: Apache-2.0
// What a run leaves for people and scripts: metrics.jsonl, evaluations.jsonl,
// summary.json, checkpoints/ and the coordinator's address.
//
// The step log is the truth. metrics.jsonl is derived from it: when a run is
// resumed, lines of abandoned steps are taken out and lines that a crash
// swallowed are filled in, so it has one line a committed step, always.

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
  // the first Append.
  absl::Status Reconcile(const RunState& state, uint64_t step);

  absl::Status AppendMetrics(const std::vector<StepMetrics>& lines);
  absl::Status AppendEvaluations(const std::vector<EvaluationRecord>& lines);
  // Makes appended metrics durable: before their step-log records are dropped.
  absl::Status Sync();
  // Removes a checkpoint's manifest and its folder.
  absl::Status RemoveManifest(const std::string& path);
  absl::Status WriteSummary(const std::string& json);
  absl::Status WriteConfig(const std::string& yaml);
  absl::Status WriteAddress(const std::string& address);
  void RemoveAddress();

 private:
  explicit RunFolder(std::string dir) : dir_(std::move(dir)) {}
  absl::Status OpenForAppend();

  const std::string dir_;
  StorageFile metrics_;
  StorageFile evaluations_;
};

}  // namespace ballast
