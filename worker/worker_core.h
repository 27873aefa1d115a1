// SPDX-License-Identifier: Apache-2.0
// What a worker does about what it hears: a state machine without thread,
// clock, lock or I/O, which worker/worker.cc drives with real passes and the
// simulator with invented ones.
//
// A directive is the worker's whole instruction. The core holds what each life
// of each server has acknowledged of the step it asks for, and starts passes
// over what some life still misses: after a server came back only its share is
// computed and pushed again, and spans of a dead worker are added behind the
// pass in flight. Whatever goes wrong on the way to a server is tried again,
// at once when something new is heard, else after a growing pause.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/span.h"
#include "proto/ballast.pb.h"

namespace ballast {

// Thread-compatible. After every event the owner carries out TakeActions(), and
// calls Tick() at NextWake() at the latest.
class WorkerCore {
 public:
  struct Options {
    std::string name;            // "worker-0", for messages.
    uint32_t micro_batches = 0;  // Of a step; spans are nodes of this tree.
    // cluster.give_up_after: longest time without any progress of a task.
    absl::Duration give_up_after = absl::Minutes(10);
    // cluster.drain_timeout: longest time from the wish to leave to the exit.
    absl::Duration drain_timeout = absl::Seconds(30);
  };

  // A pass that stands still for this long gives way to one that also has the
  // spans that came meanwhile: what blocks it may wait for just these.
  static constexpr absl::Duration kBlockedMax = absl::Milliseconds(500);
  // How long the last acknowledgements of a step are waited for after its
  // decision was heard: they are on their way, and complete the step's report.
  static constexpr absl::Duration kLastAcksMax = absl::Seconds(2);
  static constexpr absl::Duration kRetryFirst = absl::Milliseconds(20);
  static constexpr absl::Duration kRetryLast = absl::Seconds(1);

  // Who serves, as far as the core must know. Index: Placement.servers.
  struct Server {
    std::string name;
    uint64_t life = 0;         // Its incarnation; 0: it is not in.
    bool owns_chunks = false;  // Nothing goes to one that owns none.
  };
  struct View {
    uint64_t placement_version = 0;
    uint64_t address_version = 0;
    std::vector<Server> servers;
  };
  static View ViewOf(const v1::Placement& placement);

  // A node to compute, and who is to get its gradients (indices into
  // Pass::view.servers; empty in an evaluation).
  struct Part {
    Span node;
    std::vector<uint32_t> servers;
    friend bool operator==(const Part&, const Part&) = default;
  };
  // One way through the model. Reads from every server that owns chunks.
  struct Pass {
    uint64_t id = 0;  // Grows.
    bool evaluate = false;
    uint64_t timeline = 0;
    uint64_t step = 0;         // Of pushes; of an evaluation: the version.
    uint64_t version = 0;      // What it reads.
    uint64_t incarnation = 0;  // Under which it reads and pushes.
    uint64_t number = 0;       // Of the directive behind it.
    View view;
    std::vector<Part> parts;  // Ascending, disjoint.

    bool Has(uint32_t micro_batch) const;
  };

  // All gradients of `node` that belong to `server` were acknowledged by `life`
  // of it.
  struct Ack {
    Span node;
    uint32_t server = 0;  // Index into Pass::view.servers.
    uint64_t life = 0;    // That the acknowledgements named.
  };
  struct PassEnd {
    uint64_t id = 0;
    // OK: everything was computed and acknowledged. UNAVAILABLE, ABORTED,
    // CANCELLED, DEADLINE_EXCEEDED: another attempt may do better. Others end
    // the worker.
    absl::Status status;
    std::vector<Ack> acks;                   // Also of a pass that failed.
    std::vector<v1::MicroBatchLoss> losses;  // Of an evaluation.
    v1::WorkerDone figures;  // What it cost; names are filled in.
  };

  // What the owner is to do now, in this order.
  struct Actions {
    // Makes the pass end soon; it still ends through OnPassEnded.
    std::optional<uint64_t> call_off;
    // No pass is running.
    std::optional<Pass> start;
    // Ask for the placement; answered by OnPlacement or OnPlacementFailed.
    bool want_placement = false;
    // Send in order, each until it is taken.
    std::vector<v1::ReportRequest> reports;
    // The session is over and no pass is running: begin a new life.
    bool rejoin = false;
    // Send what is queued for a bounded time, then end with this. Last.
    std::optional<absl::Status> exit;
  };

  explicit WorkerCore(const Options& options) : options_(options) {}

