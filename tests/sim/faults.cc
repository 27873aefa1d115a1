// SPDX-License-Identifier: Apache-2.0
// What is done to a cluster; the rest is in cluster.cc.
#include <algorithm>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster.h"

namespace ballast::sim {
namespace {

constexpr absl::Duration kFaultHorizon = absl::Seconds(20);
// More changes than any disk sees.
constexpr uint64_t kNever = uint64_t{1} << 40;

}  // namespace

bool Cluster::MayHurt() const {
  return !options_.calm && !run_over_ && world_.now() - began_ < kFaultHorizon;
}

void Cluster::NextFault() {
  if (faults_left_ == 0 || !MayHurt()) {
    return;
  }
  world_.After(random_.Scaled(plan_.pause_min, plan_.pause_max), [this] {
    if (MayHurt()) {
      --faults_left_;
      Hurt();
      NextFault();
    }
  });
}

// A machine with a process; null: there is none.
Cluster::Machine* Cluster::PickMachine(bool servers_and_workers_only) {
  std::vector<Machine*> candidates;
  for (auto& [name, machine] : machines_) {
    if (machine->life != nullptr && machine->life->alive &&
        !(servers_and_workers_only && machine->role == v1::ROLE_UNSPECIFIED)) {
      candidates.push_back(machine.get());
    }
  }
  return candidates.empty() ? nullptr
                            : candidates[random_.Below(candidates.size())];
}

void Cluster::Hurt() {
  double total = 0.0;
  for (const double weight : plan_.weight) {
    total += weight;
  }
  double dice = random_.Fraction() * total;
  int chosen = 0;
  while (chosen + 1 < kFaultKinds && dice >= plan_.weight[chosen]) {
    dice -= plan_.weight[chosen++];
  }
  const auto kind = static_cast<FaultKind>(chosen);
  Machine* machine = PickMachine(kind == FaultKind::kBreakStream);
  if (machine == nullptr) {
    return;
  }
  world_.Count(FaultName(kind));
  if (world_.tracing()) {
    world_.Trace(absl::StrCat("FAULT ", FaultName(kind), " ", machine->name));
  }
  const absl::Time until =
      world_.now() + random_.Scaled(absl::Milliseconds(50), absl::Seconds(7));
  Machine* other = PickMachine(false);
  switch (kind) {
    case FaultKind::kKill:
      world_.Kill(machine->life, Death::kKill);
      break;
    case FaultKind::kPower:
      world_.Kill(machine->life, Death::kPower);
      break;
    case FaultKind::kPause:
      machine->life->paused_until = until;
      break;
    case FaultKind::kClockJump:
      machine->life->clock_ahead +=
          random_.Scaled(absl::Milliseconds(100), absl::Seconds(8));
      break;
    case FaultKind::kCut:
      network_.Cut(machine->name, other->name, until);
      network_.Cut(other->name, machine->name, until);
      break;
    case FaultKind::kOneWayCut:
      network_.Cut(machine->name, other->name, until);
      break;
    case FaultKind::kBreakStream:
      network_.BreakStreamOf(machine->name);
      break;
    case FaultKind::kDiskFull:
      // A coordinator that cannot write ends the run, as it should.
      if (machine->server == nullptr) {
        break;
      }
      machine->disk->set_capacity(machine->disk->used_bytes());
      world_.After(until - world_.now(), [machine] {
        machine->disk->set_capacity(std::numeric_limits<uint64_t>::max());
      });
      break;
    case FaultKind::kTerminate:
      if (machine->worker != nullptr) {
        machine->worker->Terminate();
      } else if (machine->server != nullptr) {
        machine->server->Terminate();
      }
      break;
    case FaultKind::kPowerAll:
      PowerAll();
      break;
    case FaultKind::kScale:
      Scale();
      break;
    case FaultKind::kWipe:
      Wipe(machine);
      break;
    case FaultKind::kBadDisk:
      BreakDisk(machine);
      break;
  }
}

void Cluster::Scale() {
  if (Leader() == nullptr || Leader()->core() == nullptr) {
    return;
  }
  v1::ScaleRequest request;
  if (random_.Chance(0.5)) {
    request.set_role(random_.Chance(0.5) ? v1::ROLE_SERVER : v1::ROLE_WORKER);
    request.set_add(1);
  } else if (!wanted_.empty()) {
    auto name = wanted_.begin();
    std::advance(name, static_cast<ptrdiff_t>(random_.Below(wanted_.size())));
    request.set_drain(*name);
  }
  if (world_.tracing()) {
    world_.Trace(absl::StrCat("scale ", request.ShortDebugString()));
  }
  Leader()->Scale(request);
}

// Under durability `step` nobody else has what it held: the run waits for it,
// gives up and says so, unless it had promised nothing yet.
void Cluster::Wipe(Machine* machine) {
  if (machine->server == nullptr || wiped_) {
    return;
  }
  wiped_ = true;
  world_.Kill(machine->life, Death::kPower);
  world_.After(absl::ZeroDuration(), [this, machine] {
    if (machine->life != nullptr) {
      return;
    }
    // Others may have files of it open.
    replaced_disks_.push_back(std::move(machine->disk));
    replaced_files_.push_back(std::move(machine->files));
    machine->disk = std::make_unique<testing::SimDisk>(random_.Next());
    machine->files = std::make_unique<RoutedDisk>(machine->disk.get());
    MountAll();
  });
}

// One operation fails, as a disk's that is about to die. What was promised
// before holds; nothing is promised from that file again.
void Cluster::BreakDisk(Machine* machine) {
  using Operation = testing::SimDisk::Operation;
  const Operation operations[] = {Operation::kRead, Operation::kWrite,
                                  Operation::kSync};
  disk_broken_ = true;
  machine->disk->Fail(operations[random_.Below(3)], "/",
                      absl::DataLossError("Input/output error"),
                      static_cast<uint32_t>(random_.Below(20)));
}

// Somebody ends this part of the run early, to resume it.
void Cluster::StopSoon() {
  world_.After(
      random_.Scaled(absl::Milliseconds(30), absl::Seconds(4)), [this] {
        if (run_over_ || Leader() == nullptr || Leader()->core() == nullptr) {
          return;
        }
        stop_asked_ = true;
        v1::StopRequest stop;
        stop.set_reason("the simulator");
        stop.set_abort(random_.Chance(0.5));
        Leader()->Stop(stop);
      });
}

void Cluster::PowerAll() {
  for (auto& [name, machine] : machines_) {
    if (machine->life != nullptr) {
      world_.Kill(machine->life, Death::kPower);
    }
  }
}

void Cluster::OnCrashPoint(const char* name) {
  if (!MayHurt() || deaths_left_ == 0 || !random_.Chance(plan_.crash_point)) {
    return;
  }
  --deaths_left_;
  world_.Count(absl::StrCat("crash at ", name));
  world_.Kill(world_.running(),
              random_.Chance(0.5) ? Death::kPower : Death::kKill);
}

void Cluster::OnServerPosted(Machine* machine,
                             const v1::ReportRequest& report) {
  if (!report.has_vote() || !MayHurt() || deaths_left_ == 0 ||
      !random_.Chance(plan_.power_after_vote)) {
    return;
  }
  --deaths_left_;
  world_.Count("power after a vote");
  world_.After(
      random_.Scaled(absl::Microseconds(100), absl::Milliseconds(100)),
      [this, life = machine->life] { world_.Kill(life, Death::kPower); });
}

void Cluster::ArmDisk(Machine* machine) {
  if (!MayHurt() || deaths_left_ == 0 || !random_.Chance(plan_.disk_cut)) {
    return;
  }
  --deaths_left_;
  world_.Count("disk cut in a change");
  machine->disk->CutAfter(random_.Between(1, 300));
}

// From here on nothing new happens to anyone.
void Cluster::Calm() {
  for (auto& [name, machine] : machines_) {
    machine->disk->CutAfter(kNever);
  }
}

}  // namespace ballast::sim
