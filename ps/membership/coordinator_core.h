// SPDX-License-Identifier: Apache-2.0
// The coordinator's mind: a run from the first join to the last exit, as one
// state machine. Messages and a time go in; records to persist, files to write
// and directives come out.
//
//   forming --all joined--> loading --all loaded--> training <--> evaluating
//                              ^                       |
//                              +------ rollback -------+
//      done <--confirmed, logged, hashed-- finishing <-+     (failed: any time)
//
// Members come and go meanwhile. A worker's spans go to the others; a server's
// place waits for its next life, which goes on where the last one was
// (durability step), or everyone goes back to a checkpoint under a new timeline
// (durability checkpoint).
//
// A directive is a pure function of the state, renumbered when it changes, so a
// member may ask as often as it likes. The caller (ps/coordinator) takes the
// actions after each event, makes `changes` durable, and only then answers
// anyone: what a member has been told is never unknown after a restart.
//
// Pure: no clock, thread, lock or I/O. Not thread-safe.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/job.h"
#include "common/layout.h"
#include "proto/ballast.pb.h"
#include "ps/membership/assignment.h"
#include "ps/membership/checkpoint_book.h"
#include "ps/membership/core_types.h"
#include "ps/membership/evaluation_pass.h"
#include "ps/membership/fault_book.h"
#include "ps/membership/hash_collector.h"
#include "ps/membership/member_table.h"
#include "ps/membership/move_book.h"
#include "ps/membership/progress_watch.h"
#include "ps/membership/run_state.h"
#include "ps/membership/server_table.h"
#include "ps/membership/step_core.h"
#include "ps/membership/step_log.h"
#include "ps/membership/step_metrics.h"
#include "ps/membership/wanted_list.h"
#include "storage/checkpoint.h"

namespace ballast {

class CoordinatorCore {
 public:
  static constexpr absl::Duration kReturnMax = absl::Milliseconds(300);

  // `state` is what the store holds, `checkpoint` the manifest of
  // state.newest_checkpoint() when resuming and there is one. The first actions
  // hold the raised term (and timeline).
  // Errors: FAILED_PRECONDITION  the store holds a run with steps and neither
  //                              resume nor continue_run is on, none and resume
  //                              is, or the numerics or the run's name differ
  //                              (each is named).
  //         DATA_LOSS            the checkpoint is not of this run, or the
  //                              state is not whole.
  static absl::StatusOr<std::unique_ptr<CoordinatorCore>> Create(
      CoreOptions options, const RunState& state,
      std::optional<CheckpointManifest> checkpoint, absl::Time now);

  // --- Events. Error codes are those of proto/ballast.proto. ---
  absl::StatusOr<v1::JoinReply> Join(const v1::JoinRequest& request,
                                     absl::Time now);
  // Of a poll: renews the lease.
  absl::Status Heartbeat(const v1::PollRequest& request, absl::Time now);
  absl::Status Report(const v1::ReportRequest& request, absl::Time now);
  // The connection of a member's poll broke. A live member polls again within
  // 100 ms, so one that is not heard from for kReturnMax after is dead.
  void ConnectionLost(uint64_t incarnation, absl::Time now);
  // The answer to an action's probe.
  void ProbeResult(uint64_t incarnation, bool alive, absl::Time now);
  // A supervisor saw a process end. Of a life that is in: it is dead.
  void ExitReported(const v1::ExitReport& report, absl::Time now);
  // Errors: INVALID_ARGUMENT, FAILED_PRECONDITION  the message says why not.
  absl::StatusOr<v1::ScaleReply> Scale(const v1::ScaleRequest& request,
                                       absl::Time now);
  // At least every 100 ms.
  void Tick(absl::Time now);
  void Stop(const v1::StopRequest& request, absl::Time now);
  // `path` of the manifest, or why it could not be written.
  void ManifestWritten(const StepKey& key,
                       const absl::StatusOr<std::string>& path, absl::Time now);
  // Ends the run as failed. The shell calls it when it cannot persist or write.
  void Fail(const absl::Status& status, absl::Time now);

  // What to do since the last call.
  CoreActions TakeActions();

  // --- Answers. ---
  // The newest directive; only its number when it is not above `seen_number`.
  // Errors: ABORTED  not a member.
  absl::StatusOr<v1::PollReply> Directive(uint64_t incarnation,
                                          uint64_t seen_number) const;
  // Errors: UNAVAILABLE  not all members have joined yet.
  absl::StatusOr<v1::Placement> GetPlacement() const;
  // All but run_dir, which is the shell's.
  v1::StatusReply GetStatus(absl::Time now) const;

  Phase phase() const { return phase_; }
  // The end of the run has been decided: the summary can be written.
  bool over() const {
    return phase_ == Phase::kDone || phase_ == Phase::kFailed;
  }
  // Every member has been told to exit and has done so, or had its time.
  bool ended() const { return ended_; }
  const absl::Status& failure() const { return failure_; }
  uint64_t committed() const { return last_.step(); }
  const v1::Decision& last_decision() const { return last_; }
  const RunIdentity& identity() const { return identity_; }
  const std::string& state_hash() const { return state_hash_; }
  const std::optional<EvaluationRecord>& last_evaluation() const {
    return last_evaluation_;
  }
  const MemberTable& members() const { return members_; }
  const std::optional<ChunkTable>& table() const { return table_; }
  const CheckpointBook& checkpoints() const { return checkpoints_; }
  const FaultBook& faults() const { return faults_; }

 private:
  CoordinatorCore(CoreOptions options, RunIdentity identity,
                  const RunState& state, absl::Time now);

  // core_restore.cc: where a run begins or goes on.
  absl::Status Begin(const RunState& state, bool goes_on,
                     const std::optional<CheckpointManifest>& checkpoint);
  absl::Status TakeLayout(const std::string& encoded);
  void MakeWanted(const RunState& state, bool goes_on);
  void GoOn(const RunState& state, absl::Time now);
  void RestoreMembers(const RunState& state, absl::Time now);
  void RestoreCheckpoints();

  // coordinator_core.cc: events.
  absl::Status TakeReport(const Member& member,
                          const v1::ReportRequest& request);
  absl::Status TakeServerReport(const Member& member, uint32_t slot,
                                const v1::ReportRequest& request);
  absl::Status TakeVote(uint32_t slot, const v1::Vote& vote);
  absl::Status TakeLoaded(uint32_t slot, const v1::ServerLoaded& loaded);
  absl::Status TakeConfirm(const Member& member, uint32_t slot,
                           const v1::Confirm& confirm);
  void TakeWorkerDone(const Member& member, const v1::WorkerDone& done);
  // After every event: transitions, then new directives.
  void Settle(absl::Time now);

  // core_members.cc: who comes and goes.
  absl::Status CheckServer(const v1::JoinRequest& request, absl::Time now);
  void EnterServer(const Member& member);
  // A life that has the data directory of another has outlived it.
  void EndPredecessor(const v1::JoinRequest& request, absl::Time now);
  void PlanLoad(uint32_t slot, const v1::JoinRequest& join);
  void TakeDeparture(const Member& member, const v1::ReportRequest& request,
                     absl::Time now);
  // The life is over, for a reason that is a fault.
  void Die(uint64_t incarnation, const std::string& kind,
           const std::string& detail, absl::Time now);
  // The life is over; nothing else is said about it.
  void Remove(uint64_t incarnation, absl::Time now);
  void TakeExpired(absl::Time now);
  void TakeStuck(absl::Time now);
  void JudgeWaits(absl::Time now);
  absl::Status CheckScale(const v1::ScaleRequest& request) const;
  absl::Status CheckDrain(const WantedMember& member) const;
  void AddFault(uint64_t incarnation, const std::string& member,
                const std::string& kind, const std::string& detail,
                absl::Time noticed);
  // Workers that may be given work, in the order of dealing.
  std::vector<uint64_t> Eligible() const;
  // Whether this life is to leave when nothing more is wanted of it.
  bool Leaves(const Member& member) const;
  bool durable() const {
    return options_.job.server.durability != Durability::kCheckpoint;
  }

  // core_advance.cc: transitions.
  void Advance(absl::Time now);
  bool AdvanceOnce(absl::Time now);  // Whether anything changed.
  bool AdvanceForming(absl::Time now);
  bool AdvanceLoading(absl::Time now);
  bool AdvanceTraining(absl::Time now);
  bool AdvanceEvaluating(absl::Time now);
  bool AdvanceFinishing(absl::Time now);
  void DealLeft();
  void Commit(v1::Decision decision, absl::Time now);
  void VersionStands(bool made_here, absl::Time now);
  void NextStep(absl::Time now);
  void WantHash();
  void AdvanceCheckpoints();
  void AdvanceHash();
  void AdvanceExit(absl::Time now);
  void Rollback(absl::Time now);
  void Prune();
  uint64_t target() const;  // The last step of this part of the run.

  // core_moves.cc: chunks that change their server.
  void PlanMoves();
  void TakeInSync(uint32_t slot, const v1::Vote& vote);
  void FlipMoves(v1::Decision* decision);
  void RetireServers();
  void AddOrders(uint32_t slot, v1::ServerDirective* directive) const;
  // By place: who keeps the second copy of its chunks.
  std::vector<std::optional<uint32_t>> StandingReplicas() const;
  void TakeOver(absl::Time now);
  // Servers, owners and how the model is cut, without the model.
  v1::Placement PlacementRecord() const;

  // core_directives.cc: what each member is told.
  v1::PollReply DirectiveFor(const Member& member) const;
  v1::WorkerDirective WorkerDirectiveFor(const Member& member) const;
  v1::ServerDirective ServerDirectiveFor(const Member& member) const;
  void FillLoad(const ServerSlot& slot, v1::ServerDirective* directive) const;
  void FillRun(uint32_t slot, v1::ServerDirective* directive) const;
  std::vector<Span> TrainingSpans(uint64_t worker) const;
  void Reissue();

  // core_status.cc: who owes what.
  // What the run waits for from this member; empty when nothing.
  std::string Owes(const Member& member) const;
  std::string OwedByServer(uint32_t slot) const;
  // Whether the run waits for it now and could blame it for being slow.
  bool OwesNow(const Member& member) const;
  bool WorkersOwe() const;
  std::string WaitsFor() const;
  std::string WhoIsMissing() const;  // Empty: everyone needed is in.
  bool HashMissingFrom(uint32_t slot) const;
  // Notes since when each member owes; whether anything changed.
  bool NoteDebts(absl::Time now);
  v1::MemberStatus StatusOf(const Member& member, absl::Time now) const;

  const CoreOptions options_;
  RunIdentity identity_;
  MemberTable members_;
  WantedList wanted_;
  ServerTable servers_;
  uint64_t chunk_elems_;  // As the model is cut.
  StepLog log_;
  CheckpointBook checkpoints_;
  EvaluationPass evaluation_;
  HashCollector hash_;
  MetricsCollector metrics_;
  FaultBook faults_;
  ProgressWatch watch_;
  MoveBook moves_;
  std::optional<StepCore> step_;     // Once the model is known.
  std::optional<ChunkTable> table_;  // Likewise.
  std::map<StepKey, double> evaluations_;
  uint64_t lines_out_ = 0;  // Steps below have their line written.

  Phase phase_ = Phase::kForming;
  absl::Status failure_;
  v1::Decision last_;        // Of the committed version; step 0 at the start.
  Assignment work_;          // Of step committed + 1.
  std::set<uint64_t> done_;  // Workers that did all that they are told now.
  // Lives that asked to leave, with the step committed then.
  std::map<uint64_t, uint64_t> drained_;
  uint32_t skips_in_a_row_ = 0;
  bool checkpoint_wanted_ = false;  // By the next decision.
  std::string state_hash_;          // Of the last hashed version.
  std::optional<EvaluationRecord> last_evaluation_;

  std::map<uint64_t, absl::Time> suspects_;  // Connection lost, by life.
  std::map<uint64_t, Debt> debts_;           // By life.
  absl::Time joined_at_;                     // The last join.
  absl::Time ticked_at_;
  absl::Time progress_at_;
  std::optional<absl::Time> missing_since_;  // Somebody needed is not in.
  absl::Time step_since_;                    // Or the evaluation's start.
  std::deque<absl::Duration> recent_;        // Of the last steps.
  std::optional<absl::Time> training_since_;
  std::optional<absl::Time> training_ended_;

  bool stop_requested_ = false;
  uint64_t stop_step_ = 0;  // With stop_requested_: the last step.
  bool exiting_ = false;    // Done or failed: members are told to exit.
  bool servers_exit_ = false;
  bool ended_ = false;
  absl::Time exit_since_;

  uint64_t last_number_;               // Of directives.
  std::map<uint64_t, Issued> issued_;  // By incarnation.
  CoreActions actions_;
};

}  // namespace ballast
