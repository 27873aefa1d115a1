// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/assignment.h"

#include <algorithm>

namespace ballast {
namespace {

// Contiguous runs of the micro-batches, each as the fewest nodes.
std::vector<Span> NodesOf(const std::vector<uint32_t>& micro_batches,
                          uint32_t total) {
  std::vector<Span> nodes;
  for (size_t begin = 0; begin < micro_batches.size();) {
    size_t end = begin + 1;
    while (end < micro_batches.size() &&
           micro_batches[end] == micro_batches[end - 1] + 1) {
      ++end;
    }
    const std::vector<Span> run = Cover(
        {micro_batches[begin], static_cast<uint32_t>(end - begin)}, total);
    nodes.insert(nodes.end(), run.begin(), run.end());
    begin = end;
  }
  return nodes;
}

}  // namespace

void Assignment::Begin(uint32_t total, const std::vector<uint64_t>& workers) {
  total_ = total;
  shares_.clear();
  nodes_.clear();
  left_.clear();
  done_by_gone_.clear();
  const auto count =
      static_cast<uint32_t>(std::min<uint64_t>(workers.size(), total));
  if (count == 0) {
    for (uint32_t i = 0; i < total; ++i) {
      left_.insert(i);
    }
    return;
  }
  const std::vector<Span> ranges = DealSpans(total, count);
  for (uint32_t i = 0; i < count; ++i) {
    for (uint32_t m = ranges[i].first; m < ranges[i].end(); ++m) {
      shares_[workers[i]].insert(m);
    }
    nodes_[workers[i]] = Cover(ranges[i], total);
  }
}

void Assignment::Remove(uint64_t worker, bool done) {
  const auto share = shares_.find(worker);
  if (share == shares_.end()) {
    return;
  }
  (done ? done_by_gone_ : left_)
      .insert(share->second.begin(), share->second.end());
  shares_.erase(share);
  nodes_.erase(worker);
}

void Assignment::Reopen() {
  left_.insert(done_by_gone_.begin(), done_by_gone_.end());
  done_by_gone_.clear();
}

void Assignment::DealLeft(const std::vector<uint64_t>& workers) {
  if (left_.empty() || workers.empty()) {
    return;
  }
  const auto load = [this](uint64_t worker) {
    const auto share = shares_.find(worker);
    return share == shares_.end() ? size_t{0} : share->second.size();
  };
  std::vector<uint64_t> order = workers;
  std::stable_sort(order.begin(), order.end(), [&load](uint64_t a, uint64_t b) {
    return load(a) < load(b);
  });
  // How many each takes: one at a time to whoever has least.
  std::vector<size_t> takes(order.size(), 0);
  for (size_t i = 0; i < left_.size(); ++i) {
    size_t least = 0;
    for (size_t w = 1; w < order.size(); ++w) {
      if (load(order[w]) + takes[w] < load(order[least]) + takes[least]) {
        least = w;
      }
    }
    ++takes[least];
  }
  auto next = left_.begin();
  for (size_t w = 0; w < order.size(); ++w) {
    std::vector<uint32_t> taken;
    for (size_t i = 0; i < takes[w]; ++i, ++next) {
      taken.push_back(*next);
    }
    if (taken.empty()) {
      continue;
    }
    shares_[order[w]].insert(taken.begin(), taken.end());
    std::vector<Span>& nodes = nodes_[order[w]];
    const std::vector<Span> more = NodesOf(taken, total_);
    nodes.insert(nodes.end(), more.begin(), more.end());
    std::sort(nodes.begin(), nodes.end());
  }
  left_.clear();
}

std::vector<Span> Assignment::SpansOf(uint64_t worker) const {
  const auto nodes = nodes_.find(worker);
  return nodes == nodes_.end() ? std::vector<Span>{} : nodes->second;
}

}  // namespace ballast
