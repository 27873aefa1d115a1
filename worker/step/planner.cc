// SPDX-License-Identifier: Apache-2.0
#include "worker/step/planner.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "common/units.h"
#include "worker/step/executor.h"

namespace ballast {
namespace {

// Budget of a run that only asks how much it takes.
constexpr uint64_t kUnlimited = uint64_t{1} << 60;
constexpr char kHostKey[] = "worker.host_memory";
// What servers put into one answer when chunks are smaller.
constexpr uint64_t kReplyBytes = 4 << 20;

class NoWeights : public WeightSource {
 public:
  absl::Status Prefetch(uint32_t, uint64_t, StreamMark,
                        absl::Span<std::byte* const>) override {
    return absl::OkStatus();
  }
  absl::Status Wait(uint32_t) override { return absl::OkStatus(); }
  void Abandon() override {}
};

class NoGradients : public GradientSink {
 public:
  absl::Status Push(const GradientPiece&) override { return absl::OkStatus(); }
};

// Notes what is on the device when backward begins.
class TurnObserver : public PassObserver {
 public:
  explicit TurnObserver(const Device* device) : device_(*device) {}
  absl::Status OnUnit(PassPhase phase, uint32_t) override {
    if (phase == PassPhase::kBackward && used_at_turn_ == 0) {
      used_at_turn_ = device_.used_bytes();
    }
    return absl::OkStatus();
  }
  uint64_t used_at_turn() const { return used_at_turn_; }

 private:
  const Device& device_;
  uint64_t used_at_turn_ = 0;
};

struct Peaks {
  uint64_t device = 0;
  uint64_t host = 0;
  uint64_t device_at_turn = 0;
};

PassShape ShapeOf(const Assignment& assignment) {
  PassShape shape;
  for (const Span& node : assignment.nodes) {
    shape.push_back(node.count);
  }
  return shape;
}

class Planner {
 public:
  Planner(const Job& job, ModelFamily* family, Kernels* kernels);
  absl::StatusOr<StepPlan> Plan();

 private:
  // Runs one pass over no memory. Errors: RESOURCE_EXHAUSTED  as a real one.
  absl::StatusOr<Peaks> TryPass(const StepPolicy& policy,
                                const Assignment& assignment, bool evaluate,
                                uint64_t device_bytes,
                                uint64_t host_bytes) const;
  // Highest of training and evaluation.
  absl::StatusOr<Peaks> TryShape(const StepPolicy& policy,
                                 const Assignment& assignment,
                                 uint64_t device_bytes,
                                 uint64_t host_bytes) const;
  bool Fits(const StepPolicy& policy, uint64_t host_bytes) const;
  // The policy that fits with the least on the device; nullopt: none does.
  std::optional<StepPolicy> Narrowest(uint64_t host_bytes) const;
  // The most ample policy that fits, given that `policy` does.
  StepPolicy Widen(StepPolicy policy, uint64_t host_bytes) const;
  absl::Status Refusal(const StepPolicy& frugal, uint64_t beside) const;
  void AddShapes(StepPlan* plan) const;
  void Report(StepPlan* plan) const;
  uint64_t UnitBytes(uint32_t unit, bool gradient) const;
  // Ids and targets of one micro-batch.
  uint64_t BatchBytes() const { return family_.rows() * 2 * sizeof(uint32_t); }

