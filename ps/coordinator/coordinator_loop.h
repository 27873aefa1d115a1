// SPDX-License-Identifier: Apache-2.0
// Runs the core: one thread owns it, so nothing in it needs a lock. Calls are
// queued as events; after a batch of events the thread makes the core's changes
// durable, writes the run folder, and only then answers, calls and long polls
// alike. So nobody is ever told what a crash could take back.

#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/job.h"
#include "common/mutex.h"
#include "proto/ballast.pb.h"
#include "ps/coordinator/run_folder.h"
#include "ps/coordinator/run_summary.h"
#include "ps/membership/coordinator_core.h"
#include "storage/state_store.h"

namespace ballast {

// Thread-safe. Answers run on the loop's thread (or the caller's, when the loop
// has ended) and must not block.
class CoordinatorLoop {
 public:
  template <typename Reply>
  using Answer = std::function<void(absl::StatusOr<Reply>)>;
  using Clock = std::function<absl::Time()>;

  // `store` and `folder` are not owned and outlive the loop. `clock` is
  // monotonic.
  CoordinatorLoop(const Job& job, std::unique_ptr<CoordinatorCore> core,
                  StateStore* store, RunFolder* folder, Clock clock);
  // Ends the loop at once, as a crash would; WaitEnded first for a clean end.
  ~CoordinatorLoop();

  void Start();

  // The calls of proto/ballast.proto. Besides their errors: UNAVAILABLE  the
  // run has ended, or too many calls are queued.
  void Join(const v1::JoinRequest& request, Answer<v1::JoinReply> answer);
  void Poll(const v1::PollRequest& request, Answer<v1::PollReply> answer);
  void Report(const v1::ReportRequest& request, Answer<v1::ReportReply> answer);
  void GetPlacement(Answer<v1::Placement> answer);
  void GetStatus(Answer<v1::StatusReply> answer);
  void Stop(const v1::StopRequest& request, Answer<v1::StopReply> answer);

  // Blocks until the run has ended and every member had its time to leave, or
  // until `timeout` has passed; returns whether it has ended.
  bool WaitEnded(absl::Duration timeout);
  // How the run ended. Only after WaitEnded returned true.
  absl::Status outcome();

 private:
  using Event = std::function<void(absl::Time now)>;
  struct PendingPoll {
    uint64_t incarnation = 0;
    uint64_t seen_number = 0;
    absl::Time deadline;
    Answer<v1::PollReply> answer;
  };

  // Queues `work`; its result is answered after the changes it caused are
  // durable.
  template <typename Reply>
  void Submit(std::function<absl::StatusOr<Reply>(absl::Time)> work,
              Answer<Reply> answer);
  bool Post(Event event);

  void Run();
  // Waits for events until a tick is due.
  std::vector<Event> TakeEvents(absl::Time tick_at);
  void CarryOut(absl::Time now);
  absl::Status CarryOutOnce(const CoreActions& actions, absl::Time now);
  void AnswerPolls(absl::Time now, bool closing);
  void LogProgress();
  bool Abandoned();
  void Close();

  const Job job_;
  StateStore* const store_;
  RunFolder* const folder_;
  const Clock clock_;

  // Only the loop's thread touches these.
  std::unique_ptr<CoordinatorCore> core_;
  RunSummary summary_;
  std::vector<std::function<void()>> answers_;
  std::list<PendingPoll> polls_;
  Phase logged_phase_ = Phase::kForming;
  bool broken_ = false;  // The store or the folder failed: write no more.

  std::thread thread_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<Event> events_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status outcome_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast
