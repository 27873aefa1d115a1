// SPDX-License-Identifier: Apache-2.0
// A member's session with the coordinator, as rpc/member.h keeps it, without
// threads: joins under a fresh life id, polls for directives, sends reports in
// order and repeats each until it is taken, and ends once.

#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/ballast.pb.h"
#include "tests/sim/network.h"
#include "tests/sim/world.h"

namespace ballast::sim {

// What the coordinator offers, in the life that listens.
class CoordinatorCalls {
 public:
  virtual ~CoordinatorCalls() = default;
  virtual void Join(const v1::JoinRequest& request,
                    Network::Answer<v1::JoinReply> answer) = 0;
  virtual void Poll(const LifePointer& caller, const v1::PollRequest& request,
                    Network::Answer<v1::PollReply> answer) = 0;
  virtual void Report(const v1::ReportRequest& request,
                      Network::Answer<v1::ReportReply> answer) = 0;
  virtual void GetPlacement(Network::Answer<v1::Placement> answer) = 0;
};

inline constexpr char kCoordinator[] = "coordinator";

// Not thread-safe. Callbacks run in the member's life. shared: calls under way
// outlive the session and then do nothing.
class MemberLink : public std::enable_shared_from_this<MemberLink> {
 public:
  struct Options {
    v1::JoinRequest join;  // life_id is filled in.
    absl::Duration silence_max;
    std::function<void(const v1::JoinReply&)> on_admitted;
    std::function<void(const v1::PollReply&)> on_directive;
    std::function<v1::MemberStats()> stats;
    std::function<void(const absl::Status&)> on_end;
    // Sees each report as the member posts it.
    std::function<void(const v1::ReportRequest&)> on_post;
  };
  // `calls` finds what listens now; null: nobody.
  MemberLink(World* world, Network* network, LifePointer life,
             std::function<CoordinatorCalls*()> calls, Options options);

  void Start();
  void Stop() { over_ = true; }
  bool over() const { return over_; }
  const v1::JoinReply& admission() const { return admission_; }
  void Post(v1::ReportRequest request);
  // Until there is an answer; never when the session ends.
  void AskPlacement(std::function<void(absl::StatusOr<v1::Placement>)> done);
  size_t queued() const { return queue_.size(); }

 private:
  // A call with what it carries; copies of it may be served more than once.
  template <typename Reply>
  using Message =
      std::function<void(CoordinatorCalls*, Network::Answer<Reply>)>;
  // Repeats the call while its outcome is silence; `make` is asked each time.
  template <typename Reply>
  void Until(const std::string& what, absl::Duration timeout,
             std::function<Message<Reply>()> make, Network::Answer<Reply> done);
  template <typename Reply>
  struct Repeated;
  template <typename Reply>
  void Attempt(const std::shared_ptr<Repeated<Reply>>& state);

  void Poll();
  void SendReport();
  void End(const absl::Status& status);

  World& world_;
  Network& network_;
  const LifePointer life_;
  const std::function<CoordinatorCalls*()> calls_;
  Options options_;
  v1::JoinReply admission_;
  bool over_ = false;
  bool sending_ = false;
  uint64_t seen_ = 0;
  std::deque<v1::ReportRequest> queue_;
};

}  // namespace ballast::sim
