// SPDX-License-Identifier: Apache-2.0
// One optimizer step as a vote: every server says what its part of the summed
// gradient amounts to, and when all have, one decision follows from them.
//
// The decision depends on the set of votes alone, never on their order or on
// how chunks are spread: sums of squares are added exactly, and the tensor a
// skip is blamed on is the first in the model's order.
//
// Pure. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/exact_sum.h"
#include "common/job.h"
#include "common/layout.h"
#include "proto/ballast.pb.h"

namespace ballast {

class StepCore {
 public:
  // `layout` names tensors; copied.
  StepCore(const Job& job, const ModelLayout& layout);

  // Forgets all votes and opens step `step`.
  void Begin(uint64_t step);
  uint64_t step() const { return step_; }

  // Takes the vote of a server (its place, not its life) for step(). A second
  // vote of the same server changes nothing.
  // Errors: INVALID_ARGUMENT  the sum is damaged or a tensor does not exist.
  absl::Status AddVote(uint64_t server, const v1::Vote& vote);
  bool HasVote(uint64_t server) const { return votes_.contains(server); }
  // The server can no longer redo what it voted for; it votes again. Nobody has
  // been told of a decision, so nothing is broken by it.
  void Withdraw(uint64_t server) { votes_.erase(server); }

  // The decision of step() from the votes so far; the caller has seen to it
  // that they are all there. `previous` is the decision of the step before (or
  // what a checkpoint says; all zero at the start). Fills everything that
  // follows from votes, schedule and counts; membership and checkpoint are the
  // caller's.
  // Errors: INTERNAL  not exactly one vote carries the loss.
  absl::StatusOr<v1::Decision> Decide(const v1::Decision& previous) const;

 private:
  struct Ballot {
    ExactSum sum_squares;
    std::map<uint32_t, uint64_t> non_finite;
    bool has_loss = false;
    double loss_sum = 0.0;
  };
  // Empty when the gradient and the loss are finite.
  std::string WhyNotFinite(double sum_squares, double loss_sum) const;

  const Job job_;
  std::vector<std::string> tensor_names_;
  uint64_t step_ = 0;
  std::multimap<uint64_t, Ballot> votes_;  // One each, unless rules break.
};

}  // namespace ballast
