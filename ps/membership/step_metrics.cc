// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/step_metrics.h"

#include <algorithm>
#include <utility>

namespace ballast {

bool MetricsCollector::Complete(uint64_t step, const Pending& pending) const {
  const auto heard = [this, step](uint64_t member) {
    const auto place = heard_.find(member);
    return place != heard_.end() && place->second >= step;
  };
  return std::all_of(pending.workers.begin(), pending.workers.end(), heard) &&
         std::all_of(pending.servers.begin(), pending.servers.end(), heard) &&
         (!pending.wants_hash || !pending.line.state_hash.empty());
}

MetricsCollector::Pending* MetricsCollector::At(uint64_t step) {
  return step < next_step_ ? nullptr : &pending_[step];
}

void MetricsCollector::WorkerDone(uint64_t worker, const v1::WorkerDone& done) {
  uint64_t& newest = heard_[worker];
  newest = std::max(newest, done.step());
  Pending* pending = At(done.step());
  if (pending == nullptr || !pending->done.insert(worker).second) {
    return;
  }
  StepMetrics& line = pending->line;
  line.forward_seconds = std::max(line.forward_seconds, done.forward_seconds());
  line.backward_seconds =
      std::max(line.backward_seconds, done.backward_seconds());
  line.fetch_wait_seconds =
      std::max(line.fetch_wait_seconds, done.fetch_wait_seconds());
  line.push_wait_seconds =
      std::max(line.push_wait_seconds, done.push_wait_seconds());
  line.pushed_bytes += done.pushed_bytes();
  line.fetched_bytes += done.fetched_bytes();
  line.worker_faults += done.minor_faults();
}

void MetricsCollector::Confirmed(uint64_t server, const v1::Confirm& confirm,
                                 uint64_t faults) {
  uint64_t& newest = heard_[server];
  newest = std::max(newest, confirm.step());
  Pending* pending = At(confirm.step());
  if (pending == nullptr || !pending->confirmed.insert(server).second) {
    return;
  }
  pending->line.update_seconds =
      std::max(pending->line.update_seconds, confirm.update_seconds());
  pending->line.log_seconds =
      std::max(pending->line.log_seconds, confirm.log_seconds());
  pending->line.log_bytes += confirm.log_bytes();
  const auto [last, first_time] = faults_.try_emplace(server, faults);
  if (!first_time && faults > last->second) {
    pending->line.server_faults += faults - last->second;
    last->second = faults;
  }
}

void MetricsCollector::Hashed(uint64_t step, const std::string& hash) {
  Pending* pending = At(step);
  if (pending != nullptr) {
    pending->line.state_hash = hash;
  }
}

void MetricsCollector::Decided(const v1::Decision& decision,
                               absl::Duration step_time,
                               const std::set<uint64_t>& workers,
                               const std::set<uint64_t>& servers,
                               bool wants_hash, absl::Time now) {
  if (next_step_ == 0) {
    next_step_ = decision.step();
  }
  Pending* pending = At(decision.step());
  if (pending == nullptr) {
    return;
  }
  pending->line.decision = decision;
  pending->line.step_seconds = absl::ToDoubleSeconds(step_time);
  pending->decided = true;
  pending->decided_at = now;
  pending->workers = workers;
  pending->servers = servers;
  pending->wants_hash = wants_hash;
}

void MetricsCollector::Forget(uint64_t member) {
  heard_.erase(member);
  faults_.erase(member);
  for (auto& [step, pending] : pending_) {
    pending.workers.erase(member);
    pending.servers.erase(member);
  }
}

void MetricsCollector::Restart(uint64_t next_step) {
  pending_.erase(pending_.lower_bound(next_step), pending_.end());
  heard_.clear();
  next_step_ = next_step;
}

std::vector<StepMetrics> MetricsCollector::TakeReady(absl::Time now) {
  std::vector<StepMetrics> ready;
  for (auto place = pending_.find(next_step_);
       place != pending_.end() && place->second.decided;
       place = pending_.find(next_step_)) {
    const Pending& pending = place->second;
    const bool hash_missing =
        pending.wants_hash && pending.line.state_hash.empty();
    const bool late = now - pending.decided_at >= kPatience && !hash_missing;
    if (!late && !Complete(next_step_, pending)) {
      break;
    }
    place->second.line.whole =
        std::includes(pending.done.begin(), pending.done.end(),
                      pending.workers.begin(), pending.workers.end());
    ready.push_back(std::move(place->second.line));
    pending_.erase(place);
    ++next_step_;
  }
  return ready;
}

std::vector<StepMetrics> MetricsCollector::TakeAll() {
  std::vector<StepMetrics> lines;
  for (auto place = pending_.find(next_step_);
       place != pending_.end() && place->second.decided;
       place = pending_.find(next_step_)) {
    lines.push_back(std::move(place->second.line));
    pending_.erase(place);
    ++next_step_;
  }
  return lines;
}

}  // namespace ballast
