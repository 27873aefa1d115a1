// SPDX-License-Identifier: Apache-2.0
// A cluster around one CoordinatorCore without a clock, thread or socket:
// members that do what they are told, a store that is a map, and a time that
// the test turns by hand.

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/layout.h"
#include "proto/ballast.pb.h"
#include "ps/membership/coordinator_core.h"

namespace ballast::testing {

// A tied table of 256 x 128, then `blocks` units of one matrix of 512 x 512
// (four blocks of 64 Ki elements) and one vector of 512, then the head.
ModelLayout SmallLayout(uint32_t blocks = 2);

// 2 servers, 2 workers, 8 micro-batches of 2 sequences of 16 tokens, 6 steps,
// checkpoints and evaluations every 2.
Job SmallJob();

ConfigFields SmallNumerics();

// Public members: a test may look at and change anything.
class CoreHarness {
 public:
  CoreHarness();

  // Makes a core from `pairs` as a fresh process would. With continue_run the
  // members of before are still there.
  absl::Status Start();
  // Start, both servers and both workers join, both servers load.
  void Train();

  v1::JoinRequest JoinOf(v1::Role role, int index) const;
  absl::StatusOr<v1::JoinReply> TryJoin(const v1::JoinRequest& request);
  void Join(v1::Role role, int index);
  void JoinAll();
  void LoadAll();
  // A new life of a member that is gone. Of a server: all of its chunks at
  // `version`, redoable through `redoable`, on the current timeline.
  v1::JoinRequest NextLifeOf(v1::Role role, int index);
  v1::JoinRequest NextLifeOf(int server, uint64_t version, uint64_t redoable);
  absl::StatusOr<uint64_t> Return(const v1::JoinRequest& request);
  // A supervisor's report of its death by SIGKILL.
  void Kill(v1::Role role, int index);

  // Incarnations of the members that joined, by index.
  std::vector<uint64_t> servers;
  std::vector<uint64_t> workers;

  // A report of `incarnation` on the current timeline.
  v1::ReportRequest Of(uint64_t incarnation) const;
  absl::Status Send(const v1::ReportRequest& request);
  absl::Status Load(uint64_t server, uint64_t step);
  // Sum of squares `squares`; the first server carries the loss.
  absl::Status Vote(int server, uint64_t step, double squares = 4.0,
                    double loss_sum = 512.0);
  absl::Status VoteNonFinite(int server, uint64_t step, uint32_t tensor,
                             uint64_t count);
  absl::Status Confirm(int server, uint64_t step);
  absl::Status Done(int worker, uint64_t step);
  absl::Status Evaluate(int worker, uint64_t step, double loss_sum = 64.0);
  absl::Status Save(int server, uint64_t step);
  absl::Status Digest(int server, uint64_t step);
  absl::Status Leave(uint64_t incarnation);

  // All that a step needs: workers done, servers vote and confirm. Saves the
  // checkpoint and evaluates when the step wants it.
  void Step(uint64_t step);
  // Evaluates version `step` on all workers.
  void EvaluateAll(uint64_t step);
  // From the first step to the end record, members still up.
  void RunToDone();

  v1::WorkerDirective WorkerOf(int index) const;
  v1::ServerDirective ServerOf(int index) const;
  uint64_t NumberOf(uint64_t incarnation) const;
  // Time goes on tick by tick; everyone is heard, so no lease runs out.
  void Advance(absl::Duration by);
  // As Advance, but this life is silent.
  void AdvanceWithout(uint64_t silent, absl::Duration by);
  // Stats of one member, as a heartbeat.
  void Stats(uint64_t incarnation, const v1::MemberStats& stats);
  v1::Fault LastFault() const;

  // Carries out what the core asks for.
  void Carry();

  Job job = SmallJob();
  CoreOptions options;
  ModelLayout layout = SmallLayout();
  absl::Time now = absl::UnixEpoch();
  std::map<std::string, std::string> pairs;
  std::map<std::string, CheckpointManifest> manifests;  // By path.
  std::vector<StepMetrics> metrics;
  std::vector<EvaluationRecord> evaluations;
  std::vector<std::string> removed;
  std::vector<Probe> probes;
  std::optional<uint64_t> rollback_to;  // The last one.
  uint64_t lives = 5000;                // Of lives that return.
  bool hold_manifests = false;          // Keeps manifests unwritten.
  std::vector<CheckpointManifest> held;
  std::unique_ptr<CoordinatorCore> core;
};

std::string ManifestPath(const StepKey& key);

}  // namespace ballast::testing
