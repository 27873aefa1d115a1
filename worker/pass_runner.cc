// SPDX-License-Identifier: Apache-2.0
#include "worker/pass_runner.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/crash_point.h"
#include "common/log.h"
#include "common/memory_setup.h"
#include "common/status_macros.h"
#include "kernels/cpu_kernels.h"

namespace ballast {
namespace {

constexpr uint64_t kAllPasses = ~uint64_t{0};

int KernelThreads(const Job& job) {
  if (job.worker.threads > 0) {
    return static_cast<int>(job.worker.threads);
  }
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  return static_cast<int>(std::max(1u, cores / job.worker.count));
}

}  // namespace

// Tells status what the pass does, and the pass when to stop.
class PassRunner::Observer : public PassObserver {
 public:
  explicit Observer(PassRunner* runner) : runner_(*runner) {}

  absl::Status OnUnit(PassPhase phase, uint32_t unit) override {
    // Only shown, so no order with other memory is needed.
    phase_.store(static_cast<int>(phase), std::memory_order_relaxed);
    unit_.store(static_cast<int>(unit), std::memory_order_relaxed);
    runner_.units_done_.fetch_add(1, std::memory_order_relaxed);
    if (phase == PassPhase::kForward) {
      BALLAST_CRASH_POINT("worker.pass.forward");
    } else if (phase == PassPhase::kBackward) {
      BALLAST_CRASH_POINT("worker.pass.backward");
    }
    return runner_.CalledOff(pass_)
               ? absl::CancelledError("the pass was called off")
               : absl::OkStatus();
  }
  void Begin(uint64_t pass) {
    pass_ = pass;
    unit_.store(kPreparing, std::memory_order_relaxed);
  }
  void Rest() { unit_.store(kResting, std::memory_order_relaxed); }

  std::string Phase() const {
    const int unit = unit_.load(std::memory_order_relaxed);
    if (unit < 0) {
      return unit == kResting ? "waits for a directive" : "opens a pass";
    }
    constexpr std::array kNames = {"forward ", "backward ", "evaluate "};
    return absl::StrCat(
        kNames[static_cast<size_t>(phase_.load(std::memory_order_relaxed))],
        runner_.layout().units[static_cast<size_t>(unit)].name);
  }

 private:
  // In place of a unit.
  static constexpr int kResting = -1;
  static constexpr int kPreparing = -2;

