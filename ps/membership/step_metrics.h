// SPDX-License-Identifier: Apache-2.0
// What a step cost, gathered from reports that come around its decision. A line
// is released when nothing more will come (a member reports in order, so a
// later step's report ends the wait for this one's), or when waiting longer
// would hold it up; the step log, not this, is what guarantees that no line is
// lost.
//
// Pure: time is an argument. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/ballast.pb.h"

namespace ballast {

struct StepMetrics {
  v1::Decision decision;
  // False for a line that was filled in from the step log: only the decision
  // (and the hash) is known.
  bool measured = true;
  // Whether every worker's report is in the figures.
  bool whole = false;
  std::string state_hash;  // Empty unless run.state_hash is every.
  double step_seconds = 0.0;
  // Of the slowest worker or server.
  double forward_seconds = 0.0;
  double backward_seconds = 0.0;
  double fetch_wait_seconds = 0.0;
  double push_wait_seconds = 0.0;
  double update_seconds = 0.0;
  double log_seconds = 0.0;  // From the last gradient to the synced vote.
  // Of all workers or servers together.
  uint64_t pushed_bytes = 0;
  uint64_t fetched_bytes = 0;
  uint64_t worker_faults = 0;
  uint64_t server_faults = 0;
  uint64_t log_bytes = 0;  // Written to gradient logs.
};

class MetricsCollector {
 public:
  // Longest wait of a line after its decision, unless its hash is missing.
  static constexpr absl::Duration kPatience = absl::Seconds(5);

  void WorkerDone(uint64_t worker, const v1::WorkerDone& done);
  // `faults` is the server's count since it started.
  void Confirmed(uint64_t server, const v1::Confirm& confirm, uint64_t faults);
  void Hashed(uint64_t step, const std::string& hash);
  // The step is committed; its line waits for these members, and for a hash.
  void Decided(const v1::Decision& decision, absl::Duration step_time,
               const std::set<uint64_t>& workers,
               const std::set<uint64_t>& servers, bool wants_hash,
               absl::Time now);

  // A member is gone: no line waits for it any more.
  void Forget(uint64_t member);
  // The history goes back: the next line is that of `next_step`, and what was
  // gathered of steps from there on is forgotten.
  void Restart(uint64_t next_step);

  // Lines whose time has come, ascending by step without gaps.
  std::vector<StepMetrics> TakeReady(absl::Time now);
  // All lines of committed steps, whatever is missing.
  std::vector<StepMetrics> TakeAll();
  // Committed steps below this have their line.
  uint64_t next_step() const { return next_step_; }

 private:
  struct Pending {
    StepMetrics line;
    bool decided = false;
    absl::Time decided_at;
    std::set<uint64_t> done;       // Workers heard.
    std::set<uint64_t> confirmed;  // Servers heard.
    std::set<uint64_t> workers;    // Wanted.
    std::set<uint64_t> servers;
    bool wants_hash = false;
  };
  bool Complete(uint64_t step, const Pending& pending) const;
  // Null when the step's line has been taken.
  Pending* At(uint64_t step);

  uint64_t next_step_ = 0;
  std::map<uint64_t, Pending> pending_;  // By step.
  std::map<uint64_t, uint64_t> faults_;  // By server, at its last confirm.
  std::map<uint64_t, uint64_t> heard_;   // Newest step reported, by member.
};

}  // namespace ballast
