// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/evaluation_pass.h"

#include <algorithm>

namespace ballast {

void EvaluationPass::Begin(uint64_t step,
                           const std::vector<uint64_t>& workers) {
  step_ = step;
  losses_.clear();
  shares_.clear();
  const auto count =
      std::min(static_cast<uint32_t>(workers.size()), micro_batches_);
  if (count == 0) {
    return;
  }
  const std::vector<Span> shares = DealSpans(micro_batches_, count);
  for (uint32_t i = 0; i < count; ++i) {
    shares_[workers[i]] = shares[i];
  }
}

std::vector<Span> EvaluationPass::SpansOf(uint64_t worker) const {
  const auto share = shares_.find(worker);
  return share == shares_.end() ? std::vector<Span>{}
                                : Cover(share->second, micro_batches_);
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
  const auto share = shares_.find(worker);
  if (!step_.has_value() || share == shares_.end()) {
    return false;
  }
  for (uint32_t i = share->second.first; i < share->second.end(); ++i) {
    if (!losses_.contains(i)) {
      return true;
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
