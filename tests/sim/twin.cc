// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/twin.h"

#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/exact_sum.h"
#include "common/initial_value.h"
#include "kernels/update.h"
#include "ps/membership/step_core.h"
#include "storage/checkpoint.h"

namespace ballast::sim {
namespace {

struct TensorState {
  std::vector<float> param;
  std::vector<float> slot0;
  std::vector<float> slot1;      // AdamW only.
  std::vector<uint16_t> served;  // With bf16 only.
};

class TwinRun {
 public:
  explicit TwinRun(const SimJob& job)
      : job_(job),
        adamw_(job.job.optimizer.kind == OptimizerKind::kAdamW),
        step_(job.job, job.layout) {
    for (const TensorSpec& tensor : job.layout.tensors) {
      TensorState& state = states_.emplace_back();
      const uint64_t elems = tensor.elem_count();
      state.param.resize(elems);
      FillInitial(tensor, job.job.run.seed, 0, absl::MakeSpan(state.param));
      state.slot0.resize(elems);
      state.slot1.resize(adamw_ ? elems : 0);
      if (tensor.served == DType::kBF16) {
        state.served.resize(elems);
        CastToBF16Cpu(state.param, absl::MakeSpan(state.served));
      }
    }
  }

  Twin Run() {
    Record(v1::Decision());
    for (uint64_t step = 1; step <= job_.job.run.steps; ++step) {
      v1::Decision decision = Step(step);
      const bool skip = decision.skip();
      skips_ = skip ? skips_ + 1 : 0;
      Record(std::move(decision));
      if (skip && skips_ >= job_.job.cluster.skip_max) {
        break;
      }
    }
    return std::move(twin_);
  }

 private:
  Weights Served() const {
    Weights weights;
    for (const TensorState& state : states_) {
      const bool narrow = !state.served.empty();
      const void* data = narrow ? static_cast<const void*>(state.served.data())
                                : state.param.data();
      std::vector<std::byte> bytes(state.param.size() * (narrow ? 2 : 4));
      std::memcpy(bytes.data(), data, bytes.size());
      weights.push_back(std::move(bytes));
    }
    return weights;
  }

  v1::Decision Step(uint64_t step) {
    const Weights weights = Served();
    const Span root = {0, job_.job.batch.micro_batches};
    std::vector<std::vector<float>> gradients;
    v1::Vote vote;
    ExactSum squares;
    for (uint32_t t = 0; t < states_.size(); ++t) {
      const TensorSpec& tensor = job_.layout.tensors[t];
      std::vector<float> sum =
          GradientOfNode(job_, step, root, {t, 0}, weights[t]);
      for (uint32_t use = 1; use < tensor.use_count; ++use) {
        AccumulateCpu(GradientOfNode(job_, step, root, {t, use}, weights[t]),
                      absl::MakeSpan(sum));
      }
      const uint64_t block = tensor.block_elems();
      uint64_t non_finite = 0;
      for (uint64_t begin = 0; begin < sum.size(); begin += block) {
        const BlockStats stats =
            BlockStatsCpu(absl::MakeSpan(sum).subspan(begin, block));
        squares.Add(stats.sum_squares);
        non_finite += stats.non_finite;
      }
      if (non_finite > 0) {
        v1::NonFinite* entry = vote.add_non_finite();
        entry->set_tensor(t);
        entry->set_count(non_finite);
      }
      gradients.push_back(std::move(sum));
    }
    vote.set_step(step);
    vote.set_sum_squares(squares.Encode());
    vote.set_has_loss(true);
    vote.set_loss_sum(LossOfNode(job_, step, root, HashOf(weights)));
    step_.Begin(step);
    BALLAST_CHECK(step_.AddVote(1, vote).ok());
    absl::StatusOr<v1::Decision> decision =
        step_.Decide(twin_.decisions.back());
    BALLAST_CHECK(decision.ok());
    if (!decision->skip()) {
      Update(*decision, gradients);
    }
    return *std::move(decision);
  }

  void Update(const v1::Decision& decision,
              const std::vector<std::vector<float>>& gradients) {
    const OptimizerOptions& optimizer = job_.job.optimizer;
    for (size_t t = 0; t < states_.size(); ++t) {
      TensorState& state = states_[t];
      const auto decay = static_cast<float>(
          job_.layout.tensors[t].decay ? optimizer.weight_decay : 0.0);
      if (!adamw_) {
        SgdScalars scalars;
        scalars.grad_scale = decision.grad_scale();
        scalars.learning_rate = decision.learning_rate();
        scalars.momentum = static_cast<float>(optimizer.momentum);
        scalars.weight_decay = decay;
        SgdCpu(scalars, gradients[t], absl::MakeSpan(state.param),
               absl::MakeSpan(state.slot0), absl::MakeSpan(state.served));
        continue;
      }
      AdamWScalars scalars;
      scalars.grad_scale = decision.grad_scale();
      scalars.learning_rate = decision.learning_rate();
      scalars.beta1 = static_cast<float>(optimizer.beta1);
      scalars.beta2 = static_cast<float>(optimizer.beta2);
      scalars.epsilon = static_cast<float>(optimizer.epsilon);
      scalars.weight_decay = decay;
      scalars.bias1 = decision.bias1();
      scalars.bias2 = decision.bias2();
      AdamWCpu(scalars, gradients[t], absl::MakeSpan(state.param),
               absl::MakeSpan(state.slot0), absl::MakeSpan(state.slot1),
               absl::MakeSpan(state.served));
    }
  }

  void Record(v1::Decision decision) {
    std::vector<BlockDigests> digests;
    for (size_t t = 0; t < states_.size(); ++t) {
      const TensorState& state = states_[t];
      const uint64_t block = job_.layout.tensors[t].block_elems();
      BlockDigests all;
      for (const std::vector<float>* field :
           {&state.param, &state.slot0, &state.slot1}) {
        for (uint64_t begin = 0; begin < field->size(); begin += block) {
          const uint64_t count = std::min(block, field->size() - begin);
          all.push_back(
              HashBytes(field->data() + begin, count * sizeof(float)));
        }
      }
      digests.push_back(std::move(all));
    }
    twin_.state_hashes.push_back(HashHex(StateHash(job_.layout, digests)));
    twin_.weights.push_back(Served());
    twin_.decisions.push_back(std::move(decision));
    twin_.eval_losses.push_back(EvalLoss());
  }

  double EvalLoss() const {
    const uint32_t count = job_.job.eval.micro_batches;
    const Hash128 weights = HashOf(Served());
    double sum = 0.0;
    for (uint32_t m = 0; m < count; ++m) {
      sum +=
          LossOf(job_, twin_.decisions.size() - 1, m, /*eval=*/true, weights);
    }
    const uint64_t tokens = uint64_t{count} * job_.job.batch.micro_batch_size *
                            job_.job.model.context;
    return count == 0 ? 0.0 : sum / static_cast<double>(tokens);
  }

  const SimJob& job_;
  const bool adamw_;
  StepCore step_;
  std::vector<TensorState> states_;
  uint32_t skips_ = 0;
  Twin twin_;
};

}  // namespace

Twin RunTwin(const SimJob& job) { return TwinRun(job).Run(); }

std::string Essence(const v1::Decision& decision) {
  const auto bits = [](float value) { return std::bit_cast<uint32_t>(value); };
  const auto wide = [](double value) { return std::bit_cast<uint64_t>(value); };
  return absl::StrCat(
      "step ", decision.step(), " skip ", decision.skip(), " scale ",
      bits(decision.grad_scale()), " rate ", bits(decision.learning_rate()),
      " bias ", bits(decision.bias1()), " ", bits(decision.bias2()),
      " updates ", decision.optimizer_step(), " loss ", wide(decision.loss()),
      " norm ", wide(decision.grad_norm()), " clipped ",
      wide(decision.grad_norm_clipped()), " tokens ", decision.tokens(),
      " samples ", decision.samples_consumed(), " ", decision.skip_reason());
}

}  // namespace ballast::sim
