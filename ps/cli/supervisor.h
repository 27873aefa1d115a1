// SPDX-License-Identifier: Apache-2.0
// What `ballast train` decides: whom it starts, again and again, when it gives
// up, how a run's end reaches every process. Processes, signals and calls are
// the shell's (ps/cli/training.h); this is the pure part.
//
//   kRunning --asked to stop--> kStopping --coordinator ended well--> kEnding
//       |                           |                                    |
//       +---- a member cannot be kept up, exit 78, run failed ----> kFailing
//       any of them, out of time or asked to end at once ---------> kKilled
//
// While the run goes on or drains, whoever dies is started again: at once, then
// after 0.1 s, doubled up to 5 s. A committed step forgets earlier deaths.
//
// Pure: time is an argument. Not thread-safe.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/ballast.pb.h"

namespace ballast {

inline constexpr char kCoordinatorName[] = "coordinator";

// How a process ended.
struct ProcessEnd {
  int64_t pid = 0;
  int exit_code = 0;  // -1 when a signal ended it.
  int signal = 0;     // 0 when it exited.
  std::string text;   // "was killed by signal 9 (Killed)".
};

// A death that the coordinator has not been told of yet.
struct ExitNotice {
  std::string name;
  ProcessEnd end;
  absl::Time at;
};

// To be carried out in order.
struct SupervisorAction {
  enum class Kind {
    kStart,    // Start `name`; then Started or StartFailed.
    kSignal,   // Send `signal` to `name`.
    kStopRun,  // Tell the coordinator to stop; StopRefused if it cannot be.
    kSay,      // Print `text`, a line.
  };
  Kind kind = Kind::kSay;
  std::string name;
  // Of a start: the run is there already, go on with it.
  bool again = false;
  int signal = 0;
  bool abort = false;  // Of a stop, as StopRequest has it.
  std::string text;    // Of a stop: why.
};

struct SupervisorOptions {
  uint32_t servers = 1;
  uint32_t workers = 1;
  uint32_t restarts_max = 5;    // cluster.restarts_max.
  absl::Duration stop_timeout;  // From a stop to the kill of what is left.
  bool resume = false;          // The first start raises the timeline.
  bool keep = false;            // The cluster outlives its last step.
};

class Supervisor {
 public:
  enum class Stage { kRunning, kStopping, kFailing, kEnding, kKilled };

  explicit Supervisor(const SupervisorOptions& options) : options_(options) {}

  // --- Events. ---
  void Begin(absl::Time now);
  void Started(const std::string& name, int64_t pid, absl::Time now);
  void StartFailed(const std::string& name, const std::string& why,
                   absl::Time now);
  // The coordinator says that it listens; after each of its starts.
  void Listening(absl::Time now);
  void Ended(const std::string& name, const ProcessEnd& end, absl::Time now);
  void StatusSeen(const v1::StatusReply& status, absl::Time now);
  void Interrupted(absl::Time now);
  void StopRefused(absl::Time now);
  void TimePassed(absl::Time now);
  // The first of unreported() has been told, or cannot be told by its nature.
  void Reported() { unreported_.pop_front(); }

  // --- Answers. ---
  std::vector<SupervisorAction> TakeActions();
  // The coordinator can be called.
  bool listening() const { return listening_; }
  const std::deque<ExitNotice>& unreported() const { return unreported_; }
  // When TimePassed is due at the latest.
  absl::Time next_at() const;
  Stage stage() const { return stage_; }
  // Nothing is alive and nothing will be started.
  bool over() const;
  // Who is alive, by name.
  std::map<std::string, int64_t> Alive() const;

  // Why the run failed, for people; empty: it did not.
  const std::string& failure() const { return failure_; }
  // A role refused its configuration.
  bool bad_configuration() const { return bad_configuration_; }
  bool interrupted() const { return interrupted_; }
  // Who died since the last committed step, in order of death; a coordinator
  // that ended by itself comes last, since it speaks of others. Of a run that
  // was given up: who is to blame alone.
  std::vector<std::string> dead() const;

 private:
  struct Child {
    int64_t pid = 0;  // 0: not alive.
    bool wanted = true;
    bool started = false;  // Ever.
    uint32_t deaths = 0;   // Without a committed step in between.
    absl::Time start_at = absl::InfiniteFuture();  // When not alive.
  };

  // Whether whoever dies is started again.
  bool restarts() const {
    return (stage_ == Stage::kRunning || stage_ == Stage::kStopping) &&
           terminated_ == 0;
  }
  // Whether a member that has left in good order is missed.
  bool Goes() const;
  void Start(const std::string& name, Child* child);
  // After a death: in a while, or never again.
  void StartAgain(const std::string& name, const ProcessEnd& end,
                  absl::Time now);
  void Say(std::string text);
  void Signal(const std::string& name, int signal);
  void SignalAll(int signal);
  void StopRun(const std::string& why, bool abort);
  void Kill();
  void Fail(const std::string& what, bool tell, absl::Time now);
  void CoordinatorEnded(const ProcessEnd& end, absl::Time now);
  void Died(const std::string& name, const ProcessEnd& end, absl::Time now);
  void Reconcile(const v1::StatusReply& status, absl::Time now);
  bool EndedWell(const std::string& name, const ProcessEnd& end) const;
  void DeadlinePassed(absl::Time now);
  std::string Death(const std::string& name, const ProcessEnd& end) const;

  const SupervisorOptions options_;
  Stage stage_ = Stage::kRunning;
  std::map<std::string, Child> children_;
  std::vector<SupervisorAction> actions_;
  std::deque<ExitNotice> unreported_;
  bool listening_ = false;
  bool listened_ = false;  // Ever.
  bool known_ = false;     // The coordinator has told a status.
  bool interrupted_ = false;
  int terminated_ = 0;                  // SIGTERMs sent to all.
  bool coordinator_signalled_ = false;  // SIGTERM was sent to it alone.
  absl::Time announce_by_ = absl::InfiniteFuture();
  absl::Time deadline_ = absl::InfiniteFuture();  // Of the stage.
  std::string phase_;
  uint64_t step_ = 0;
  std::string failure_;
  bool bad_configuration_ = false;
  std::vector<std::string> dead_;
  bool coordinator_gave_up_ = false;  // It ended by itself, not well.
};

}  // namespace ballast
