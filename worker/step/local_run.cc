// SPDX-License-Identifier: Apache-2.0
#include "worker/step/local_run.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "kernels/update.h"
#include "worker/model/family.h"
#include "worker/step/executor.h"
#include "worker/step/gradient_sums.h"
#include "worker/step/planner.h"

namespace ballast {
namespace {

class SilentObserver : public PassObserver {
 public:
  absl::Status OnUnit(PassPhase, uint32_t) override { return absl::OkStatus(); }
};

// The sum below `node` from the nodes that are there.
absl::StatusOr<std::vector<float>> ReduceNode(
    const Span& node, const std::map<Span, std::vector<float>>& nodes) {
  const auto found = nodes.find(node);
  if (found != nodes.end()) {
    return found->second;
  }
  if (node.count == 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("no gradient of micro-batch ", node.first));
  }
  BALLAST_ASSIGN_OR_RETURN(std::vector<float> left,
                           ReduceNode(LeftChild(node), nodes));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<float> right,
                           ReduceNode(RightChild(node), nodes));
  AccumulateCpu(right, absl::MakeSpan(left));
  return left;
}

absl::StatusOr<double> ReduceLossNode(const Span& node,
                                      const std::map<Span, double>& losses) {
  const auto found = losses.find(node);
  if (found != losses.end()) {
    return found->second;
  }
  if (node.count == 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("no loss of micro-batch ", node.first));
  }
  BALLAST_ASSIGN_OR_RETURN(const double left,
                           ReduceLossNode(LeftChild(node), losses));
  BALLAST_ASSIGN_OR_RETURN(const double right,
                           ReduceLossNode(RightChild(node), losses));
  return left + right;
}

}  // namespace

absl::Status LocalWeights::Prefetch(uint32_t unit, uint64_t /*version*/,
                                    StreamMark after,
                                    absl::Span<std::byte* const> destination) {
  const std::vector<TensorUse>& uses = layout_.units[unit].tensors;
  for (size_t slot = 0; slot < uses.size(); ++slot) {
    const TensorSpec& tensor = layout_.tensors[uses[slot].tensor];
    std::vector<float> values(tensor.elem_count());
    values_(tensor, absl::MakeSpan(values));
    const uint64_t bytes = values.size() * DTypeBytes(tensor.served);
    if (tensor.served == DType::kBF16) {
      std::vector<uint16_t> rounded(values.size());
      CastToBF16Cpu(values, absl::MakeSpan(rounded));
      device_.CopyIn(after, rounded.data(), bytes, destination[slot]);
    } else {
      device_.CopyIn(after, values.data(), bytes, destination[slot]);
    }
    fetched_bytes_ += bytes;
  }
  return absl::OkStatus();
}

absl::Status LocalWeights::Wait(uint32_t /*unit*/) { return absl::OkStatus(); }

absl::Status LocalGradients::Push(const GradientPiece& piece) {
  std::vector<float> values(layout_.tensors[piece.use.tensor].elem_count());
  device_.CopyOut(piece.data, values.size() * sizeof(float), values.data());
  pushed_bytes_ += values.size() * sizeof(float);
  if (piece.loss.has_value()) {
    losses_[piece.span] = *piece.loss;
  }
  if (!nodes_[{piece.use.tensor, piece.use.use}]
           .emplace(piece.span, std::move(values))
           .second) {
    return absl::FailedPreconditionError(
        absl::StrCat("a gradient of ", layout_.tensors[piece.use.tensor].name,
                     " was pushed twice"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, std::vector<float>>>
LocalGradients::Reduce() {
  std::map<std::string, std::vector<float>> gradients;
  for (uint32_t tensor = 0; tensor < layout_.tensors.size(); ++tensor) {
    const TensorSpec& spec = layout_.tensors[tensor];
    std::vector<float>& total = gradients[spec.name];
    for (uint32_t use = 0; use < spec.use_count; ++use) {
      BALLAST_ASSIGN_OR_RETURN(std::vector<float> sum,
                               ReduceNode({0, total_}, nodes_[{tensor, use}]));
      if (use == 0) {
        total = std::move(sum);
      } else {
        AccumulateCpu(sum, absl::MakeSpan(total));
      }
    }
  }
  return gradients;
}

absl::StatusOr<double> LocalGradients::ReduceLoss() {
  return ReduceLossNode({0, total_}, losses_);
}

absl::StatusOr<LocalResult> RunLocalStep(
    const Job& job,
    const std::function<std::unique_ptr<Kernels>()>& make_kernels,
    absl::Span<const MicroBatch> batches, const TensorValues& values) {
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<ModelFamily> family,
                           MakeModelFamily(job));
  std::unique_ptr<Kernels> kernels = make_kernels();
  BALLAST_ASSIGN_OR_RETURN(const StepPlan plan,
                           PlanStep(job, family.get(), kernels.get()));
  BALLAST_ASSIGN_OR_RETURN(
      const std::unique_ptr<CpuDevice> device,
      CpuDevice::Create(plan.device_bytes, std::move(kernels)));
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<Arena> host,
                           Arena::Create({.name = "worker.host_memory",
                                          .bytes = plan.host_step_bytes}));
  StepExecutor executor(family.get(), device.get(), host.get(), plan.policy);
  const uint32_t total = job.batch.micro_batches;
  LocalWeights weights(&family->layout(), device.get(), values);
  LocalGradients gradients(&family->layout(), device.get(), total);
  SilentObserver observer;
  for (const Span& range : DealSpans(total, job.worker.count)) {
    BALLAST_RETURN_IF_ERROR(
        executor
            .Train({.total = total, .nodes = Cover(range, total)},
                   batches.subspan(range.first, range.count), &weights,
                   &gradients, &observer)
            .status());
  }
  LocalResult result;
  BALLAST_ASSIGN_OR_RETURN(result.gradients, gradients.Reduce());
  BALLAST_ASSIGN_OR_RETURN(result.loss_sum, gradients.ReduceLoss());
  return result;
}

}  // namespace ballast
