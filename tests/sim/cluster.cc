// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/cluster.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ballast::sim {
namespace {

// Faults come before this; everything must have ended so much later, without
// any wait for ever.
constexpr absl::Duration kFaultHorizon = absl::Seconds(25);
constexpr absl::Duration kEndsWithin = absl::Seconds(100);
// Whoever was out of reach when the run ended gives up by itself.
constexpr absl::Duration kLeavesWithin = absl::Seconds(90);
constexpr uint64_t kEventsMax = 3'000'000;
constexpr size_t kQueuedMax = 2000;

}  // namespace

Cluster::Cluster(World* world, const SimOptions& options)
    : world_(*world),
      options_(options),
      job_(MakeSimJob(options.seed)),
      twin_(RunTwin(job_)),
      plan_(MakeFaultPlan(job_, options.seed, options.calm)),
      random_(Random(options.seed).Fork(5)),
      network_(world),
      history_(world, &job_, &twin_),
      faults_left_(plan_.faults),
      deaths_left_(12),
      began_(world->now()) {
  network_.set_weather(plan_.weather);
  world_.on_death = [this](const LifePointer& life, Death death) {
    OnDeath(life, death);
  };
  world_.on_burial = [this](const LifePointer& life, Death death) {
    OnBurial(life, death);
  };
  world_.on_crash_point = [this](const char* name) { OnCrashPoint(name); };
}

Cluster::~Cluster() {
  // Streams and calls in the queue must find nobody.
  for (auto& [name, machine] : machines_) {
    if (machine->life != nullptr) {
      machine->life->alive = false;
    }
    machine->disk->Stop();
    machine->server.reset();
    machine->worker.reset();
    machine->coordinator.reset();
  }
}

Cluster::Machine* Cluster::AddMachine(const std::string& name, v1::Role role) {
  auto machine = std::make_unique<Machine>();
  machine->name = name;
  machine->role = role;
  machine->disk = std::make_unique<testing::SimDisk>(random_.Next());
  machine->files = std::make_unique<RoutedDisk>(machine->disk.get());
  Machine* raw = machine.get();
  machines_[name] = std::move(machine);
  return raw;
}

void Cluster::MountAll() {
  for (auto& [name, machine] : machines_) {
    for (auto& [other, target] : machines_) {
      machine->files->Mount(target->role == v1::ROLE_UNSPECIFIED
                                ? job_.job.run.dir
                                : absl::StrCat("/data/", other),
                            target->disk.get());
    }
  }
}

Cluster::Machine* Cluster::Find(const std::string& name) {
  const auto found = machines_.find(name);
  return found == machines_.end() ? nullptr : found->second.get();
}

SimCoordinator* Cluster::Leader() {
  return Find(kCoordinator)->coordinator.get();
}

void Cluster::Run() {
  AddMachine(kCoordinator, v1::ROLE_UNSPECIFIED);
  for (uint32_t i = 0; i < job_.job.server.count; ++i) {
    wanted_.insert(absl::StrCat("server-", i));
  }
  for (uint32_t i = 0; i < job_.job.worker.count; ++i) {
    wanted_.insert(absl::StrCat("worker-", i));
  }
  parts_left_ = plan_.resumes;
  NextFault();
  Watch();
  if (parts_left_ > 0) {
    StopSoon();
  }
  while (RunPart() && history_.committed() < job_.job.run.steps && !wiped_) {
    ChangeShape();
  }
}

bool Cluster::RunPart() {
  for (auto& [name, machine] : machines_) {
    machine->disk->set_capacity(std::numeric_limits<uint64_t>::max());
  }
  StartProcess(Find(kCoordinator));
  Reconcile();
  const auto all_gone = [this] {
    return std::all_of(machines_.begin(), machines_.end(),
                       [](const auto& m) { return m.second->life == nullptr; });
  };
  while (!world_.violated() && !(run_over_ && all_gone())) {
    if (world_.events() > kEventsMax) {
      world_.Violate("liveness",
                     absl::StrCat(kEventsMax, " events: ", WhoWaits()));
    }
    world_.RunNext();
  }
  if (!world_.violated()) {
    JudgeEnd();
  }
  return !world_.violated();
}

