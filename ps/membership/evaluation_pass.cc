// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/evaluation_pass.h"

namespace ballast {

void EvaluationPass::Begin(uint64_t step,
                           const std::vector<uint64_t>& workers) {
  step_ = step;
  losses_.clear();
  shares_.Begin(micro_batches_, workers);
}

void EvaluationPass::AddResult(const v1::EvalResult& result) {
  if (step_ != result.step()) {
    return;
  }
  for (const v1::MicroBatchLoss& loss : result.losses()) {
    if (loss.micro_batch() < micro_batches_) {
      losses_.try_emplace(loss.micro_batch(), loss.loss_sum());
    }
  }
}

bool EvaluationPass::Owes(uint64_t worker) const {
  if (!step_.has_value()) {
    return false;
  }
  for (const Span& span : SpansOf(worker)) {
    for (uint32_t i = span.first; i < span.end(); ++i) {
      if (!losses_.contains(i)) {
        return true;
      }
    }
  }
  return false;
}

double EvaluationPass::Loss() const {
  double sum = 0.0;
  for (const auto& [micro_batch, loss] : losses_) {
    sum += loss;
  }
  return sum /
         (static_cast<double>(micro_batches_) * static_cast<double>(tokens_));
}

}  // namespace ballast