  const Job& job_;
  ModelFamily& family_;
  Kernels& kernels_;
  const uint32_t middle_;              // Units that the policy counts over.
  std::vector<Assignment> dealt_;      // One of each shape that workers get.
  uint32_t share_ = 1;                 // Micro-batches of the largest.
  uint64_t largest_chunk_bytes_ = 0;   // Of an fp32 gradient.
  uint64_t largest_served_bytes_ = 0;  // Of a fetched chunk.
};

Planner::Planner(const Job& job, ModelFamily* family, Kernels* kernels)
    : job_(job),
      family_(*family),
      kernels_(*kernels),
      middle_(static_cast<uint32_t>(family->layout().units.size() - 2)) {
  const uint32_t total = job.batch.micro_batches;
  std::vector<PassShape> seen;
  for (const Span& range : DealSpans(total, job.worker.count)) {
    Assignment assignment = {.total = total, .nodes = Cover(range, total)};
    share_ = std::max(share_, range.count);
    const PassShape shape = ShapeOf(assignment);
    if (std::find(seen.begin(), seen.end(), shape) == seen.end()) {
      seen.push_back(shape);
      dealt_.push_back(std::move(assignment));
    }
  }
  for (const TensorSpec& tensor : family_.layout().tensors) {
    const uint64_t block = tensor.block_elems();
    const uint64_t elems =
        std::min(tensor.elem_count(),
                 std::max(block, job.server.chunk_elems / block * block));
    largest_chunk_bytes_ =
        std::max(largest_chunk_bytes_, elems * sizeof(float));
    largest_served_bytes_ =
        std::max(largest_served_bytes_, elems * DTypeBytes(tensor.served));
  }
}

uint64_t Planner::UnitBytes(uint32_t unit, bool gradient) const {
  uint64_t bytes = 0;
  for (const TensorUse& use : family_.layout().units[unit].tensors) {
    const TensorSpec& tensor = family_.layout().tensors[use.tensor];
    bytes += tensor.elem_count() *
             DTypeBytes(gradient ? DType::kF32 : tensor.served);
  }
  return bytes;
}

absl::StatusOr<Peaks> Planner::TryPass(const StepPolicy& policy,
                                       const Assignment& assignment,
                                       bool evaluate, uint64_t device_bytes,
                                       uint64_t host_bytes) const {
  const std::unique_ptr<Device> device =
      MakePlanningDevice(device_bytes, &kernels_);
  const std::unique_ptr<Arena> host =
      Arena::CreateWithoutMemory({.name = kHostKey, .bytes = host_bytes});
  StepExecutor executor(&family_, device.get(), host.get(), policy);
  const std::vector<MicroBatch> batches(assignment.micro_batches());
  NoWeights weights;
  NoGradients gradients;
  TurnObserver observer(device.get());
  if (evaluate) {
    BALLAST_RETURN_IF_ERROR(
        executor.Evaluate(0, batches, &weights, &observer).status());
  } else {
    BALLAST_RETURN_IF_ERROR(
        executor.Train(assignment, batches, &weights, &gradients, &observer)
            .status());
  }
  return Peaks{device->peak_bytes(), host->peak_bytes(),
               observer.used_at_turn()};
}

absl::StatusOr<Peaks> Planner::TryShape(const StepPolicy& policy,
                                        const Assignment& assignment,
                                        uint64_t device_bytes,
                                        uint64_t host_bytes) const {
  BALLAST_ASSIGN_OR_RETURN(
      Peaks peaks, TryPass(policy, assignment, /*evaluate=*/false, device_bytes,
                           host_bytes));
  BALLAST_ASSIGN_OR_RETURN(
      const Peaks evaluation,
      TryPass(policy, assignment, /*evaluate=*/true, device_bytes, host_bytes));
  peaks.device = std::max(peaks.device, evaluation.device);
  peaks.host = std::max(peaks.host, evaluation.host);
  return peaks;
}

bool Planner::Fits(const StepPolicy& policy, uint64_t host_bytes) const {
  return std::all_of(
      dealt_.begin(), dealt_.end(), [&](const Assignment& assignment) {
        return TryShape(policy, assignment, job_.worker.memory, host_bytes)
            .ok();
      });
}

std::optional<StepPolicy> Planner::Narrowest(uint64_t host_bytes) const {
  StepPolicy policy;
  const auto fits = [&] { return Fits(policy, host_bytes); };
  if (fits()) {
    return policy;
  }
  // What saves the device costs the host; a scarce host gets it back step by
  // step.
  policy.host_sums_from = job_.batch.micro_batches;
  if (fits()) {
    return policy;
  }
  policy.flow_on_device = true;
  if (fits()) {
    return policy;
  }
  // Few inputs on the device may still be too many for the host, and many too
  // many for the device: no order to search by. Sixteen tries are enough to
  // find a range that is worth having.
  const uint32_t step = std::max(1u, middle_ / 16);
  for (uint32_t inputs = step; inputs < middle_ + step; inputs += step) {
    policy.device_inputs = std::min(inputs, middle_);
    if (fits()) {
      return policy;
    }
  }
  return std::nullopt;
}

StepPolicy Planner::Widen(StepPolicy policy, uint64_t host_bytes) const {
  const auto widen = [&](uint32_t StepPolicy::*field, uint32_t value) {
    StepPolicy wider = policy;
    wider.*field = value;
    if (wider == policy || Fits(wider, host_bytes)) {
      policy = wider;
      return true;
    }
    return false;
  };
  // The largest count that fits: what fits with n fits with fewer.
  const auto widen_most = [&](uint32_t StepPolicy::*field) {
    uint32_t low = 0;
    uint32_t high = middle_;
    while (low < high) {
      // All of them first: ample budgets are common.
      const uint32_t count =
          high == middle_ ? middle_ : low + (high - low + 1) / 2;
      if (widen(field, count)) {
        low = count;
      } else {
        high = count - 1;
      }
    }
  };
  // Most time saved a byte first. Overlap with the network, then copies that
  // happen for every micro-batch, then what happens once a step; recomputing
  // costs most but its memory is far larger than a unit's weights.
  widen(&StepPolicy::prefetch, std::min(job_.worker.prefetch, 1u));
  widen(&StepPolicy::host_sums_from, std::max(2u, policy.host_sums_from));
  StepPolicy flowing = policy;
  flowing.flow_on_device = true;
  if (Fits(flowing, host_bytes)) {
    policy = flowing;
  }
  for (uint32_t from = share_; from > policy.host_sums_from; from /= 2) {
    if (widen(&StepPolicy::host_sums_from, from)) {
      break;
    }
  }
  for (uint32_t ahead = job_.worker.prefetch; ahead > policy.prefetch;
       --ahead) {
    widen(&StepPolicy::prefetch, ahead);
  }
  widen_most(&StepPolicy::resident_units);
  widen_most(&StepPolicy::kept_units);
  widen_most(&StepPolicy::device_inputs);
  return policy;
}

absl::Status Planner::Refusal(const StepPolicy& frugal, uint64_t beside) const {
  uint64_t device_bytes = 0;
  uint64_t host_bytes = 0;
  absl::Status refused;
  const uint64_t host_left =
      job_.worker.host_memory - std::min(beside, job_.worker.host_memory);
  for (const Assignment& assignment : dealt_) {
    BALLAST_ASSIGN_OR_RETURN(
        const Peaks peaks,
        TryShape(frugal, assignment, kUnlimited, kUnlimited));
    device_bytes = std::max(device_bytes, peaks.device);
    host_bytes = std::max(host_bytes, peaks.host);
    refused.Update(
        TryShape(frugal, assignment, job_.worker.memory, host_left).status());
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "the model does not fit the worker: ", refused.message(),
      "; the smallest worker.memory that would do is ", device_bytes,
      " bytes (", FormatBytes(device_bytes), "), with worker.host_memory ",
      host_bytes + beside, " bytes (", FormatBytes(host_bytes + beside),
      "); smaller micro-batches need less"));
}

void Planner::AddShapes(StepPlan* plan) const {
  // Other shapes come up when workers come and go; those that happen to fit
  // below the peaks of the dealt ones are allowed too.
  std::vector<Assignment> candidates = dealt_;
  for (uint32_t count = 1; count <= share_; count *= 2) {
    candidates.push_back({.total = count, .nodes = {{0, count}}});
  }
  for (const Assignment& assignment : candidates) {
    const PassShape shape = ShapeOf(assignment);
    const auto peaks = TryShape(plan->policy, assignment, job_.worker.memory,
                                plan->host_step_bytes);
    if (!peaks.ok() || std::find(plan->shapes.begin(), plan->shapes.end(),
                                 shape) != plan->shapes.end()) {
      continue;
    }
    plan->shapes.push_back(shape);
    plan->micro_batches_max =
        std::max(plan->micro_batches_max, assignment.micro_batches());
    plan->device_bytes = std::max(plan->device_bytes, peaks->device);
  }
}

void Planner::Report(StepPlan* plan) const {
  v1::WorkerPlan& report = plan->report;
  const ModelLayout& layout = family_.layout();
  uint64_t largest = 0;
  for (uint32_t unit = 0; unit < layout.units.size(); ++unit) {
    largest = std::max(largest, UnitBytes(unit, /*gradient=*/false));
  }
  const StepPolicy all = {.kept_units = middle_,
                          .device_inputs = middle_,
                          .flow_on_device = true,
                          .host_sums_from = job_.batch.micro_batches};
  const uint32_t total = job_.batch.micro_batches;
  const auto whole = TryPass(all, {.total = total, .nodes = {{0, total}}},
                             /*evaluate=*/false, kUnlimited, kUnlimited);
  const StepPolicy& policy = plan->policy;
  report.set_budget_bytes(job_.worker.memory);
  report.set_peak_bytes(plan->device_bytes);
  report.set_largest_unit_bytes(largest);
  report.set_weights_bytes(layout.served_bytes());
  report.set_activation_bytes(
      whole->device_at_turn -
      UnitBytes(static_cast<uint32_t>(layout.units.size() - 1), false));
  report.set_host_budget_bytes(job_.worker.host_memory);
  report.set_host_peak_bytes(plan->host_bytes());
  report.set_prefetch_units(policy.prefetch);
  report.set_resident_units(policy.resident_units);
  report.set_recomputed_units(middle_ - policy.kept_units);
  report.set_activations_on_host(policy.device_inputs < middle_);
  report.set_summary(absl::StrCat(
      FormatBytes(plan->device_bytes), " of ", FormatBytes(job_.worker.memory),
      ": prefetch ", policy.prefetch, ", weights of ", policy.resident_units,
      " and activations of ", policy.kept_units, " of ", middle_,
      " units stay, inputs of ", middle_ - policy.device_inputs,
      " wait on the host"));
}

absl::StatusOr<StepPlan> Planner::Plan() {
  uint64_t largest_gradient = 0;
  uint64_t largest_unit = 0;
  for (uint32_t unit = 0; unit < family_.layout().units.size(); ++unit) {
    largest_gradient =
        std::max(largest_gradient, UnitBytes(unit, /*gradient=*/true));
    largest_unit = std::max(largest_unit, UnitBytes(unit, /*gradient=*/false));
  }
  StepPlan plan;
  // gRPC assembles one message a server while another is copied out.
  plan.receive_bytes =
      uint64_t{2} * job_.server.count *
      std::max(largest_served_bytes_, std::min(kReplyBytes, largest_unit));
  plan.batch_bytes = (share_ + Loader::kAheadMax + 1) * BatchBytes();
  // Room for a unit to leave while the next one comes, or for one chunk.
  plan.staging_bytes = std::max(largest_chunk_bytes_, 2 * largest_gradient);
  // What is beside the step, whose own part is not known yet.
  const auto host_left = [&] {
    return job_.worker.host_memory -
           std::min(plan.host_bytes(), job_.worker.host_memory);
  };
  std::optional<StepPolicy> start = Narrowest(host_left());
  if (!start.has_value()) {
    plan.staging_bytes = largest_chunk_bytes_;
    if (plan.host_bytes() <= job_.worker.host_memory) {
      start = Narrowest(host_left());
    }
    if (!start.has_value()) {
      return Refusal(StepPolicy(), plan.host_bytes());
    }
  }
  plan.policy = Widen(*start, host_left());
  for (const Assignment& assignment : dealt_) {
    BALLAST_ASSIGN_OR_RETURN(
        const Peaks peaks,
        TryShape(plan.policy, assignment, kUnlimited, kUnlimited));
    plan.host_step_bytes = std::max(plan.host_step_bytes, peaks.host);
  }
  AddShapes(&plan);
  Report(&plan);
  return plan;
}

}  // namespace

absl::StatusOr<StepPlan> PlanStep(const Job& job, ModelFamily* family,
                                  Kernels* kernels) {
  return Planner(job, family, kernels).Plan();
}

std::vector<Assignment> CutAssignment(const Assignment& assignment,
                                      const StepPlan& plan) {
  const auto planned = [&](const PassShape& shape) {
    return std::find(plan.shapes.begin(), plan.shapes.end(), shape) !=
           plan.shapes.end();
  };
  if (planned(ShapeOf(assignment))) {
    return {assignment};
  }
  std::vector<Assignment> parts;
  const std::function<void(const Span&)> cut = [&](const Span& node) {
    if (node.count == 1 || planned({node.count})) {
      parts.push_back({assignment.version, assignment.total, {node}});
    } else {
      cut(LeftChild(node));
      cut(RightChild(node));
    }
  };
  for (const Span& node : assignment.nodes) {
    cut(node);
  }
  return parts;
}

}  // namespace ballast
