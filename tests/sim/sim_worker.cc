// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_worker.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace ballast::sim {
namespace {

constexpr absl::Duration kFarewellMax = absl::Seconds(5);

WorkerCore::Options CoreOptionsOf(const SimWorker::Options& options) {
  WorkerCore::Options core;
  core.name = options.life->name;
  core.micro_batches = options.job->job.batch.micro_batches;
  core.give_up_after = options.job->job.cluster.give_up_after;
  core.drain_timeout = options.job->job.cluster.drain_timeout;
  return core;
}

}  // namespace

SimWorker::SimWorker(const Options& options)
    : options_(options),
      core_(CoreOptionsOf(options)),
      self_(std::make_shared<SimWorker*>(this)) {}

SimWorker::~SimWorker() {
  if (link_ != nullptr) {
    link_->Stop();
  }
  if (pass_ != nullptr) {
    pass_->Abandon();
  }
}

void SimWorker::Start() { Join(); }

void SimWorker::Terminate() {
  Tell([this](absl::Time now) { core_.OnTerm(now); });
}

v1::JoinRequest SimWorker::MakeJoin() const {
  v1::JoinRequest join;
  join.set_role(v1::ROLE_WORKER);
  join.set_name(options_.life->name);
  join.set_pid(static_cast<int64_t>(options_.life->number));
  join.set_host("sim");
  join.set_layout(options_.job->layout.Encode());
  v1::ConfigField* field = join.add_numerics();
  field->set_key("sim");
  field->set_value("1");
  return join;
}

v1::MemberStats SimWorker::Stats() const {
  v1::MemberStats stats;
  stats.set_step(core_.step());
  uint64_t units = units_before_;
  if (pass_ != nullptr) {
    units += pass_->units_done();
    stats.set_waits_for(pass_->waits_for());
    stats.set_phase("pass");
  } else {
    stats.set_waits_for(core_.waits_for());
    stats.set_phase("waits for a directive");
  }
  stats.set_units_done(units);
  return stats;
}

std::string SimWorker::WaitsFor() const {
  return pass_ != nullptr
             ? absl::StrCat("pass: ", pass_->waits_for())
             : absl::StrCat("step ", core_.step(), ": ", core_.waits_for());
}

void SimWorker::Join() {
  if (link_ != nullptr) {
    link_->Stop();
  }
  MemberLink::Options link;
  link.join = MakeJoin();
  link.silence_max = options_.job->job.cluster.give_up_after;
  link.on_admitted = [this](const v1::JoinReply& reply) {
    Tell([&](absl::Time now) { core_.OnJoined(reply, now); });
  };
  link.on_directive = [this](const v1::PollReply& reply) {
    if (options_.world->tracing()) {
      options_.world->Trace(absl::StrCat("directive ", reply.number(), " ",
                                         reply.worker().ShortDebugString()));
    }
    Tell([&](absl::Time now) { core_.OnDirective(reply, now); });
  };
  link.stats = [this] { return Stats(); };
  link.on_end = [this](const absl::Status& status) {
    Tell([&](absl::Time now) { core_.OnSessionOver(status, now); });
  };
  link_ = std::make_shared<MemberLink>(options_.world, options_.network,
                                       options_.life, options_.coordinator,
                                       std::move(link));
  link_->Start();
}

void SimWorker::Tell(const std::function<void(absl::Time)>& event) {
  if (over_) {
    return;
  }
  event(options_.world->NowOf(*options_.life));
  if (acting_) {  // Told while carrying something out.
    again_ = true;
    return;
  }
  acting_ = true;
  do {
    again_ = false;
    CarryOut();
  } while (again_ && !over_);
  acting_ = false;
  if (!over_) {
    WakeUp();
  }
}

void SimWorker::WakeUp() {
  const absl::Time wake = core_.NextWake();
  if (wake == absl::InfiniteFuture() || wake == wake_) {
    return;
  }
  wake_ = wake;
  const absl::Time now = options_.world->NowOf(*options_.life);
  options_.world->After(
      std::max(wake - now, absl::Milliseconds(1)), options_.life,
      [self = std::weak_ptr<SimWorker*>(self_), wake] {
        const auto held = self.lock();
        if (held != nullptr && (*held)->wake_ == wake) {
          (*held)->wake_ = absl::InfiniteFuture();
          (*held)->Tell([&](absl::Time at) { (*held)->core_.Tick(at); });
        }
      });
}

