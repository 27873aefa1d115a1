// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/step_core.h"

#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rule.h"
#include "common/status_macros.h"
#include "ps/membership/schedule.h"

namespace ballast {

StepCore::StepCore(const Job& job, const ModelLayout& layout) : job_(job) {
  for (const TensorSpec& tensor : layout.tensors) {
    tensor_names_.push_back(tensor.name);
  }
}

void StepCore::Begin(uint64_t step) {
  step_ = step;
  votes_.clear();
}

absl::Status StepCore::AddVote(uint64_t server, const v1::Vote& vote) {
  if (BALLAST_RULE(kVoteOnce) && HasVote(server)) {
    return absl::OkStatus();
  }
  Ballot ballot;
  BALLAST_ASSIGN_OR_RETURN(ballot.sum_squares,
                           ExactSum::Decode(vote.sum_squares()));
  for (const v1::NonFinite& entry : vote.non_finite()) {
    if (entry.tensor() >= tensor_names_.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a vote for step ", step_, " names tensor ", entry.tensor(),
          "; the model has ", tensor_names_.size()));
    }
    ballot.non_finite[entry.tensor()] += entry.count();
  }
  ballot.has_loss = vote.has_loss();
  ballot.loss_sum = vote.loss_sum();
  votes_.emplace(server, std::move(ballot));
  return absl::OkStatus();
}

std::string StepCore::WhyNotFinite(double sum_squares, double loss_sum) const {
  std::map<uint32_t, uint64_t> counts;
  for (const auto& [server, ballot] : votes_) {
    for (const auto& [tensor, count] : ballot.non_finite) {
      if (count != 0) {
        counts[tensor] += count;
      }
    }
  }
  if (!counts.empty()) {
    const auto& [tensor, count] = *counts.begin();
    std::string text =
        absl::StrCat("the gradient of ", tensor_names_[tensor], " has ", count,
                     " elements that are not finite");
    if (counts.size() > 1) {
      absl::StrAppend(&text, "; so have ", counts.size() - 1, " more tensors");
    }
    return text;
  }
  if (!std::isfinite(sum_squares)) {
    return "the gradient's sum of squares is not finite";
  }
  if (!std::isfinite(loss_sum)) {
    return "the loss is not finite";
  }
  return "";
}

absl::StatusOr<v1::Decision> StepCore::Decide(
    const v1::Decision& previous) const {
  ExactSum squares;
  double loss_sum = 0.0;
  int losses = 0;
  for (const auto& [server, ballot] : votes_) {
    squares.Add(ballot.sum_squares);
    if (ballot.has_loss) {
      loss_sum = ballot.loss_sum;
      ++losses;
    }
  }
  if (losses != 1) {
    return absl::InternalError(absl::StrCat(
        "step ", step_, ": ", losses,
        " servers voted with the loss; want one, the owner of its chunk"));
  }
  const double sum_squares = squares.Round();
  const auto tokens = static_cast<double>(job_.tokens_per_step());
  const double norm = std::sqrt(sum_squares) / tokens;
  const double clip = ClipFactor(job_.optimizer.clip_norm, norm);

  v1::Decision decision;
  decision.set_step(step_);
  decision.set_skip_reason(WhyNotFinite(sum_squares, loss_sum));
  decision.set_skip(!decision.skip_reason().empty());
  decision.set_learning_rate(static_cast<float>(
      LearningRate(job_.optimizer, job_.schedule, job_.run.steps, step_)));
  decision.set_loss(loss_sum / tokens);
  decision.set_grad_norm(norm);
  decision.set_tokens(job_.tokens_per_step());
  decision.set_samples_consumed(previous.samples_consumed() +
                                uint64_t{job_.batch.micro_batches} *
                                    job_.batch.micro_batch_size);
  decision.set_optimizer_step(previous.optimizer_step() +
                              (decision.skip() ? 0 : 1));
  // What only an update uses stays zero when there is none.
  if (!decision.skip()) {
    decision.set_grad_norm_clipped(norm * clip);
    decision.set_grad_scale(static_cast<float>(clip / tokens));
    const bool adamw = job_.optimizer.kind == OptimizerKind::kAdamW;
    const uint64_t updates = decision.optimizer_step();
    decision.set_bias1(static_cast<float>(
        adamw ? BiasCorrection(job_.optimizer.beta1, updates) : 1.0));
    decision.set_bias2(static_cast<float>(
        adamw ? BiasCorrection(job_.optimizer.beta2, updates) : 1.0));
  }
  return decision;
}

}  // namespace ballast
