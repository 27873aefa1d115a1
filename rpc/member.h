// SPDX-License-Identifier: Apache-2.0
// One life of a member of the run, as its coordinator sees it: joins under a
// fresh life id, keeps the lease by polling for directives, and reports what
// happened until the coordinator has taken it. Servers and workers use the same
// one.
//
// A session ends once: by Stop(), or on its own when the coordinator fences it
// (ABORTED: a new session may be started), refuses it (FAILED_PRECONDITION) or
// is silent for longer than Options::silence_max (UNAVAILABLE). The end is told
// through on_end, after which nothing is delivered any more.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/ballast.pb.h"

namespace ballast {

// Thread-safe. Callbacks run on the session's own threads, one at a time each,
// and must not block for long: while on_directive runs, the lease is not
// renewed.
class MemberSession {
 public:
  struct Options {
    // host:port, or several with commas between: the one that leads is found.
    std::string coordinator;
    // life_id is filled in by Start.
    v1::JoinRequest join;
    // cluster.give_up_after: how long to try before giving up, for the join and
    // later for every call.
    absl::Duration silence_max = absl::Minutes(10);
    // A directive with a number higher than any before. Never called after
    // Stop() returned.
    std::function<void(const v1::PollReply&)> on_directive;
    // Called before each poll and report; may be empty.
    std::function<v1::MemberStats()> stats;
    // Why the session ended on its own; at most once.
    std::function<void(const absl::Status&)> on_end;
  };

  // Joins and starts polling. Blocks until admitted.
  // Errors: INVALID_ARGUMENT     `coordinator` is not an address.
  //         FAILED_PRECONDITION  refused; the message names the differences.
  //         UNAVAILABLE          no coordinator answered, or it takes no more
  //                              members, for silence_max.
  static absl::StatusOr<std::unique_ptr<MemberSession>> Start(Options options);
  // Stops without reporting.
  virtual ~MemberSession() = default;

  // What the coordinator answered to the join.
  virtual const v1::JoinReply& admission() const = 0;

  // Queues an event: sent in order, each repeated until it is taken.
  // `request` needs its event and timeline; identity and stats are filled in.
  virtual void Post(v1::ReportRequest request) = 0;
  // Posts and blocks until it is taken.
  // Errors: those of the end of the session; DEADLINE_EXCEEDED  not taken
  //         within `timeout` (it stays queued).
  virtual absl::Status Report(v1::ReportRequest request,
                              absl::Duration timeout) = 0;

  // The placement, asked for until there is an answer or silence_max passed.
  // Errors: as the call's; UNAVAILABLE  the session ended.
  virtual absl::StatusOr<v1::Placement> GetPlacement() = 0;
  // Asks once.
  virtual absl::StatusOr<v1::Placement> TryPlacement(
      absl::Duration timeout) = 0;

  // Cancels calls in flight and waits for the threads. Not from a callback.
  virtual void Stop() = 0;
};

}  // namespace ballast