void Cluster::JudgeEnd() {
  // What cannot be written is lost, and said to be; the run is resumed.
  const bool excused = (wiped_ && absl::IsUnavailable(outcome_)) ||
                       (disk_broken_ && absl::IsDataLoss(outcome_)) ||
                       (stop_asked_ && absl::IsCancelled(outcome_));
  if (!outcome_.ok() && !excused) {
    world_.Violate("outcome",
                   absl::StrCat("the run failed: ", outcome_.ToString()));
  } else if (outcome_.ok() && !history_.ended() && !stop_asked_) {
    world_.Violate("outcome", "the run ended without its end record");
  } else if (outcome_.ok() && !stop_asked_ &&
             history_.committed() < job_.job.run.steps) {
    world_.Violate("outcome", absl::StrCat("the run ended at step ",
                                           history_.committed()));
  }
}

// Nobody is taken for silent by a coordinator that has not listened for so
// long.
void Cluster::CheckLeases(const CoreActions& actions) {
  for (const StateChange& change : actions.changes) {
    v1::Fault fault;
    if (change.key.starts_with("fault/") && change.value.has_value() &&
        fault.ParseFromString(*change.value) && fault.kind() == "silent" &&
        fault.recovered_seconds() < 0 &&
        world_.NowOf(*Find(kCoordinator)->life) - leader_since_ <
            job_.job.cluster.lease) {
      world_.Violate(
          "fresh leases",
          absl::StrCat(fault.member(), " is taken for dead: ", fault.detail()));
    }
  }
}

// The run goes on with other numbers.
void Cluster::ChangeShape() {
  run_over_ = false;
  stop_asked_ = false;
  outcome_ = absl::OkStatus();
  history_.BeginPart();
  resume_after_ = history_.timeline();
  began_ = world_.now();
  job_.job.server.count = static_cast<uint32_t>(random_.Between(1, 3));
  job_.job.worker.count = static_cast<uint32_t>(random_.Between(1, 3));
  wanted_.clear();  // The coordinator will say.
  world_.Count("resumed with other numbers");
  faults_left_ += plan_.faults / 2;
  NextFault();
  if (parts_left_ > 0) {
    --parts_left_;
  }
}

bool Cluster::IsWanted(const std::string& name) const {
  return name == kCoordinator || wanted_.contains(name);
}

void Cluster::Reconcile() {
  if (run_over_) {
    return;
  }
  if (Leader() != nullptr && Leader()->core() != nullptr) {
    const v1::StatusReply status = Leader()->core()->GetStatus(world_.now());
    if (status.wanted_size() > 0) {
      wanted_ = {status.wanted().begin(), status.wanted().end()};
    }
  }
  for (const std::string& name : wanted_) {
    Machine* machine = Find(name);
    if (machine == nullptr) {
      machine = AddMachine(
          name, name.starts_with("server") ? v1::ROLE_SERVER : v1::ROLE_WORKER);
      MountAll();
    }
    if (machine->life == nullptr && !machine->restarting) {
      StartProcess(machine);
    }
  }
}

void Cluster::StartProcess(Machine* machine) {
  machine->life = world_.NewLife(machine->name);
  ++machine->lives;
  world_.After(absl::Microseconds(random_.Between(1, 5000)), machine->life,
               [this, machine] {
                 if (machine->role == v1::ROLE_SERVER) {
                   StartServer(machine);
                 } else if (machine->role == v1::ROLE_WORKER) {
                   StartWorker(machine);
                 } else {
                   StartCoordinator(machine);
                 }
               });
}