  PassRunner& runner_;
  uint64_t pass_ = 0;  // Of the runner's thread.
  std::atomic<int> phase_ = 0;
  std::atomic<int> unit_ = kResting;
};

PassRunner::PassRunner(const Job& job, std::string name, Callbacks callbacks)
    : job_(job),
      name_(std::move(name)),
      callbacks_(std::move(callbacks)),
      observer_(std::make_unique<Observer>(this)) {}

absl::StatusOr<std::unique_ptr<PassRunner>> PassRunner::Create(
    const Job& job, const std::string& name, Callbacks callbacks) {
  auto runner = std::unique_ptr<PassRunner>(
      new PassRunner(job, name, std::move(callbacks)));
  BALLAST_RETURN_IF_ERROR(runner->Prepare());
  runner->thread_ = std::thread([raw = runner.get()] { raw->RunThread(); });
  return runner;
}

PassRunner::~PassRunner() {
  if (!thread_.joinable()) {
    return;
  }
  CallOff(kAllPasses);
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

absl::Status PassRunner::Prepare() {
  BALLAST_RETURN_IF_ERROR(CheckCpuForKernels());
  if (job_.precision.compute_dtype == DType::kBF16 && !CpuHasBF16Products()) {
    return absl::FailedPreconditionError(
        "precision.compute_dtype is bf16; this processor has no bf16 products, "
        "want fp32");
  }
  BALLAST_ASSIGN_OR_RETURN(family_, MakeModelFamily(job_));
  BALLAST_ASSIGN_OR_RETURN(loader_, Loader::Open(job_));
  std::unique_ptr<Kernels> kernels = MakeCpuKernels(KernelThreads(job_));
  BALLAST_ASSIGN_OR_RETURN(plan_, PlanStep(job_, family_.get(), kernels.get()));
  base_bytes_ = ResidentBytes();
  // The plan is exact: more would be touched and never used.
  BALLAST_ASSIGN_OR_RETURN(
      device_, CpuDevice::Create(plan_.device_bytes, std::move(kernels)));
  BALLAST_ASSIGN_OR_RETURN(host_,
                           Arena::Create({.name = "worker.host_memory",
                                          .bytes = plan_.host_step_bytes}));
  executor_ = std::make_unique<StepExecutor>(family_.get(), device_.get(),
                                             host_.get(), plan_.policy);
  BALLAST_ASSIGN_OR_RETURN(
      client_,
      ShardClient::Create({.name = name_,
                           .staging_bytes = plan_.staging_bytes,
                           .silence_max = job_.cluster.progress_timeout,
                           .device = device_.get()}));
  LogEvent(Severity::kInfo, "planned", {{"plan", plan_.report.summary()}});
  return absl::OkStatus();
}

void PassRunner::Run(WorkerCore::Pass pass,
                     std::shared_ptr<const PlacementMap> placement) {
  MutexLock lock(&mutex_);
  next_.emplace(std::move(pass), std::move(placement));
  changed_.NotifyAll();
}

void PassRunner::CallOff(uint64_t pass) {
  uint64_t before = called_off_.load(std::memory_order_relaxed);
  while (before < pass && !called_off_.compare_exchange_weak(
                              before, pass, std::memory_order_relaxed)) {
  }
  client_->Cancel(pass);
}

v1::MemberStats PassRunner::Stats() const {
  v1::MemberStats stats;
  stats.set_memory_budget_bytes(job_.worker.memory);
  stats.set_memory_used_bytes(device_->used_bytes());
  stats.set_memory_peak_bytes(device_->peak_bytes());
  stats.set_host_budget_bytes(job_.worker.host_memory);
  stats.set_host_peak_bytes(plan_.host_bytes() - plan_.host_step_bytes +
                            host_->peak_bytes());
  stats.set_base_bytes(base_bytes_);
  stats.set_resident_bytes(ResidentBytes());
  stats.set_minor_faults(MinorFaults());
  stats.set_phase(observer_->Phase());
  stats.set_fetched_bytes(client_->fetched_bytes());
  stats.set_pushed_bytes(client_->pushed_bytes());
  stats.set_units_done(units_done_.load(std::memory_order_relaxed));
  const ShardClient::Waiting waiting = client_->waiting();
  if (!waiting.what.empty()) {
    stats.set_waits_for(waiting.what);
    stats.set_waits_ms(
        absl::ToInt64Milliseconds(MonotonicNow() - waiting.since));
  }
  return stats;
}

void PassRunner::RunThread() {
  while (true) {
    observer_->Rest();
    WorkerCore::Pass pass;
    std::shared_ptr<const PlacementMap> placement;
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && !next_.has_value()) {
        changed_.Wait(&mutex_);
      }
      if (stopping_) {
        return;
      }
      std::tie(pass, placement) = *std::move(next_);
      next_.reset();
    }
    client_->SetPlacement(std::move(placement));
    callbacks_.on_end(RunPass(pass));
  }
}

WorkerCore::PassEnd PassRunner::RunPass(const WorkerCore::Pass& pass) {
  observer_->Begin(pass.id);
  WorkerCore::PassEnd end;
  end.id = pass.id;
  std::vector<ShardClient::Target> targets;
  if (!pass.evaluate) {
    for (const WorkerCore::Part& part : pass.parts) {
      targets.push_back({part.node, part.servers});
    }
  }
  end.status = client_->Begin(pass.id,
                              {.timeline = pass.timeline,
                               .step = pass.step,
                               .incarnation = pass.incarnation,
                               .placement_version = 0},
                              std::move(targets));
  if (end.status.ok()) {
    end.status =
        pass.evaluate ? Evaluate(pass, &end.losses) : Train(pass, &end.figures);
  }
  client_->Drop();
  for (const ShardClient::Ack& ack : client_->Acks()) {
    end.acks.push_back(
        {pass.parts[ack.target].node, ack.server, ack.incarnation});
  }
  if (absl::IsDeadlineExceeded(end.status)) {
    client_->Reconnect();  // A connection may lead nowhere.
  }
  return end;
}

