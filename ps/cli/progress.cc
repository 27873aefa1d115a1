// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/progress.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/units.h"
#include "ps/cli/fault_table.h"
#include "ps/cli/text_table.h"

namespace ballast {
namespace {

// Between two plain lines.
constexpr absl::Duration kLineEvery = absl::Seconds(5);
// A wait that a person should see.
constexpr int64_t kWaitShown = 1000;  // Milliseconds.
constexpr int64_t kSilenceShown = 2000;
// A block taller than the terminal could not be drawn over.
constexpr size_t kRowsMax = 12;
constexpr size_t kFaultsShown = 10;
// fp32 master, two moments and a gradient: what a usual trainer holds.
constexpr uint64_t kUsualBytesPerParameter = 16;

const char* DurabilityWord(Durability durability) {
  switch (durability) {
    case Durability::kCheckpoint:
      return "checkpoint";
    case Durability::kStep:
      return "step";
    case Durability::kReplica:
      return "replica";
  }
  return "";
}

bool IsWorker(const v1::MemberStatus& member) {
  return member.role() == v1::ROLE_WORKER && member.state() != "gone";
}

bool IsServer(const v1::MemberStatus& member) {
  return member.role() == v1::ROLE_SERVER && member.state() != "gone";
}

std::string Bar(uint64_t part, uint64_t whole) {
  constexpr uint64_t kWidth = 24;
  const uint64_t full =
      whole == 0 ? 0 : std::min(kWidth, part * kWidth / whole);
  return absl::StrCat("[", std::string(full, '#'),
                      std::string(kWidth - full, '.'), "]");
}

// An evaluation is part of training to whoever watches.
bool IsTraining(const v1::StatusReply& status) {
  return status.phase() == "training" || status.phase() == "evaluating";
}

std::string Speed(const v1::StatusReply& status) {
  return WithCommas(
      static_cast<uint64_t>(std::max(0.0, status.tokens_per_s())));
}

std::string TimeLeft(const Job& job, const v1::StatusReply& status) {
  if (status.tokens_per_s() <= 0 || status.step() >= status.steps()) {
    return "";
  }
  const double tokens = static_cast<double>(status.steps() - status.step()) *
                        static_cast<double>(job.tokens_per_step());
  return absl::StrCat(FormatSpan(absl::Seconds(tokens / status.tokens_per_s())),
                      " left");
}

std::string ValidationText(const v1::StatusReply& status) {
  if (!std::isfinite(status.validation_loss()) ||
      status.validation_loss() == 0) {
    return "";
  }
  return absl::StrFormat("validation %.3f (step %d)", status.validation_loss(),
                         status.validation_step());
}

std::string BudgetText(const v1::MemberStats& stats) {
  return absl::StrCat(FormatBytes(stats.memory_used_bytes()), " of ",
                      FormatBytes(stats.memory_budget_bytes()), ", peak ",
                      FormatBytes(stats.memory_peak_bytes()));
}

// What the member does, or whom it has waited for longer than a step's usual
// back and forth.
std::string Doing(const v1::MemberStats& stats) {
  return stats.waits_for().empty() || stats.waits_ms() < kWaitShown
             ? stats.phase()
             : absl::StrCat("waits for ", stats.waits_for(), " since ",
                            stats.waits_ms() / 1000, "s");
}

// Present members: servers, then workers, each by number.
std::vector<const v1::MemberStatus*> Present(const v1::StatusReply& status) {
  std::vector<const v1::MemberStatus*> members;
  for (const v1::MemberStatus& member : status.members()) {
    if (member.state() != "gone") {
      members.push_back(&member);
    }
  }
  const auto key = [](const v1::MemberStatus* member) {
    return std::make_tuple(member->role(), member->name().size(),
                           member->name());
  };
  std::sort(members.begin(), members.end(),
            [&key](const auto* a, const auto* b) { return key(a) < key(b); });
  return members;
}

// One row a member: where memory is, what it does.
std::string MemberRows(const v1::StatusReply& status) {
  const std::vector<const v1::MemberStatus*> members = Present(status);
  std::vector<std::vector<std::string>> rows;
  for (const v1::MemberStatus* member : members) {
    if (rows.size() == kRowsMax) {
      rows.push_back({absl::StrCat("  and ", members.size() - kRowsMax,
                                   " more: `ballast status`")});
      break;
    }
    const v1::MemberStats& stats = member->stats();
    const bool server = IsServer(*member);
    rows.push_back(
        {absl::StrCat("  ", member->name()),
         absl::StrCat(server ? "RAM " : "device ", BudgetText(stats)),
         server ? absl::StrCat("to disk ",
                               FormatBytes(stats.spilled_bytes_written()))
                : "",
         Doing(stats)});
  }
  return FormatTable(rows);
}

}  // namespace

bool KnowsPlans(const Job& job, const v1::StatusReply& status) {
  const auto planned = std::count_if(
      status.members().begin(), status.members().end(),
      [](const v1::MemberStatus& member) {
        return IsWorker(member) && member.plan().budget_bytes() > 0;
      });
  return status.parameters() > 0 && planned >= int64_t{job.worker.count};
}

std::string StartTable(const Job& job, const v1::StatusReply& status) {
  v1::WorkerPlan plan;
  for (const v1::MemberStatus& member : status.members()) {
    if (IsWorker(member)) {
      plan = member.plan();
      break;
    }
  }
  const uint64_t usual =
      kUsualBytesPerParameter * status.parameters() + plan.activation_bytes();
  const uint64_t ram = job.server.memory * job.server.count;
  const auto row = [](const char* what, uint64_t needs, uint64_t has,
                      const std::string& note) {
    return std::vector<std::string>{what, FormatBytes(needs), FormatBytes(has),
                                    FormatRatio(needs, has), note};
  };
  std::string out = absl::StrFormat(
      "%s: %s parameters, %d blocks of width %d, context %d, %s tokens a "
      "step, %d steps\n%d %s and %d %s on %s, durability %s\n\n",
      job.run.name, WithCommas(status.parameters()), job.model.layers,
      job.model.width, job.model.context, WithCommas(job.tokens_per_step()),
      status.steps(), job.worker.count,
      job.worker.count == 1 ? "worker" : "workers", job.server.count,
      job.server.count == 1 ? "shard server" : "shard servers",
      job.cluster.host, DurabilityWord(job.server.durability));
  absl::StrAppend(
      &out,
      FormatTable({{"", "needs", "budget", "ratio", ""},
                   row("weights on the device", status.weights_bytes(),
                       job.worker.memory,
                       status.weights_bytes() > job.worker.memory
                           ? "do not fit: units stream through"
                           : "fit"),
                   row("a usual trainer's device", usual, job.worker.memory,
                       absl::StrCat("16 bytes a parameter, activations ",
                                    FormatBytes(plan.activation_bytes()))),
                   row("training state on servers", status.state_bytes(), ram,
                       absl::StrCat(job.server.count, " x ",
                                    FormatBytes(job.server.memory), " of RAM",
                                    status.state_bytes() > ram
                                        ? "; chunks stream through the disk"
                                        : "")),
                   row("a step on the device", plan.peak_bytes(),
                       job.worker.memory, "peak, from a dry run"),
                   row("a step in host memory", plan.host_peak_bytes(),
                       plan.host_budget_bytes(), "peak, from a dry run")},
                  {false, true, true, true, false}));
  if (!plan.summary().empty()) {
    absl::StrAppend(&out, "plan: ", plan.summary(), "\n");
  }
  return out;
}

std::string ProgressBlock(const Job& job, const v1::StatusReply& status) {
  std::string out = absl::StrFormat(
      "%s  step %s/%s  %s %3d%%  %s\n", job.run.name, WithCommas(status.step()),
      WithCommas(status.steps()), Bar(status.step(), status.steps()),
      status.steps() == 0 ? 0 : status.step() * 100 / status.steps(),
      IsTraining(status) ? TimeLeft(job, status) : status.phase());
  const v1::Decision& last = status.last();
  if (status.step() > 0) {
    absl::StrAppend(
        &out,
        absl::StrFormat("  loss %.4f   lr %.3g   gradient norm %.3g   %s "
                        "tokens/s   %s\n",
                        last.loss(), last.learning_rate(), last.grad_norm(),
                        Speed(status), ValidationText(status)));
  }
  // In training someone is always waited for, for a moment.
  if (!status.waits_for().empty() && !IsTraining(status)) {
    absl::StrAppend(&out, "  waits: ", status.waits_for(), "\n");
  }
  return absl::StrCat(out, MemberRows(status));
}

std::string ProgressLine(const Job& job, const v1::StatusReply& status) {
  std::vector<std::string> parts = {
      absl::StrCat("step ", status.step(), "/", status.steps())};
  const bool trains = status.step() > 0 && IsTraining(status);
  if (trains) {
    parts.push_back(absl::StrFormat("loss %.4f", status.last().loss()));
  } else {
    parts.push_back(status.phase());
  }
  parts.push_back(ValidationText(status));
  if (trains) {
    uint64_t device_peak = 0;
    uint64_t server_peak = 0;
    uint64_t spilled = 0;
    for (const v1::MemberStatus& member : status.members()) {
      uint64_t& peak = IsWorker(member) ? device_peak : server_peak;
      peak = std::max(peak, member.stats().memory_peak_bytes());
      spilled += member.stats().spilled_bytes_written();
    }
    parts.push_back(absl::StrFormat("lr %.3g", status.last().learning_rate()));
    parts.push_back(absl::StrCat(Speed(status), " tokens/s"));
    parts.push_back(TimeLeft(job, status));
    parts.push_back(absl::StrCat("device ", FormatBytes(device_peak)));
    parts.push_back(absl::StrCat("server ", FormatBytes(server_peak)));
    parts.push_back(absl::StrCat("to disk ", FormatBytes(spilled)));
  } else if (!status.waits_for().empty()) {
    parts.push_back(absl::StrCat("waits: ", status.waits_for()));
  }
  std::erase(parts, "");
  return absl::StrCat(absl::StrJoin(parts, "  "), "\n");
}

namespace {

// Names that should be in and are not.
std::string MissingText(const v1::StatusReply& status) {
  std::vector<std::string> missing;
  for (const std::string& name : status.wanted()) {
    const auto in = [&name](const v1::MemberStatus& member) {
      return member.name() == name && member.state() != "gone";
    };
    if (std::none_of(status.members().begin(), status.members().end(), in)) {
      missing.push_back(name);
    }
  }
  return absl::StrJoin(missing, ", ");
}

std::string StateText(const v1::MemberStatus& member) {
  if (member.state() == "active" && member.silent_ms() > kSilenceShown) {
    return absl::StrCat("silent ", member.silent_ms() / 1000, "s");
  }
  const bool loads =
      member.state() == "loading" && member.stats().loaded_chunks() > 0;
  return loads ? absl::StrCat("loading, ", member.stats().loaded_chunks(),
                              " chunks")
               : member.state();
}

std::string DiskText(const v1::MemberStats& stats) {
  const std::string written = FormatBytes(stats.spilled_bytes_written());
  return stats.log_limit_bytes() == 0
             ? written
             : absl::StrCat(written, ", log ", FormatBytes(stats.log_bytes()),
                            " of ", FormatBytes(stats.log_limit_bytes()));
}

std::string MembersText(const v1::StatusReply& status) {
  std::vector<std::vector<std::string>> rows = {
      {"member", "state", "pid", "memory", "to disk", "does", "owes"}};
  for (const v1::MemberStatus& member : status.members()) {
    rows.push_back({member.name(), StateText(member),
                    absl::StrCat(member.pid()), BudgetText(member.stats()),
                    DiskText(member.stats()), Doing(member.stats()),
                    member.owes()});
  }
  return FormatTable(rows);
}

}  // namespace

std::string StatusText(const v1::StatusReply& status) {
  std::vector<std::vector<std::string>> rows = {
      {"run", absl::StrCat(status.run_name(), " (", status.run_id(), ")")},
      {"folder", status.run_dir()},
      {"phase", status.phase()},
      {"step", absl::StrCat(status.step(), " of ", status.steps(), ", skipped ",
                            status.skipped_steps())},
      {"generation",
       absl::StrCat(status.generation(), ", timeline ", status.timeline(),
                    ", placement version ", status.placement_version())},
      {"model",
       absl::StrCat(WithCommas(status.parameters()), " parameters, weights ",
                    FormatBytes(status.weights_bytes()), ", state ",
                    FormatBytes(status.state_bytes()))},
      {"speed", absl::StrFormat("%.0f tokens/s", status.tokens_per_s())}};
  if (status.step() > 0) {
    rows.push_back({"loss", absl::StrFormat("%.4f", status.last().loss())});
  }
  const std::string validation = ValidationText(status);
  if (!validation.empty()) {
    rows.push_back({"", validation});
  }
  for (const auto& [name, text] :
       {std::pair{"checkpoint", status.last_checkpoint()},
        std::pair{"leader", status.leader()},
        std::pair{"missing", MissingText(status)},
        std::pair{"waits", status.waits_for()},
        std::pair{"failure", status.failure()}}) {
    if (!text.empty()) {
      rows.push_back({name, text});
    }
  }
  const std::string faults =
      FaultList({status.faults().begin(), status.faults().end()}, kFaultsShown);
  return absl::StrCat(FormatTable(rows), "\n", MembersText(status),
                      faults.empty() ? "" : "\n", faults);
}

namespace {

// What the coordinator has written into summary.json of the run's faults.
std::vector<v1::Fault> FaultsOf(const nlohmann::json& summary) {
  std::vector<v1::Fault> faults;
  const auto list = summary.find("faults");
  if (list == summary.end() || !list->is_array()) {
    return faults;
  }
  for (const nlohmann::json& one : *list) {
    const auto member = one.find("member");
    const auto seconds = one.find("recovered_seconds");
    if (member == one.end() || !member->is_string()) {
      continue;
    }
    v1::Fault fault;
    fault.set_member(member->get<std::string>());
    fault.set_recovered_seconds(seconds != one.end() && seconds->is_number()
                                    ? seconds->get<double>()
                                    : -1.0);
    faults.push_back(fault);
  }
  return faults;
}

}  // namespace

std::string SummaryText(const std::string& run_dir) {
  std::ifstream file(run_dir + "/summary.json");
  const auto summary =
      nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!summary.is_object()) {
    return "";
  }
  const auto number = [&summary](const char* key) {
    const auto it = summary.find(key);
    return it != summary.end() && it->is_number() ? it->get<double>() : NAN;
  };
  const auto whole = [&summary](const char* key) {
    const auto it = summary.find(key);
    return it != summary.end() && it->is_number_unsigned() ? it->get<uint64_t>()
                                                           : uint64_t{0};
  };
  const auto bytes = [&whole](const char* key) {
    return FormatBytes(whole(key));
  };
  const auto text = [&summary](const char* key) {
    const auto it = summary.find(key);
    return it != summary.end() && it->is_string() ? it->get<std::string>()
                                                  : std::string("-");
  };
  const std::string faults = FaultTable(FaultsOf(summary));
  std::string out = FormatTable(
      {{"steps", WithCommas(whole("steps"))},
       {"final validation loss",
        absl::StrFormat("%.4f nats a byte", number("final_validation_loss"))},
       {"speed", absl::StrFormat("%.0f tokens/s", number("tokens_per_s"))},
       {"worker's device", absl::StrCat("peak ", bytes("worker_peak_bytes"),
                                        " of ", bytes("worker_budget_bytes"))},
       {"server's RAM", absl::StrCat("peak ", bytes("server_peak_bytes"),
                                     " of ", bytes("server_ram_budget_bytes"))},
       {"written to disk", bytes("spilled_bytes_written")},
       {"state_hash", text("state_hash")},
       {"checkpoint", text("checkpoint")},
       {"run folder", run_dir}});
  return absl::StrCat(out, faults.empty() ? "" : "\n", faults);
}

ProgressPrinter::ProgressPrinter(const Job& job, bool terminal, std::FILE* out)
    : job_(job), terminal_(terminal), out_(out) {}

void ProgressPrinter::Erase() {
  if (block_lines_ > 0) {
    // Up to the block's first line, then erase to the end of the screen.
    absl::FPrintF(out_, "\x1b[%dA\x1b[J", block_lines_);
    block_lines_ = 0;
  }
}

void ProgressPrinter::Say(const std::string& text) {
  Erase();
  std::fputs(text.c_str(), out_);
  std::fflush(out_);
}

void ProgressPrinter::Show(const v1::StatusReply& status, absl::Time now) {
  if (!table_shown_ && KnowsPlans(job_, status)) {
    table_shown_ = true;
    Say(absl::StrCat(StartTable(job_, status), "\n"));
  }
  if (terminal_) {
    const std::string block = ProgressBlock(job_, status);
    // Without wrapping: a line too long must not become two.
    Say(absl::StrCat("\x1b[?7l", block, "\x1b[?7h"));
    block_lines_ =
        static_cast<int>(std::count(block.begin(), block.end(), '\n'));
    return;
  }
  const std::string phase = IsTraining(status) ? "training" : status.phase();
  const bool news =
      status.validation_step() != validation_shown_ || phase != phase_shown_;
  if (!news && (now < next_line_ || status.step() == step_shown_)) {
    return;
  }
  next_line_ = now + kLineEvery;
  step_shown_ = status.step();
  validation_shown_ = status.validation_step();
  phase_shown_ = phase;
  Say(ProgressLine(job_, status));
}

}  // namespace ballast
