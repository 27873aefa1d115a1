// SPDX-License-Identifier: Apache-2.0
// An evaluation: the held-out micro-batches of one version, dealt to workers
// and summed in the order of their numbers, so that the loss does not depend on
// who computed what.
//
// Pure. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "common/rule.h"
#include "common/span.h"
#include "proto/ballast.pb.h"
#include "ps/membership/assignment.h"

namespace ballast {

class EvaluationPass {
 public:
  // `micro_batches` in all, of `tokens` each.
  EvaluationPass(uint32_t micro_batches, uint64_t tokens)
      : micro_batches_(micro_batches), tokens_(tokens) {}

  // Opens the evaluation of version `step` by `workers` (incarnations in the
  // order of dealing; those beyond micro_batches get nothing).
  void Begin(uint64_t step, const std::vector<uint64_t>& workers);
  void End() { step_.reset(); }
  // The version under evaluation.
  const std::optional<uint64_t>& step() const { return step_; }

  // A worker is gone: losses of its share that are missing are left over.
  void Remove(uint64_t worker) { shares_.Remove(worker, !Owes(worker)); }
  bool has_left() const { return step_.has_value() && shares_.has_left(); }
  void DealLeft(const std::vector<uint64_t>& workers) {
    shares_.DealLeft(workers);
  }

  // What a worker has to do; empty for one that takes no part.
  std::vector<Span> SpansOf(uint64_t worker) const {
    return shares_.SpansOf(worker);
  }
  // Takes losses; those of another version or out of range change nothing, and
  // neither does a second loss of a micro-batch.
  void AddResult(const v1::EvalResult& result);
  // Whether losses of this worker's share are missing.
  bool Owes(uint64_t worker) const;
  bool Done() const {
    return losses_.size() == micro_batches_ ||
           !BALLAST_RULE(kEvaluationIsAPass);
  }
  // Mean over all tokens, in nats. Only when Done().
  double Loss() const;

 private:
  const uint32_t micro_batches_;
  const uint64_t tokens_;
  std::optional<uint64_t> step_;
  Assignment shares_;
  std::map<uint32_t, double> losses_;
};

}  // namespace ballast
