// SPDX-License-Identifier: Apache-2.0
// The coordinator's process: the product's CoordinatorCore behind a loop that
// does what ps/coordinator/coordinator_loop.cc does, on virtual time: events in
// batches, their changes made durable, only then the answers.

#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/ballast.pb.h"
#include "ps/membership/coordinator_core.h"
#include "storage/disk.h"
#include "storage/state_store.h"
#include "tests/sim/member_link.h"
#include "tests/sim/network.h"
#include "tests/sim/sim_job.h"
#include "tests/testing/sim_disk.h"

namespace ballast::sim {

// Not thread-safe.
class SimCoordinator final : public CoordinatorCalls {
 public:
  struct Options {
    World* world = nullptr;  // Not owned, as below.
    Network* network = nullptr;
    LifePointer life;
    CoreOptions core;
    testing::SimDisk* sim_disk = nullptr;
    Disk* disk = nullptr;
    std::string run_dir;
    // What became durable, in order; an oracle listens.
    std::function<void(const CoreActions&)> persisted;
    // The run is over and everyone has left: OK or why it failed.
    std::function<void(const absl::Status&)> exited;
  };
  explicit SimCoordinator(const Options& options) : options_(options) {}

  void Start();
  // Null before it has read its state.
  CoordinatorCore* core() { return core_.get(); }

  void Join(const v1::JoinRequest& request,
            Network::Answer<v1::JoinReply> answer) override;
  void Poll(const LifePointer& caller, const v1::PollRequest& request,
            Network::Answer<v1::PollReply> answer) override;
  void Report(const v1::ReportRequest& request,
              Network::Answer<v1::ReportReply> answer) override;
  void GetPlacement(Network::Answer<v1::Placement> answer) override;
  void ReportExit(const v1::ExitReport& report);
  void Scale(const v1::ScaleRequest& request);
  void Stop(const v1::StopRequest& request);
  // A process that polls here has gone, and its kernel said so.
  void ConnectionLost(const LifePointer& caller);

 private:
  using Event = std::function<void(absl::Time now)>;
  struct PendingPoll {
    uint64_t incarnation = 0;
    uint64_t seen_number = 0;
    absl::Time deadline;
    Network::Answer<v1::PollReply> answer;
  };

  absl::Status Open();
  absl::StatusOr<RunState> ReadState();
  bool Alive();
  void Post(Event event);
  void TurnSoon(absl::Duration delay);
  void Turn();
  void CarryOut(absl::Time now);
  absl::Status CarryOutOnce(const CoreActions& actions, absl::Time now);
  void RunProbe(const Probe& probe);
  void AnswerPolls(absl::Time now, bool closing);
  void KeepTicking();

  const Options options_;
  std::unique_ptr<StateStore> store_;
  std::unique_ptr<CoordinatorCore> core_;
  std::vector<Event> events_;
  std::vector<std::function<void()>> answers_;
  std::list<PendingPoll> polls_;
  std::map<uint64_t, uint64_t> pollers_;  // Life number to incarnation.
  std::map<uint64_t, uint64_t> told_;     // With kDecisionRepeated broken.
  bool turn_scheduled_ = false;
  bool persisted_something_ = false;
  absl::Time tick_at_;
  absl::Status broken_;   // What could not be written.
  bool refuses_ = false;  // The answers of this round.
  bool over_ = false;
};

}  // namespace ballast::sim
