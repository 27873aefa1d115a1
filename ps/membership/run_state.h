// SPDX-License-Identifier: Apache-2.0
// What the coordinator remembers of a run, as keys and values of the state
// store: who the run is, the branches of its history, the step log, the
// checkpoints that exist, evaluations and the record that says it ended.
//
// Numbers in keys are 20 decimal digits, so that the store's order is theirs.
//   run                              identity, timeline, term, numerics
//   branch/<timeline>                where the timeline left its parent
//   step/<timeline>/<step>           one decision: the step log
//   checkpoint/<timeline>/<step>     a checkpoint exists; path of its manifest
//   evaluation/<timeline>/<step>     validation loss of a version
//   end/<timeline>                   every promise of the run is kept
//   layout                           the model, as its workers declared it
//   placement                        servers by name and who owns which chunk
//   wanted                           names that should be in
//   durability                       server.durability of the steps so far
//   member/<incarnation>             a life that was admitted and is not gone
//   fault/<number>                   what went wrong and what it cost
// The key `leader` is the coordinators' own affair and is left out.
//
// Pure. Plain data.

#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/ballast.pb.h"
#include "storage/state_store.h"

namespace ballast {

// A point of the run's history.
struct StepKey {
  uint64_t timeline = 0;
  uint64_t step = 0;
  friend bool operator==(const StepKey&, const StepKey&) = default;
  friend auto operator<=>(const StepKey&, const StepKey&) = default;
};

// (key, value) of the configuration, as common/job_file.h lists them.
using ConfigFields = std::vector<std::pair<std::string, std::string>>;

struct RunIdentity {
  std::string run_id;  // 32 hex digits.
  std::string name;
  uint64_t timeline = 0;  // The current one; the first is 1.
  // Counts the coordinator's own lives. Directive numbers and incarnations
  // start at term << 32, so none is ever used twice.
  uint64_t term = 0;
  ConfigFields numerics;  // What every later part of the run must agree on.
  friend bool operator==(const RunIdentity&, const RunIdentity&) = default;
};

// The timeline continues what `parent` was at step `parent.step`. The first
// timeline has the parent (0, 0).
struct Branch {
  StepKey parent;
};

struct EndRecord {
  uint64_t step = 0;
  std::string state_hash;
};

// A name that should be in. One that drains is on its way out: a server keeps
// its place until its chunks have moved.
struct WantedMember {
  std::string name;
  v1::Role role = v1::ROLE_UNSPECIFIED;
  bool draining = false;
  friend bool operator==(const WantedMember&, const WantedMember&) = default;
};

struct RunState {
  std::optional<RunIdentity> identity;
  std::map<uint64_t, Branch> branches;
  std::map<StepKey, v1::Decision> decisions;
  std::map<StepKey, std::string> checkpoints;  // Path of the manifest.
  std::map<StepKey, double> evaluations;
  std::map<uint64_t, EndRecord> ends;
  std::string layout;  // ModelLayout::Encode; empty before the first worker.
  // Without the layout; nullopt before the group has formed.
  std::optional<v1::Placement> placement;
  std::vector<WantedMember> wanted;
  std::string durability;                       // As the job file says it.
  std::map<uint64_t, v1::JoinRequest> members;  // Without layouts.
  std::map<uint64_t, v1::Fault> faults;

  // The newest checkpoint of the current history: the one a resume takes.
  std::optional<StepKey> newest_checkpoint() const;
  // The decisions that led to the newest committed step, ascending by step;
  // abandoned branches are left out, pruned steps are missing.
  std::vector<v1::Decision> History() const;
};

// Everything in the store, as Range over all keys gives it.
// Errors: DATA_LOSS  a key or value is none of ours; names the key.
absl::StatusOr<RunState> ParseRunState(
    const std::vector<std::pair<std::string, std::string>>& pairs);

StateChange PutIdentity(const RunIdentity& identity);
StateChange PutBranch(uint64_t timeline, const Branch& branch);
StateChange PutDecision(const v1::Decision& decision);
StateChange DeleteDecision(const StepKey& key);
StateChange PutCheckpoint(const StepKey& key, const std::string& path);
StateChange DeleteCheckpoint(const StepKey& key);
StateChange PutEvaluation(const StepKey& key, double loss);
StateChange PutEnd(uint64_t timeline, const EndRecord& end);
StateChange PutLayout(const std::string& encoded);
StateChange PutPlacement(const v1::Placement& placement);
StateChange DeletePlacement();
StateChange PutWanted(const std::vector<WantedMember>& wanted);
StateChange PutDurability(const std::string& durability);
StateChange PutMember(uint64_t incarnation, const v1::JoinRequest& join);
StateChange DeleteMember(uint64_t incarnation);
StateChange PutFault(uint64_t number, const v1::Fault& fault);
StateChange DeleteFault(uint64_t number);

}  // namespace ballast
