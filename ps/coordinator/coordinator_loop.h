// SPDX-License-Identifier: Apache-2.0
// Runs the core: one thread owns it, so nothing in it needs a lock. Calls are
// queued as events; after a batch of events the thread makes the core's changes
// durable, writes the run folder, and only then answers, calls and long polls
// alike. So nobody is ever told what a crash could take back.
//
// While the store does not answer or a disk is full, the loop waits, named in
// the log, for at most cluster.give_up_after. When another coordinator has come
// to lead, it ends as a crash would: it answers nobody and tells no member to
// exit.

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
#include "ps/coordinator/leadership.h"
#include "ps/coordinator/prober.h"
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

  // `leadership` and `folder` are not owned and outlive the loop. `clock` is
  // monotonic.
  CoordinatorLoop(const Job& job, std::unique_ptr<CoordinatorCore> core,
                  Leadership* leadership, RunFolder* folder, Clock clock);
  // Ends the loop at once, as a crash would; WaitEnded first for a clean end.
  ~CoordinatorLoop();

  // Steps that an earlier life of the coordinator has written, for the
  // summary. Before Start.
  void Restore(const std::vector<StepMetrics>& earlier);
  void Start();

  // The calls of proto/ballast.proto. Besides their errors: UNAVAILABLE  the
  // run has ended, or too many calls are queued.
  void Join(const v1::JoinRequest& request, Answer<v1::JoinReply> answer);
  void Poll(const v1::PollRequest& request, Answer<v1::PollReply> answer);
  void Report(const v1::ReportRequest& request, Answer<v1::ReportReply> answer);
  void GetPlacement(Answer<v1::Placement> answer);
  void GetStatus(Answer<v1::StatusReply> answer);
  void Stop(const v1::StopRequest& request, Answer<v1::StopReply> answer);
  void ReportExit(const v1::ExitReport& report, Answer<v1::ExitReply> answer);
  void Scale(const v1::ScaleRequest& request, Answer<v1::ScaleReply> answer);
  // The connection of a member broke while its poll was held.
  void ConnectionLost(uint64_t incarnation);

  // Blocks until the run has ended and every member had its time to leave, or
  // until `timeout` has passed; returns whether it has ended.
  bool WaitEnded(absl::Duration timeout);
  // How the run ended. Only after WaitEnded returned true.
  // Errors: ABORTED      another coordinator leads and goes on with it.
  //         UNAVAILABLE  the store did not answer for cluster.give_up_after.
  //         Others say why the run failed.
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
  absl::Status WriteFiles(const CoreActions& actions, absl::Time now);
  // Calls `work` until it ends otherwise than for want of a store or of space.
  absl::Status Patiently(const std::function<absl::Status()>& work);
  // A leader that is not sure of it asks, now and then.
  void CheckLeadership(absl::Time now);
  void AnswerAll(absl::Time now, bool closing);
  void WriteSummary(absl::Time now);
  void LogProgress();
  bool Abandoned();
  void Close();

  const Job job_;
  Leadership* const leadership_;
  RunFolder* const folder_;
  const Clock clock_;

  // Only the loop's thread touches these.
  std::unique_ptr<CoordinatorCore> core_;
  RunSummary summary_;
  // Each takes OK, or the refusal to give instead.
  std::vector<std::function<void(const absl::Status&)>> answers_;
  std::list<PendingPoll> polls_;
  Phase logged_phase_ = Phase::kForming;
  absl::Time suspect_until_ = absl::InfinitePast();
  absl::Time check_at_ = absl::InfinitePast();  // That it still leads.
  absl::Status broken_;  // What could not be written: write no more.
  // For what was asked in the batch that could not be written; later answers
  // promise nothing, since the run is over.
  absl::Status refusal_;
  absl::Status lost_;  // Why it leads no more.

  std::unique_ptr<Prober> prober_;
  std::thread thread_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<Event> events_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status outcome_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast
