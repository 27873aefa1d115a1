// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/run_summary.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "common/dtype.h"
#include "ps/membership/placement.h"

namespace ballast {
namespace {

using Value = nlohmann::ordered_json;

struct Peaks {
  uint64_t budget = 0;
  uint64_t peak = 0;
  uint64_t host_budget = 0;
  uint64_t host_peak = 0;
  uint64_t spilled = 0;
};

Peaks PeaksOf(const MemberTable& members, v1::Role role) {
  Peaks peaks;
  for (const Member* member : members.All()) {
    if (member->join.role() != role) {
      continue;
    }
    const v1::MemberStats& stats = member->stats;
    peaks.budget = std::max(peaks.budget, stats.memory_budget_bytes());
    peaks.peak = std::max(peaks.peak, stats.memory_peak_bytes());
    peaks.host_budget = std::max(peaks.host_budget, stats.host_budget_bytes());
    peaks.host_peak = std::max(peaks.host_peak, stats.host_peak_bytes());
    peaks.spilled += stats.spilled_bytes_written();
  }
  return peaks;
}

Value OrNull(const std::string& text) {
  return text.empty() ? Value() : Value(text);
}

// "worker" of "worker-1"; "coordinator" is both.
std::string RoleOf(const std::string& member) {
  return member.substr(0, member.rfind('-'));
}

// What went wrong and what it cost, oldest first.
Value FaultsOf(const v1::StatusReply& status) {
  Value faults = Value::array();
  for (const v1::Fault& fault : status.faults()) {
    Value entry;
    entry["member"] = fault.member();
    entry["role"] = RoleOf(fault.member());
    entry["kind"] = fault.kind();
    entry["step"] = fault.step();
    entry["recovered_seconds"] = fault.recovered_seconds();  // < 0: not yet.
    entry["detail"] = fault.detail();
    faults.push_back(std::move(entry));
  }
  return faults;
}

}  // namespace

void RunSummary::AddEarlier(const StepMetrics& line) {
  tokens_ += line.decision.tokens();
  seconds_ += line.step_seconds;
  earlier_seconds_ += line.step_seconds;
  ++measured_steps_;
  log_bytes_ += line.log_bytes;
  log_seconds_ += line.log_seconds;
}

void RunSummary::Add(const StepMetrics& line, uint64_t own_faults) {
  tokens_ += line.decision.tokens();
  if (line.whole) {
    ++whole_steps_;
    pushed_bytes_ += line.pushed_bytes;
  }
  seconds_ += line.step_seconds;
  ++measured_steps_;
  log_bytes_ += line.log_bytes;
  log_seconds_ += line.log_seconds;
  faults_.push_back({line.worker_faults, line.server_faults, own_faults});
}

std::string RunSummary::Json(const CoordinatorCore& core,
                             absl::Time now) const {
  const v1::StatusReply status = core.GetStatus(now);
  const v1::Decision& last = core.last_decision();
  const Peaks workers = PeaksOf(core.members(), v1::ROLE_WORKER);
  const Peaks servers = PeaksOf(core.members(), v1::ROLE_SERVER);
  Value summary;
  summary["run"] = status.run_name();
  summary["run_id"] = status.run_id();
  summary["outcome"] = status.phase();
  if (core.phase() == Phase::kFailed) {
    summary["failure"] = status.failure();
  }
  summary["steps"] = core.committed();
  summary["timeline"] = status.timeline();
  summary["final_loss"] = core.committed() == 0 ? Value() : Value(last.loss());
  summary["final_validation_loss"] = core.last_evaluation().has_value()
                                         ? Value(core.last_evaluation()->loss)
                                         : Value();
  summary["seconds"] = earlier_seconds_ + status.elapsed_seconds();
  summary["tokens_per_s"] =
      seconds_ > 0.0 ? Value(static_cast<double>(tokens_) / seconds_) : Value();
  summary["skipped_steps"] = status.skipped_steps();
  summary["parameters"] = status.parameters();
  summary["weights_bytes"] = status.weights_bytes();
  summary["state_bytes"] = status.state_bytes();
  summary["gradient_bytes"] =
      status.parameters() * DTypeBytes(job_.precision.reduce_dtype);
  summary["pushed_bytes_per_step"] =
      whole_steps_ == 0 ? Value() : Value(pushed_bytes_ / whole_steps_);
  const auto steps = static_cast<double>(measured_steps_);
  summary["log_bytes_per_step"] =
      measured_steps_ == 0 ? Value() : Value(log_bytes_ / measured_steps_);
  summary["log_seconds_per_step"] =
      measured_steps_ == 0 ? Value() : Value(log_seconds_ / steps);
  summary["workers"] = job_.worker.count;
  summary["servers"] = job_.server.count;
  summary["worker_budget_bytes"] = workers.budget;
  summary["worker_peak_bytes"] = workers.peak;
  summary["worker_host_budget_bytes"] = workers.host_budget;
  summary["worker_host_peak_bytes"] = workers.host_peak;
  summary["server_ram_budget_bytes"] = servers.budget;
  summary["server_peak_bytes"] = servers.peak;
  summary["spilled_bytes_written"] = servers.spilled;
  summary["checkpoint"] = OrNull(status.last_checkpoint());
  summary["state_hash"] = OrNull(core.state_hash());

  // Steady state: the second half of the steps. Of one process of each role.
  Value faults;
  const size_t half = faults_.size() / 2;
  const auto counted = static_cast<double>(faults_.size() - half);
  uint64_t of_workers = 0;
  uint64_t of_servers = 0;
  for (size_t i = half; i < faults_.size(); ++i) {
    of_workers += faults_[i].workers;
    of_servers += faults_[i].servers;
  }
  if (half > 0) {
    faults["worker"] =
        static_cast<double>(of_workers) / counted / job_.worker.count;
    faults["server"] =
        static_cast<double>(of_servers) / counted / job_.server.count;
    faults["coordinator"] =
        static_cast<double>(faults_.back().own - faults_[half - 1].own) /
        counted;
  }
  summary["minor_faults_per_step"] = faults;
  summary["faults"] = FaultsOf(status);
  return summary.dump(2) + "\n";
}

}  // namespace ballast
