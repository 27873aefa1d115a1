// SPDX-License-Identifier: Apache-2.0
// Who computes which micro-batches of one piece of work, a step or an
// evaluation. Dealt evenly at the start; when a worker goes, what it owed goes
// to the others in addition to what they have, and nothing else changes hands.
//
// Pure. Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "common/span.h"

namespace ballast {

class Assignment {
 public:
  // Forgets everything and deals `total` micro-batches to `workers`, in their
  // order; those beyond `total` get nothing. Without workers all of them wait
  // for DealLeft.
  void Begin(uint32_t total, const std::vector<uint64_t>& workers);

  // The worker is gone. What it had is left over, unless it had done it.
  void Remove(uint64_t worker, bool done);
  // What workers had done before they went is left over again: a server that
  // came back without its vote may miss it.
  void Reopen();

  bool has_left() const { return !left_.empty(); }
  // Deals what is left over to `workers` as evenly as their present loads
  // allow; ties go by their order. Not without workers.
  void DealLeft(const std::vector<uint64_t>& workers);

  // Disjoint nodes of the span tree, ascending; empty: nothing.
  std::vector<Span> SpansOf(uint64_t worker) const;

 private:
  uint32_t total_ = 0;
  std::map<uint64_t, std::set<uint32_t>> shares_;  // Micro-batches by worker.
  std::map<uint64_t, std::vector<Span>> nodes_;    // The same, as dealt.
  std::set<uint32_t> left_;
  std::set<uint32_t> done_by_gone_;
};

}  // namespace ballast