  // Admitted: a new life begins.
  void OnJoined(const v1::JoinReply& reply, absl::Time now);
  // From the session; numbers that are not the highest are ignored.
  void OnDirective(const v1::PollReply& reply, absl::Time now);
  void OnPlacement(const View& view, absl::Time now);
  void OnPlacementFailed(absl::Time now);
  // The owner met what nobody can repair.
  void OnError(const absl::Status& status, absl::Time now);
  // The pass computed or got rid of something.
  void OnPassProgress(uint64_t id, absl::Time now);
  // Only acknowledgements are missing.
  void OnAllPushed(uint64_t id, absl::Time now);
  void OnPassEnded(const PassEnd& end, absl::Time now);
  // The session ended by itself. ABORTED: this life was fenced.
  void OnSessionOver(const absl::Status& status, absl::Time now);
  // SIGTERM: the first asks to leave, the second leaves.
  void OnTerm(absl::Time now);
  void Tick(absl::Time now);

  // InfiniteFuture: nothing to do until the next event.
  absl::Time NextWake() const;
  Actions TakeActions() { return std::exchange(actions_, Actions()); }

  // What it waits for between passes, "server-1: its return, for step 7"; empty
  // when it has what it needs.
  const std::string& waits_for() const { return waits_for_; }
  absl::Time waits_since() const { return waits_since_; }
  // Of the directive that is worked on; for status.
  uint64_t step() const { return work_.directive.step(); }
  bool draining() const { return draining_since_.has_value(); }

 private:
  // What is asked for and what stands of it.
  struct Work {
    uint64_t number = 0;
    v1::WorkerDirective directive;   // WORKER_WAIT: nothing.
    uint64_t placement_version = 0;  // Of `acked`.
    // By server and life: micro-batches whose gradients that life has.
    std::map<std::string, std::map<uint64_t, std::set<uint32_t>>> acked;
    std::map<uint32_t, double> losses;  // Of an evaluation.
    v1::WorkerDone figures;             // Of all its passes.
    uint64_t reported = 0;              // Number that was answered last.
  };
  struct Running {
    Pass pass;
    absl::Time progress_at;
    bool all_pushed = false;
    bool called_off = false;
    // Since when only its last acknowledgements are of any use.
    std::optional<absl::Time> late_since;
  };

  // Whatever follows from the state; after every event.
  void Advance(absl::Time now);
  void Decide(absl::Time now);
  void DecideWhileRunning(absl::Time now);
  // Makes the newest directive the work, keeping what stands of it.
  void Adopt(absl::Time now);
  bool IsWork(const v1::WorkerDirective& directive) const;
  // Whether the view is the one that the newest directive means; asks for it.
  bool HaveView(absl::Time now);
  // Whether the pass that runs may as well end.
  bool Useless(absl::Time now);
  bool IsAcked(const Server& server, uint32_t micro_batch) const;
  std::vector<Part> MissingParts() const;
  std::vector<Part> MissingLosses() const;
  absl::Status CheckSpans() const;
  void StartPass(std::vector<Part> parts, absl::Time now);
  void TakeResults(const Pass& pass, const PassEnd& end);
  void Retry(const absl::Status& why, absl::Time now);
  // Whether nothing has progressed for too long, which ends the worker.
  bool GivesUp(const std::string& awaited, absl::Time now);
  void ReportEnd();
  void ReportDraining();
  void Post(v1::ReportRequest request);
  void Fail(const absl::Status& status);
  void Exit(const absl::Status& status);
  void Leave();
  void WakeAt(absl::Time at) { wake_ = std::min(wake_, at); }

  const Options options_;
  Actions actions_;
  uint64_t incarnation_ = 0;  // 0: not a member now.
  bool rejoin_ = false;       // When no pass runs any more.
  bool over_ = false;
  uint64_t joined_timeline_ = 0;
  std::optional<v1::PollReply> newest_;
  std::optional<View> view_;
  std::optional<Running> running_;
  uint64_t last_pass_ = 0;
  Work work_;

  bool placement_asked_ = false;  // An answer is under way.
  bool placement_stale_ = false;  // A server was not where it says.
  absl::Time placement_at_ = absl::InfinitePast();  // Earliest next question.
  absl::Duration placement_pause_ = kRetryFirst;
  absl::Time retry_at_ = absl::InfinitePast();  // Earliest next pass.
  absl::Duration retry_pause_ = kRetryFirst;
  absl::Time progress_at_ = absl::InfinitePast();  // Of the work.
  std::string last_error_;

  std::optional<absl::Time> draining_since_;
  uint64_t draining_term_ = 0;  // Of the coordinator that was told.
  absl::Time wake_ = absl::InfiniteFuture();
  std::string waits_for_;
  std::string waits_next_;  // Until Advance ends.
  absl::Time waits_since_ = absl::InfinitePast();
};

}  // namespace ballast
