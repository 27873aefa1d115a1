// SPDX-License-Identifier: Apache-2.0
// A worker: does what the coordinator's newest directive says until it says
// exit. Holds nothing that lasts; whatever goes wrong on the way to a server,
// the same spans can be computed again.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/job.h"
#include "common/mutex.h"
#include "proto/ballast.pb.h"
#include "rpc/member.h"
#include "worker/client/shard_client.h"
#include "worker/data/loader.h"
#include "worker/model/family.h"
#include "worker/step/executor.h"
#include "worker/step/planner.h"

namespace ballast {

// One thread calls Create and Run.
class Worker {
 public:
  // Plans the step, takes all memory and opens the data; joins nobody.
  // Errors: INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED,
  //         RESOURCE_EXHAUSTED  the job cannot run here; the message says which
  //                             key to change.
  //         FAILED_PRECONDITION the processor lacks what the job needs.
  static absl::StatusOr<std::unique_ptr<Worker>> Create(
      const Job& job, const std::string& coordinator, const std::string& name);
  ~Worker();

  // Joins and works. OK after a directive to exit.
  // Errors: FAILED_PRECONDITION  refused.
  //         UNAVAILABLE          the coordinator was silent for
  //                              cluster.progress_timeout.
  //         Others               the run cannot go on; the coordinator knows.
  absl::Status Run();

 private:
  class Observer;

  explicit Worker(const Job& job, std::string coordinator, std::string name);
  absl::Status Prepare();
  v1::JoinRequest MakeJoin() const;
  v1::MemberStats Stats() const;
  // One life; ABORTED: a new one may begin.
  absl::Status RunLife();
  // From the session's threads.
  void TakeDirective(const v1::PollReply& reply);
  void TakeEnd(const absl::Status& status);

  // Blocks for a directive newer than `seen`. Errors: the session's end.
  absl::StatusOr<v1::PollReply> NextDirective(uint64_t seen);
  // Does it, again and again while only servers are to blame.
  absl::Status Work(const v1::PollReply& reply);
  absl::Status Attempt(const v1::WorkerDirective& directive);
  absl::Status EnsurePlacement(uint64_t version);
  absl::Status Train(const v1::WorkerDirective& directive);
  absl::Status Evaluate(const v1::WorkerDirective& directive);
  absl::StatusOr<std::vector<MicroBatch>> TakeBatches(
      const std::vector<Span>& spans, uint64_t step, bool eval);
  // Whether the pass in progress was called off.
  bool CalledOff() const;
  // Whether the newest directive is about something else than the current.
  bool Outdated() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReportFatal(const absl::Status& status);

  const Job job_;
  const std::string coordinator_;
  const std::string name_;
  uint64_t base_bytes_ = 0;  // Resident before the first budgeted byte.

  std::unique_ptr<ModelFamily> family_;
  StepPlan plan_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> host_;
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<StepExecutor> executor_;
  std::unique_ptr<ShardClient> client_;
  std::unique_ptr<Observer> observer_;
  std::unique_ptr<MemberSession> session_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::optional<v1::PollReply> newest_ ABSL_GUARDED_BY(mutex_);
  // What is being worked on; WORKER_WAIT when nothing is.
  v1::WorkerDirective current_ ABSL_GUARDED_BY(mutex_);
  bool called_off_ ABSL_GUARDED_BY(mutex_) = false;
  bool all_pushed_ ABSL_GUARDED_BY(mutex_) = false;  // Of the current step.
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast
