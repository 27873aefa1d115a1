// SPDX-License-Identifier: Apache-2.0
// What goes into the coordinator's core when it is made, and what comes out of
// it to be carried out. Plain data.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/job.h"
#include "proto/ballast.pb.h"
#include "ps/membership/run_state.h"
#include "ps/membership/step_metrics.h"
#include "storage/checkpoint.h"
#include "storage/state_store.h"

namespace ballast {

enum class Phase {
  kForming,     // Waits for the wanted servers and worker.count workers.
  kLoading,     // Servers make the first version.
  kTraining,    // Step committed + 1 is computed.
  kEvaluating,  // Version `committed` is evaluated; no step is assigned.
  kFinishing,   // The last confirmations, checkpoint and hash.
  kDone,        // The end record stands.
  kFailed,
};
absl::string_view PhaseName(Phase phase);

struct CoreOptions {
  Job job;
  std::string config;      // The effective job file.
  ConfigFields numerics;   // Of the job.
  std::string new_run_id;  // 32 hex digits, for a run that is not there yet.
  bool resume = false;
  // Go on with the run that the store holds on the same timeline, as a
  // coordinator that takes over for another; begin one when there is none.
  bool continue_run = false;
  bool keep_up = false;                // Stay after the last step until Stop.
  std::optional<uint64_t> stop_after;  // Last step to run; the schedule stays.
};

struct EvaluationRecord {
  StepKey at;
  double loss = 0.0;  // NaN when some micro-batch's loss is.
  double seconds = 0.0;
};

// A server whose connection broke: is anyone there? Connect to `address` once;
// ProbeResult says that it was refused (not alive) or that it was accepted.
struct Probe {
  uint64_t incarnation = 0;
  std::string address;
};

// In the order in which they are carried out.
struct CoreActions {
  std::vector<StateChange> changes;  // One batch, durable.
  // The history branched off at this step: lines of metrics and evaluations
  // after it are to be dropped from the run folder.
  std::optional<uint64_t> rollback_to;
  std::vector<std::string> manifests_to_remove;        // Paths.
  std::vector<CheckpointManifest> manifests_to_write;  // Then ManifestWritten.
  std::vector<StepMetrics> metrics;                    // Ascending by step.
  std::vector<EvaluationRecord> evaluations;
  std::vector<Probe> probes;
  bool empty() const {
    return changes.empty() && !rollback_to.has_value() &&
           manifests_to_remove.empty() && manifests_to_write.empty() &&
           metrics.empty() && evaluations.empty() && probes.empty();
  }
};

// A member's newest directive, as it is told.
struct Issued {
  v1::PollReply reply;
  std::string content;  // The directive's bytes, without the number.
};

// What the run waits for from a member, in words.
struct Debt {
  std::string owes;
  absl::Time since;
};

}  // namespace ballast
