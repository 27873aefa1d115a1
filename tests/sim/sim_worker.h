// SPDX-License-Identifier: Apache-2.0
// A worker's process: the product's WorkerCore between a session and passes of
// the simulator's own.

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "proto/ballast.pb.h"
#include "tests/sim/member_link.h"
#include "tests/sim/sim_pass.h"
#include "worker/worker_core.h"

namespace ballast::sim {

// Not thread-safe.
class SimWorker {
 public:
  struct Options {
    World* world = nullptr;  // Not owned, as below.
    Network* network = nullptr;
    LifePointer life;
    const SimJob* job = nullptr;
    const Twin* twin = nullptr;
    std::function<CoordinatorCalls*()> coordinator;
    absl::Duration unit_time;
    uint64_t staging_bytes = 0;
    // It ends with this; in its life.
    std::function<void(const absl::Status&)> exited;
  };
  explicit SimWorker(const Options& options);
  ~SimWorker();

  void Start();
  void Terminate();  // SIGTERM.
  std::string WaitsFor() const;
  size_t queued() const { return link_ ? link_->queued() : 0; }

 private:
  void Join();
  v1::JoinRequest MakeJoin() const;
  v1::MemberStats Stats() const;
  // Runs an event of the core, then what follows from it.
  void Tell(const std::function<void(absl::Time)>& event);
  void CarryOut();
  void AskPlacement();
  void StartPass(const WorkerCore::Pass& pass);
  void WakeUp();
  void WaitForFarewell(const absl::Status& status, absl::Time deadline);

  const Options options_;
  WorkerCore core_;
  std::shared_ptr<MemberLink> link_;
  std::shared_ptr<SimPass> pass_;
  std::optional<v1::Placement> placement_;
  std::shared_ptr<const ChunkTable> table_;  // Passes hold it too.
  bool acting_ = false;
  bool again_ = false;
  bool over_ = false;
  absl::Time wake_ = absl::InfiniteFuture();
  uint64_t units_before_ = 0;
  // shared: events hold it weakly and do nothing once the process is gone.
  std::shared_ptr<SimWorker*> self_;
};

}  // namespace ballast::sim
