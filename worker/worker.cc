// SPDX-License-Identifier: Apache-2.0
#include "worker/worker.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/job_file.h"
#include "common/log.h"
#include "common/memory_setup.h"
#include "common/status_macros.h"
#include "kernels/cpu_kernels.h"

namespace ballast {
namespace {

// Between attempts while a server cannot be reached.
constexpr absl::Duration kRetryPause = absl::Milliseconds(200);
// For a last word to the coordinator before this process ends.
constexpr absl::Duration kFarewellMax = absl::Seconds(5);

int KernelThreads(const Job& job) {
  if (job.worker.threads > 0) {
    return static_cast<int>(job.worker.threads);
  }
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  return static_cast<int>(std::max(1u, cores / job.worker.count));
}

std::vector<Span> SpansOf(const v1::WorkerDirective& directive) {
  std::vector<Span> spans;
  for (const v1::MicroBatchSpan& span : directive.spans()) {
    spans.push_back({span.first(), span.count()});
  }
  std::sort(spans.begin(), spans.end());
  return spans;
}

// Errors that another attempt may not meet: a server that is gone, comes back
// or has moved on.
bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status) ||
         absl::IsCancelled(status);
}

}  // namespace

// Tells status what the step's thread does, and the step when to stop.
class Worker::Observer : public PassObserver {
 public:
  explicit Observer(const Worker* worker) : worker_(*worker) {}

  absl::Status OnUnit(PassPhase phase, uint32_t unit) override {
    // Only shown, so no order with other memory is needed.
    phase_.store(static_cast<int>(phase), std::memory_order_relaxed);
    unit_.store(static_cast<int>(unit), std::memory_order_relaxed);
    return worker_.CalledOff() ? absl::CancelledError("the pass was called off")
                               : absl::OkStatus();
  }
  void Rest() { unit_.store(kResting, std::memory_order_relaxed); }
  void Prepare() { unit_.store(kPreparing, std::memory_order_relaxed); }

  std::string Phase() const {
    const int unit = unit_.load(std::memory_order_relaxed);
    if (unit < 0) {
      return unit == kResting ? "waits for a directive" : "opens a pass";
    }
    constexpr std::array kNames = {"forward ", "backward ", "evaluate "};
    return absl::StrCat(
        kNames[static_cast<size_t>(phase_.load(std::memory_order_relaxed))],
        worker_.family_->layout().units[static_cast<size_t>(unit)].name);
  }

 private:
  // In place of a unit.
  static constexpr int kResting = -1;
  static constexpr int kPreparing = -2;

  const Worker& worker_;
  std::atomic<int> phase_ = 0;
  std::atomic<int> unit_ = kResting;
};

Worker::Worker(const Job& job, std::string coordinator, std::string name)
    : job_(job),
      coordinator_(std::move(coordinator)),
      name_(std::move(name)),
      observer_(std::make_unique<Observer>(this)) {}

