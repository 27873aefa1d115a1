// SPDX-License-Identifier: Apache-2.0
// A worker: does what the coordinator's newest directive says until it says
// exit. Holds nothing that lasts; whatever goes wrong on the way to a server,
// the same spans can be computed again. What to do about what it hears is
// decided by WorkerCore; this is the thread around it.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/job.h"
#include "common/mutex.h"
#include "proto/ballast.pb.h"
#include "rpc/member.h"
#include "worker/pass_runner.h"
#include "worker/worker_core.h"

namespace ballast {

// One thread calls Create and Run.
class Worker {
 public:
  // Plans the step, takes all memory and opens the data; joins nobody.
  // `coordinator` is host:port, or several with commas between.
  // Errors: INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED,
  //         RESOURCE_EXHAUSTED  the job cannot run here; the message says which
  //                             key to change.
  //         FAILED_PRECONDITION the processor lacks what the job needs.
  static absl::StatusOr<std::unique_ptr<Worker>> Create(
      const Job& job, const std::string& coordinator, const std::string& name);
  ~Worker();

  // Joins and works. OK after a directive to exit, or after Term.
  // Errors: FAILED_PRECONDITION  refused.
  //         UNAVAILABLE          the coordinator, or a server, was away for
  //                              cluster.give_up_after.
  //         Others               the run cannot go on; the coordinator knows.
  absl::Status Run();

  // Any thread. The first time: finishes the assignment and leaves; the second
  // time leaves at once. False: it is no member (yet, or just now), so nobody
  // needs it and the process may end.
  bool Term();

 private:
  // On Run's thread.
  using Event = std::function<void(absl::Time now)>;

  Worker(const Job& job, std::string coordinator, std::string name);
  // Any thread.
  void Post(Event event);
  v1::MemberStats Stats() const;

  v1::JoinRequest MakeJoin() const;
  absl::Status Join();
  // The next event; an empty one when the core wants to be called.
  Event NextEvent();
  // What the core asks for; a status ends Run.
  std::optional<absl::Status> CarryOut(WorkerCore::Actions actions);
  void AskPlacement();
  void NoteProgress(absl::Time now);
  void ShowWait();

  const Job job_;
  const std::string coordinator_;
  const std::string name_;
  WorkerCore core_;  // Of Run's thread, like all without a guard.
  std::unique_ptr<PassRunner> runner_;
  std::unique_ptr<MemberSession> session_;
  uint64_t lives_ = 0;  // Sessions so far; an old one's events are dropped.
  uint64_t pass_ = 0;   // The newest, and how far it was seen to be.
  uint64_t progress_ = 0;
  // shared: passes use it on their thread.
  std::shared_ptr<const PlacementMap> placement_;
  std::atomic<bool> is_member_ = false;

  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);
  // For status: what the core waits for between passes.
  uint64_t step_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string waits_for_ ABSL_GUARDED_BY(mutex_);
  absl::Time waits_since_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast
