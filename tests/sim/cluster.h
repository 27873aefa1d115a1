// SPDX-License-Identifier: Apache-2.0
// A whole cluster in one world: machines with disks, processes on them, a
// supervisor that starts again what dies, the faults of a plan, and the oracles
// that say whether the promises held.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tests/sim/fault_plan.h"
#include "tests/sim/history.h"
#include "tests/sim/network.h"
#include "tests/sim/routed_disk.h"
#include "tests/sim/sim_coordinator.h"
#include "tests/sim/sim_job.h"
#include "tests/sim/sim_server.h"
#include "tests/sim/sim_worker.h"
#include "tests/sim/twin.h"
#include "tests/sim/world.h"
#include "tests/testing/sim_disk.h"

namespace ballast::sim {

struct SimOptions {
  uint64_t seed = 0;
  bool calm = false;     // No faults.
  bool tracing = false;  // Keep the last events.
};

struct SimResult {
  std::string oracle;  // Empty: all promises held.
  std::string violation;
  std::string summary;  // One line: job, cluster, how it went.
  std::deque<std::string> trace;
  std::map<std::string, uint64_t> faults;
  uint64_t events = 0;
  uint64_t steps = 0;
};

// Runs one seed to its end. Thread-safe: nothing is shared between runs.
SimResult RunSeed(const SimOptions& options);

// Not thread-safe.
class Cluster {
 public:
  Cluster(World* world, const SimOptions& options);
  ~Cluster();

  void Run();
  std::string Summary() const;
  uint64_t decided() const { return history_.decided(); }

 private:
  struct Machine {
    std::string name;
    v1::Role role = v1::ROLE_UNSPECIFIED;  // Unspecified: the coordinator.
    std::unique_ptr<testing::SimDisk> disk;
    std::unique_ptr<RoutedDisk> files;
    LifePointer life;  // Of the process on it; null: none.
    std::unique_ptr<SimCoordinator> coordinator;
    std::unique_ptr<SimServer> server;
    std::unique_ptr<SimWorker> worker;
    absl::Status exit;  // Of the last life that exited by itself.
    uint64_t lives = 0;
    bool restarting = false;  // Its next life is on the way.
  };

  // cluster.cc
  Machine* AddMachine(const std::string& name, v1::Role role);
  void MountAll();
  void StartProcess(Machine* machine);
  void StartCoordinator(Machine* machine);
  void StartServer(Machine* machine);
  void StartWorker(Machine* machine);
  void RestartLater(Machine* machine);
  void OnDeath(const LifePointer& life, Death death);
  void OnBurial(const LifePointer& life, Death death);
  void TellOfDeath(const LifePointer& life, Death death);
  void Exited(Machine* machine, const absl::Status& status);
  Machine* Find(const std::string& name);
  SimCoordinator* Leader();
  void Watch();  // Oracles that look now and then.
  std::string WhoWaits();
  void CheckBounds();
  // Runs the job until it ends; false: a promise was broken.
  bool RunPart();
  void JudgeEnd();
  void CheckLeases(const CoreActions& actions);
  // The supervisor: starts what should be in.
  void Reconcile();
  bool IsWanted(const std::string& name) const;
  void ChangeShape();

  // faults.cc
  bool MayHurt() const;
  void NextFault();
  void Hurt();
  Machine* PickMachine(bool servers_and_workers_only);
  void Pause(Machine* machine);
  void PowerAll();
  void OnCrashPoint(const char* name);
  void OnServerPosted(Machine* machine, const v1::ReportRequest& report);
  void ArmDisk(Machine* machine);
  void Calm();
  void Scale();
  void BreakDisk(Machine* machine);
  void Wipe(Machine* machine);
  void StopSoon();

  World& world_;
  const SimOptions options_;
  SimJob job_;
  const Twin twin_;
  FaultPlan plan_;
  Random random_;  // For faults.
  Network network_;
  History history_;
  // Addresses are stable: machines point at each other's disks.
  std::map<std::string, std::unique_ptr<Machine>> machines_;
  uint32_t faults_left_ = 0;
  uint32_t deaths_left_ = 0;
  uint64_t resume_after_ = 0;  // Until a later timeline is begun; 0: no.
  uint32_t parts_left_ = 0;    // To be resumed.
  bool run_over_ = false;
  bool stop_asked_ = false;
  bool disk_broken_ = false;
  bool wiped_ = false;
  std::vector<std::unique_ptr<testing::SimDisk>> replaced_disks_;
  std::vector<std::unique_ptr<RoutedDisk>> replaced_files_;
  absl::Time leader_since_;       // By its own clock.
  std::set<std::string> wanted_;  // Names that should be in.
  absl::Status outcome_;
  absl::Time began_;
  absl::Time over_at_;
  uint64_t bytes_max_ = 0;
};

}  // namespace ballast::sim