void Cluster::StartCoordinator(Machine* machine) {
  SimCoordinator::Options options;
  options.world = &world_;
  options.network = &network_;
  options.life = machine->life;
  options.core.job = job_.job;
  options.core.config = "sim";
  options.core.numerics = {{"sim", "1"}};
  options.core.new_run_id =
      absl::StrFormat("%016x%016x", random_.Next(), random_.Next());
  // A supervisor's restart goes on with what the first life has begun.
  options.core.resume =
      resume_after_ != 0 && history_.timeline() == resume_after_;
  options.core.continue_run = !options.core.resume;
  options.sim_disk = machine->disk.get();
  options.disk = machine->files.get();
  options.run_dir = job_.job.run.dir;
  options.persisted = [this](const CoreActions& actions) {
    history_.Persisted(actions);
    CheckLeases(actions);
  };
  options.exited = [this, machine](const absl::Status& status) {
    Exited(machine, status);
  };
  leader_since_ = world_.NowOf(*machine->life);
  machine->coordinator = std::make_unique<SimCoordinator>(options);
  machine->coordinator->Start();
}

void Cluster::StartServer(Machine* machine) {
  SimServer::Options options;
  options.world = &world_;
  options.network = &network_;
  options.life = machine->life;
  options.job = &job_;
  options.own_job = job_.job;
  options.address = plan_.same_address
                        ? machine->name
                        : absl::StrCat(machine->name, ":", machine->lives);
  options.data_dir = absl::StrCat("/data/", machine->name);
  options.sim_disk = machine->disk.get();
  options.disk = machine->files.get();
  options.coordinator = [this] { return Leader(); };
  options.posted = [this, machine](const v1::ReportRequest& report) {
    OnServerPosted(machine, report);
  };
  options.exited = [this, machine](const absl::Status& status) {
    Exited(machine, status);
  };
  ArmDisk(machine);
  machine->server = std::make_unique<SimServer>(options);
  machine->server->Start();
}

void Cluster::StartWorker(Machine* machine) {
  SimWorker::Options options;
  options.world = &world_;
  options.network = &network_;
  options.life = machine->life;
  options.job = &job_;
  options.twin = &twin_;
  options.coordinator = [this] { return Leader(); };
  options.unit_time =
      random_.Scaled(absl::Microseconds(50), absl::Milliseconds(3));
  options.staging_bytes = random_.Between(512, 8192);
  options.exited = [this, machine](const absl::Status& status) {
    Exited(machine, status);
  };
  machine->worker = std::make_unique<SimWorker>(options);
  machine->worker->Start();
}

void Cluster::Exited(Machine* machine, const absl::Status& status) {
  machine->exit = status;
  if (world_.tracing()) {
    world_.Trace(absl::StrCat("exits: ", status.ToString()));
  }
  if (machine->role == v1::ROLE_UNSPECIFIED) {
    run_over_ = true;
    outcome_ = status;
    over_at_ = world_.now();
  } else if (absl::IsInvalidArgument(status) || absl::IsInternal(status)) {
    world_.Violate(
        "exit", absl::StrCat(machine->name, " ends with ", status.ToString()));
  }
  world_.Kill(machine->life, Death::kExit);
}

void Cluster::OnDeath(const LifePointer& life, Death) {
  Find(life->name)->disk->Stop();
}

void Cluster::OnBurial(const LifePointer& life, Death death) {
  Machine* machine = Find(life->name);
  machine->server.reset();
  machine->worker.reset();
  machine->coordinator.reset();
  machine->life = nullptr;
  machine->disk->Restart(death == Death::kPower ? testing::SimDisk::End::kPower
                                                : testing::SimDisk::End::kKill);
  network_.OnDeath(life, death == Death::kPower);
  if (run_over_) {
    return;
  }
  TellOfDeath(life, death);
  RestartLater(machine);
}

void Cluster::TellOfDeath(const LifePointer& life, Death death) {
  if (death == Death::kPower) {
    return;
  }
  world_.After(network_.Delay(), [this, life] {
    if (Leader() != nullptr && Leader()->core() != nullptr &&
        !network_.IsCut(life->name, kCoordinator)) {
      Leader()->ConnectionLost(life);
    }
  });
  if (!plan_.supervised) {
    return;
  }
  world_.After(absl::Milliseconds(random_.Between(1, 60)), [this, life, death] {
    if (Leader() == nullptr || Leader()->core() == nullptr) {
      return;
    }
    v1::ExitReport report;
    report.set_name(life->name);
    report.set_pid(static_cast<int64_t>(life->number));
    report.set_host("sim");
    report.set_signal(death == Death::kKill ? 9 : 0);
    Leader()->ReportExit(report);
  });
}