void SimWorker::CarryOut() {
  const WorkerCore::Actions actions = core_.TakeActions();
  if (actions.call_off.has_value() && pass_ != nullptr) {
    pass_->CallOff();
  }
  if (actions.start.has_value()) {
    StartPass(*actions.start);
  }
  if (actions.want_placement) {
    AskPlacement();
  }
  for (const v1::ReportRequest& report : actions.reports) {
    if (options_.world->tracing()) {
      options_.world->Trace(
          absl::StrCat("reports ", report.ShortDebugString()));
    }
    link_->Post(report);
  }
  if (actions.rejoin) {
    Join();
  }
  if (actions.exit.has_value()) {
    over_ = true;
    if (pass_ != nullptr) {
      pass_->Abandon();
    }
    WaitForFarewell(*actions.exit, options_.world->now() + kFarewellMax);
  }
}

// What is queued is sent for a bounded time.
void SimWorker::WaitForFarewell(const absl::Status& status,
                                absl::Time deadline) {
  if (link_ == nullptr || link_->over() || link_->queued() == 0 ||
      options_.world->now() >= deadline) {
    options_.exited(status);
    return;
  }
  options_.world->After(
      absl::Milliseconds(20), options_.life,
      [this, self = std::weak_ptr<SimWorker*>(self_), status, deadline] {
        if (!self.expired()) {
          WaitForFarewell(status, deadline);
        }
      });
}

void SimWorker::AskPlacement() {
  const auto link = link_;
  link->AskPlacement([this, link, self = std::weak_ptr<SimWorker*>(self_)](
                         const absl::StatusOr<v1::Placement>& placement) {
    if (self.expired() || link != link_) {
      return;
    }
    if (!placement.ok()) {
      Tell([&](absl::Time now) { core_.OnPlacementFailed(now); });
      return;
    }
    placement_ = *placement;
    absl::StatusOr<ChunkTable> table =
        ChunkTable::Build(options_.job->layout, placement->chunk_elems());
    BALLAST_CHECK(table.ok());
    table_ = std::make_shared<const ChunkTable>(*std::move(table));
    const WorkerCore::View view = WorkerCore::ViewOf(*placement);
    Tell([&](absl::Time now) { core_.OnPlacement(view, now); });
  });
}

void SimWorker::StartPass(const WorkerCore::Pass& pass) {
  BALLAST_CHECK(pass_ == nullptr && placement_.has_value());
  if (options_.world->tracing()) {
    std::string parts;
    for (const WorkerCore::Part& part : pass.parts) {
      absl::StrAppend(&parts, " [", part.node.first, "+", part.node.count,
                      ") to ", part.servers.size());
    }
    options_.world->Trace(absl::StrCat("pass ", pass.id, " step ", pass.step,
                                       pass.evaluate ? " eval" : "", parts));
  }
  SimPass::Options run;
  run.world = options_.world;
  run.network = options_.network;
  run.life = options_.life;
  run.job = options_.job;
  run.twin = options_.twin;
  run.table = table_;
  run.placement = *placement_;
  run.pass = pass;
  run.silence_max = options_.job->job.cluster.progress_timeout;
  run.unit_time = options_.unit_time;
  run.staging_bytes = options_.staging_bytes;
  const uint64_t id = pass.id;
  run.progress = [this, id] {
    Tell([&](absl::Time now) { core_.OnPassProgress(id, now); });
  };
  run.all_pushed = [this, id] {
    Tell([&](absl::Time now) { core_.OnAllPushed(id, now); });
  };
  run.ended = [this, self = std::weak_ptr<SimWorker*>(self_)](
                  const WorkerCore::PassEnd& end) {
    if (self.expired()) {
      return;
    }
    if (options_.world->tracing()) {
      options_.world->Trace(
          absl::StrCat("pass ", end.id, " ended: ", end.status.ToString()));
    }
    units_before_ += pass_->units_done();
    pass_ = nullptr;
    Tell([&](absl::Time now) { core_.OnPassEnded(end, now); });
  };
  pass_ = std::make_shared<SimPass>(std::move(run));
  pass_->Start();
}

}  // namespace ballast::sim