Worker::~Worker() {
  if (session_ != nullptr) {
    session_->Stop();
  }
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(
    const Job& job, const std::string& coordinator, const std::string& name) {
  auto worker = std::unique_ptr<Worker>(new Worker(job, coordinator, name));
  BALLAST_RETURN_IF_ERROR(worker->Prepare());
  return worker;
}

absl::Status Worker::Prepare() {
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

v1::JoinRequest Worker::MakeJoin() const {
  v1::JoinRequest join;
  join.set_role(v1::ROLE_WORKER);
  join.set_name(name_);
  join.set_pid(getpid());
  std::array<char, 256> host = {};
  gethostname(host.data(), host.size() - 1);
  join.set_host(host.data());
  for (const auto& [key, value] : NumericsFields(job_)) {
    v1::ConfigField* const field = join.add_numerics();
    field->set_key(key);
    field->set_value(value);
  }
  v1::ConfigField* const kernels = join.add_numerics();
  kernels->set_key("kernels");
  kernels->set_value(device_->kernels().Identity());
  for (const auto& [key, value] : OperationsFields(job_)) {
    v1::ConfigField* const field = join.add_operations();
    field->set_key(key);
    field->set_value(value);
  }
  join.set_layout(family_->layout().Encode());
  *join.mutable_plan() = plan_.report;
  return join;
}

v1::MemberStats Worker::Stats() const {
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
  const ShardClient::Waiting waiting = client_->waiting();
  if (!waiting.what.empty()) {
    stats.set_waits_for(waiting.what);
    stats.set_waits_ms(
        absl::ToInt64Milliseconds(MonotonicNow() - waiting.since));
  }
  MutexLock lock(&mutex_);
  stats.set_step(current_.step());
  return stats;
}

void Worker::TakeDirective(const v1::PollReply& reply) {
  bool cancel = false;
  {
    MutexLock lock(&mutex_);
    newest_ = reply;
    // Once all is pushed only acknowledgements are missing, and the decision
    // that a new directive follows may overtake them.
    cancel = Outdated() && !all_pushed_;
    called_off_ = called_off_ || cancel;
    changed_.NotifyAll();
  }
  if (cancel) {
    client_->Cancel();
  }
}

bool Worker::Outdated() const {
  const v1::WorkerDirective& next = newest_->worker();
  // The same step with other spans is finished first: names make it useful.
  return current_.task() != v1::WORKER_WAIT &&
         (next.task() != current_.task() ||
          next.timeline() != current_.timeline() ||
          next.step() != current_.step());
}

void Worker::TakeEnd(const absl::Status& status) {
  {
    MutexLock lock(&mutex_);
    end_ = status;
    called_off_ = true;
    changed_.NotifyAll();
  }
  client_->Cancel();
}

bool Worker::CalledOff() const {
  MutexLock lock(&mutex_);
  return called_off_;
}

absl::StatusOr<v1::PollReply> Worker::NextDirective(uint64_t seen) {
  MutexLock lock(&mutex_);
  current_.Clear();
  while (true) {
    if (end_.has_value()) {
      return *end_;
    }
    if (newest_.has_value() && newest_->number() > seen) {
      current_ = newest_->worker();
      called_off_ = false;
      all_pushed_ = false;
      return *newest_;
    }
    changed_.Wait(&mutex_);
  }
}

absl::Status Worker::Run() {
  // A fenced worker begins a new life; each takes a round trip to the
  // coordinator, which refuses what must not come back.
  while (true) {
    const absl::Status status = RunLife();
    client_->Drop();
    if (session_ != nullptr) {
      session_->Stop();
    }
    if (!absl::IsAborted(status)) {
      return status;
    }
    LogEvent(Severity::kWarn, "fenced", {{"why", status.message()}});
    MutexLock lock(&mutex_);
    end_.reset();
    newest_.reset();
  }
}

absl::Status Worker::RunLife() {
  MemberSession::Options options;
  options.coordinator = coordinator_;
  options.join = MakeJoin();
  options.silence_max = job_.cluster.progress_timeout;
  options.on_directive = [this](const v1::PollReply& reply) {
    TakeDirective(reply);
  };
  options.stats = [this] { return Stats(); };
  options.on_end = [this](const absl::Status& status) { TakeEnd(status); };
  BALLAST_ASSIGN_OR_RETURN(session_, MemberSession::Start(std::move(options)));
  LogEvent(Severity::kInfo, "joined",
           {{"incarnation", session_->admission().incarnation()},
            {"timeline", session_->admission().timeline()}});
  uint64_t seen = 0;
  while (true) {
    observer_->Rest();
    BALLAST_ASSIGN_OR_RETURN(const v1::PollReply reply, NextDirective(seen));
    seen = reply.number();
    if (reply.worker().task() == v1::WORKER_EXIT) {
      LogEvent(Severity::kInfo, "leaving", {{"why", reply.worker().reason()}});
      v1::ReportRequest request;
      request.set_timeline(reply.worker().timeline());
      request.mutable_leaving();
      session_->Report(std::move(request), kFarewellMax).IgnoreError();
      return absl::OkStatus();
    }
    const absl::Status status = Work(reply);
    if (!status.ok() && !CalledOff()) {
      ReportFatal(status);
      return status;
    }
  }
}

void Worker::ReportFatal(const absl::Status& status) {
  v1::ReportRequest request;
  {
    MutexLock lock(&mutex_);
    request.set_timeline(current_.timeline());
  }
  request.mutable_fatal()->set_code(static_cast<int>(status.code()));
  request.mutable_fatal()->set_message(
      absl::StrCat(name_, ": ", status.message()));
  session_->Report(std::move(request), kFarewellMax).IgnoreError();
}

absl::Status Worker::Work(const v1::PollReply& reply) {
  if (reply.worker().task() == v1::WORKER_WAIT) {
    return absl::OkStatus();
  }
  const absl::Time give_up = MonotonicNow() + job_.cluster.progress_timeout;
  std::string told;
  while (true) {
    absl::Status status = Attempt(reply.worker());
    if (status.ok()) {
      return status;
    }
    client_->Drop();
    {
      MutexLock lock(&mutex_);
      if (called_off_ || Outdated()) {
        return absl::OkStatus();
      }
      all_pushed_ = false;
    }
    if (!MayPass(status) || MonotonicNow() >= give_up) {
      return absl::Status(
          absl::IsAborted(status) ? absl::StatusCode::kUnavailable
                                  : status.code(),
          absl::StrCat("step ", reply.worker().step(), ": ", status.message()));
    }
    if (told != status.message()) {
      told = std::string(status.message());
      LogEvent(Severity::kWarn, "pass_failed",
               {{"step", reply.worker().step()}, {"why", told}});
    }
    // Links to a server that is gone do not come back by themselves.
    BALLAST_RETURN_IF_ERROR(EnsurePlacement(~uint64_t{0}));
    MutexLock lock(&mutex_);
    if (newest_->number() == reply.number()) {
      changed_.WaitFor(&mutex_, kRetryPause);
    }
  }
}

absl::Status Worker::EnsurePlacement(uint64_t version) {
  if (client_->placement() != nullptr &&
      client_->placement()->version() == version) {
    return absl::OkStatus();
  }
  BALLAST_ASSIGN_OR_RETURN(const v1::Placement placement,
                           session_->GetPlacement());
  BALLAST_ASSIGN_OR_RETURN(PlacementMap map,
                           PlacementMap::Create(placement, family_->layout()));
  client_->SetPlacement(std::move(map));
  return absl::OkStatus();
}

absl::Status Worker::Attempt(const v1::WorkerDirective& directive) {
  observer_->Prepare();
  BALLAST_RETURN_IF_ERROR(EnsurePlacement(directive.placement_version()));
  client_->Begin({.timeline = directive.timeline(),
                  .step = directive.step(),
                  .incarnation = session_->admission().incarnation(),
                  .placement_version = 0},
                 directive.task() == v1::WORKER_TRAIN);
  // A directive that came before Begin cancelled nothing.
  if (CalledOff()) {
    return absl::CancelledError("the pass was called off");
  }
  return directive.task() == v1::WORKER_TRAIN ? Train(directive)
                                              : Evaluate(directive);
}

absl::StatusOr<std::vector<MicroBatch>> Worker::TakeBatches(
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

absl::Status Worker::Train(const v1::WorkerDirective& directive) {
  const uint64_t faults = MinorFaults();
  const uint64_t pushed = client_->pushed_bytes();
  const uint64_t fetched = client_->fetched_bytes();
  const Assignment whole = {.version = directive.step() - 1,
                            .total = job_.batch.micro_batches,
                            .nodes = SpansOf(directive)};
  for (const Span& node : whole.nodes) {
    if (!IsNode(node, whole.total)) {
      return absl::InternalError(absl::StrCat(
          "assigned micro-batches [", node.first, ", ", node.end(), ") of ",
          whole.total, " are not a node of the span tree"));
    }
  }
  // The loader gets this step and most likely the next one's.
  std::vector<BatchName> names;
  for (const uint64_t step : {directive.step(), directive.step() + 1}) {
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
        TakeBatches(part.nodes, directive.step(), /*eval=*/false));
    BALLAST_ASSIGN_OR_RETURN(const TrainResult result,
                             executor_->Train(part, batches, client_.get(),
                                              client_.get(), observer_.get()));
    times.forward += result.times.forward;
    times.backward += result.times.backward;
    times.fetch_wait += result.times.fetch_wait;
  }
  {
    MutexLock lock(&mutex_);
    all_pushed_ = true;
  }
  BALLAST_RETURN_IF_ERROR(client_->End());
  v1::ReportRequest request;
  request.set_timeline(directive.timeline());
  v1::WorkerDone* const done = request.mutable_worker_done();
  done->set_timeline(directive.timeline());
  done->set_step(directive.step());
  done->set_pushed_bytes(client_->pushed_bytes() - pushed);
  done->set_fetched_bytes(client_->fetched_bytes() - fetched);
  done->set_minor_faults(MinorFaults() - faults);
  done->set_forward_seconds(absl::ToDoubleSeconds(times.forward));
  done->set_backward_seconds(
      absl::ToDoubleSeconds(times.backward - client_->push_waited()));
  done->set_fetch_wait_seconds(absl::ToDoubleSeconds(times.fetch_wait));
  done->set_push_wait_seconds(absl::ToDoubleSeconds(client_->push_waited()));
  session_->Post(std::move(request));
  return absl::OkStatus();
}

absl::Status Worker::Evaluate(const v1::WorkerDirective& directive) {
  v1::ReportRequest request;
  request.set_timeline(directive.timeline());
  v1::EvalResult* const result = request.mutable_eval_result();
  result->set_timeline(directive.timeline());
  result->set_step(directive.step());
  for (Span rest : SpansOf(directive)) {
    while (rest.count > 0) {
      const Span part = {rest.first,
                         std::min(rest.count, plan_.micro_batches_max)};
      BALLAST_ASSIGN_OR_RETURN(const std::vector<MicroBatch> batches,
                               TakeBatches({part}, 0, /*eval=*/true));
      BALLAST_ASSIGN_OR_RETURN(
          const std::vector<double> losses,
          executor_->Evaluate(directive.step(), batches, client_.get(),
                              observer_.get()));
      for (uint32_t i = 0; i < part.count; ++i) {
        v1::MicroBatchLoss* const loss = result->add_losses();
        loss->set_micro_batch(part.first + i);
        loss->set_loss_sum(losses[i]);
      }
      rest = {part.end(), rest.count - part.count};
    }
  }
  BALLAST_RETURN_IF_ERROR(client_->End());
  session_->Post(std::move(request));
  return absl::OkStatus();
}

}  // namespace ballast