absl::StatusOr<std::vector<MicroBatch>> PassRunner::TakeBatches(
    const std::vector<Span>& spans, uint64_t step, bool eval) {
  std::vector<MicroBatch> batches;
  for (const Span& span : spans) {
    for (uint32_t m = span.first; m < span.end(); ++m) {
      BALLAST_ASSIGN_OR_RETURN(
          MicroBatch batch,
          loader_->Take({.step = step, .micro_batch = m, .eval = eval}));
      batches.push_back(std::move(batch));
    }
  }
  return batches;
}

absl::Status PassRunner::Train(const WorkerCore::Pass& pass,
                               v1::WorkerDone* figures) {
  const uint64_t faults = MinorFaults();
  const uint64_t pushed = client_->pushed_bytes();
  const uint64_t fetched = client_->fetched_bytes();
  Assignment whole = {
      .version = pass.version, .total = job_.batch.micro_batches, .nodes = {}};
  for (const WorkerCore::Part& part : pass.parts) {
    whole.nodes.push_back(part.node);
  }
  // The loader gets this step and most likely the next one's.
  std::vector<BatchName> names;
  for (const uint64_t step : {pass.step, pass.step + 1}) {
    for (const Span& node : whole.nodes) {
      for (uint32_t m = node.first; m < node.end(); ++m) {
        names.push_back({.step = step, .micro_batch = m});
      }
    }
  }
  loader_->Announce(names);
  PassTimes times;
  for (const Assignment& part : CutAssignment(whole, plan_)) {
    BALLAST_ASSIGN_OR_RETURN(
        const std::vector<MicroBatch> batches,
        TakeBatches(part.nodes, pass.step, /*eval=*/false));
    BALLAST_ASSIGN_OR_RETURN(const TrainResult result,
                             executor_->Train(part, batches, client_.get(),
                                              client_.get(), observer_.get()));
    times.forward += result.times.forward;
    times.backward += result.times.backward;
    times.fetch_wait += result.times.fetch_wait;
  }
  BALLAST_CRASH_POINT("worker.pushed.before_end");
  callbacks_.on_all_pushed(pass.id);
  const absl::Duration waited = client_->push_waited();
  const absl::Status status = client_->End();
  figures->set_pushed_bytes(client_->pushed_bytes() - pushed);
  figures->set_fetched_bytes(client_->fetched_bytes() - fetched);
  figures->set_minor_faults(MinorFaults() - faults);
  figures->set_forward_seconds(absl::ToDoubleSeconds(times.forward));
  figures->set_backward_seconds(absl::ToDoubleSeconds(times.backward - waited));
  figures->set_fetch_wait_seconds(absl::ToDoubleSeconds(times.fetch_wait));
  figures->set_push_wait_seconds(absl::ToDoubleSeconds(client_->push_waited()));
  BALLAST_CRASH_POINT("worker.done");
  return status;
}

absl::Status PassRunner::Evaluate(const WorkerCore::Pass& pass,
                                  std::vector<v1::MicroBatchLoss>* losses) {
  for (const WorkerCore::Part& whole : pass.parts) {
    for (Span rest = whole.node; rest.count > 0;) {
      const Span part = {rest.first,
                         std::min(rest.count, plan_.micro_batches_max)};
      BALLAST_ASSIGN_OR_RETURN(const std::vector<MicroBatch> batches,
                               TakeBatches({part}, 0, /*eval=*/true));
      BALLAST_ASSIGN_OR_RETURN(
          const std::vector<double> sums,
          executor_->Evaluate(pass.version, batches, client_.get(),
                              observer_.get()));
      for (uint32_t i = 0; i < part.count; ++i) {
        v1::MicroBatchLoss& loss = losses->emplace_back();
        loss.set_micro_batch(part.first + i);
        loss.set_loss_sum(sums[i]);
      }
      rest = {part.end(), rest.count - part.count};
    }
  }
  return absl::OkStatus();
}

}  // namespace ballast