void Cluster::RestartLater(Machine* machine) {
  machine->restarting = true;
  world_.After(
      random_.Between(plan_.restart_min, plan_.restart_max), [this, machine] {
        machine->restarting = false;
        if (!run_over_ && machine->life == nullptr && IsWanted(machine->name)) {
          StartProcess(machine);
        }
      });
}

void Cluster::Watch() {
  world_.After(absl::Milliseconds(200), [this] {
    CheckBounds();
    Reconcile();
    if (!options_.calm && world_.now() - began_ > kFaultHorizon) {
      Calm();
    }
    if (!run_over_ && world_.now() - began_ > kFaultHorizon + kEndsWithin) {
      world_.Violate("liveness",
                     absl::StrCat("the run does not end: ", WhoWaits()));
    }
    if (run_over_ && world_.now() - over_at_ > kLeavesWithin) {
      world_.Violate("liveness",
                     absl::StrCat("somebody does not leave: ", WhoWaits()));
    }
    Watch();
  });
}

std::string Cluster::WhoWaits() {
  std::string text;
  if (Leader() != nullptr && Leader()->core() != nullptr) {
    const v1::StatusReply status = Leader()->core()->GetStatus(world_.now());
    absl::StrAppend(&text, "phase ", status.phase(), ", step ", status.step(),
                    ", waits for ", status.waits_for());
  }
  for (const auto& [name, machine] : machines_) {
    absl::StrAppend(&text, "\n  ", name, ": ");
    if (machine->life == nullptr) {
      absl::StrAppend(&text, "down, last exit ", machine->exit.ToString());
    } else if (machine->server != nullptr) {
      const v1::MemberStats stats = machine->server->stats();
      absl::StrAppend(&text, stats.phase(), ", step ", stats.step(),
                      ", waits for ", stats.waits_for());
    } else if (machine->worker != nullptr) {
      absl::StrAppend(&text, machine->worker->WaitsFor());
    } else {
      absl::StrAppend(&text, "up");
    }
  }
  return text;
}

// Whatever queues somewhere has a bound.
void Cluster::CheckBounds() {
  for (const auto& [name, machine] : machines_) {
    const size_t queued = machine->server   ? machine->server->queued()
                          : machine->worker ? machine->worker->queued()
                                            : 0;
    if (queued > kQueuedMax) {
      world_.Violate("bounded queues",
                     absl::StrCat(name, " has ", queued, " reports queued"));
    }
    if (machine->server != nullptr) {
      const v1::MemberStats stats = machine->server->stats();
      if (stats.memory_used_bytes() > stats.memory_budget_bytes()) {
        world_.Violate("memory",
                       absl::StrCat(name, " uses ", stats.memory_used_bytes(),
                                    " of ", stats.memory_budget_bytes()));
      }
    }
  }
}

std::string Cluster::Summary() const {
  return absl::StrCat(
      "servers ", job_.job.server.count, ", workers ", job_.job.worker.count,
      ", M ", job_.job.batch.micro_batches, ", steps ", job_.job.run.steps,
      ", durability ", static_cast<int>(job_.job.server.durability),
      "; decided ", history_.decided(), ", virtual ",
      absl::FormatDuration(
          absl::Trunc(world_.now() - began_, absl::Milliseconds(1))),
      ", events ", world_.events());
}

SimResult RunSeed(const SimOptions& options) {
  World world(options.seed, options.tracing);
  SimResult result;
  {
    Cluster cluster(&world, options);
    cluster.Run();
    result.summary = cluster.Summary();
    result.steps = cluster.decided();
  }
  result.oracle = world.oracle();
  result.violation = world.violation();
  result.trace = world.trace();
  result.faults = world.faults();
  result.events = world.events();
  return result;
}

}  // namespace ballast::sim
