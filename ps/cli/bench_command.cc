// SPDX-License-Identifier: Apache-2.0
// `ballast bench gemm | step`.

#include <sys/utsname.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "ps/cli/product_rates.h"
#include "ps/cli/step_bench.h"
#include "ps/cli/text_table.h"
#include "ps/cli/tool.h"

namespace ballast {
namespace {

using Json = nlohmann::ordered_json;

struct BenchFlags {
  bool json = false;
  std::string dtype = "fp32";
  std::string model;
  uint32_t steps = 8;
  int threads = 0;
};

int Threads(const BenchFlags& flags) {
  return flags.threads > 0 ? flags.threads
                           : static_cast<int>(std::max(
                                 1u, std::thread::hardware_concurrency()));
}

DType DtypeOf(const BenchFlags& flags) {
  return flags.dtype == "bf16" ? DType::kBF16 : DType::kF32;
}

std::string CpuName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    absl::string_view rest = line;
    if (absl::ConsumePrefix(&rest, "model name")) {
      return std::string(
          absl::StripLeadingAsciiWhitespace(rest.substr(rest.find(':') + 1)));
    }
  }
  return "unknown";
}

Json Machine(const BenchFlags& flags) {
  utsname system = {};
  uname(&system);
  std::string congestion;
  std::ifstream("/proc/sys/net/ipv4/tcp_congestion_control") >> congestion;
  Json machine;
  machine["cpu"] = CpuName();
  machine["cores"] = std::thread::hardware_concurrency();
  machine["threads"] = Threads(flags);
  machine["kernel"] = system.release;
  machine["tcp_congestion_control"] = congestion;
  return machine;
}

void Print(const BenchFlags& flags, const Json& result,
           const std::vector<std::vector<std::string>>& table,
           const std::vector<bool>& right) {
  if (flags.json) {
    std::printf("%s\n", result.dump(2).c_str());
    return;
  }
  std::printf("# %s, %d threads\n",
              result["machine"]["cpu"].get<std::string>().c_str(),
              Threads(flags));
  std::fputs(FormatTable(table, right).c_str(), stdout);
}

std::string Number(const Json& row, const char* key, int decimals) {
  return absl::StrFormat("%.*f", decimals, row[key].get<double>());
}

int BenchGemm(const BenchFlags& flags) {
  const std::vector<ProductRate> rates =
      MeasureProducts(Threads(flags), DtypeOf(flags), absl::Milliseconds(400));
  const double ceiling = CeilingGflops(rates);
  Json result;
  result["machine"] = Machine(flags);
  result["rows"] = Json::array();
  std::vector<std::vector<std::string>> table = {
      {"product", "rows", "in", "out", "GFLOP/s", "ceiling", "ratio"}};
  for (const ProductRate& rate : rates) {
    Json row;
    row["path"] = absl::StrCat(rate.product, " ", flags.dtype);
    row["rows"] = rate.shape.rows;
    row["in"] = rate.shape.in;
    row["out"] = rate.shape.out;
    row["bytes"] = (rate.shape.rows * (rate.shape.in + rate.shape.out) +
                    rate.shape.in * rate.shape.out) *
                   DTypeBytes(DtypeOf(flags));
    row["gflops"] = rate.gflops;
    row["ceiling_gflops"] = ceiling;
    row["ratio"] = rate.gflops / ceiling;
    row["wrong"] = 0;
    table.push_back({row["path"], absl::StrCat(rate.shape.rows),
                     absl::StrCat(rate.shape.in), absl::StrCat(rate.shape.out),
                     Number(row, "gflops", 0), Number(row, "ceiling_gflops", 0),
                     Number(row, "ratio", 2)});
    result["rows"].push_back(std::move(row));
  }
  Print(flags, result, table, {false, true, true, true, true, true, true});
  return kExitDone;
}

int BenchStep(const BenchFlags& flags, const std::string& binary_dir) {
  StepBenchOptions options;
  options.binary_dir = binary_dir;
  options.dtype = DtypeOf(flags);
  options.steps = flags.steps;
  options.ceiling_gflops = CeilingGflops(
      MeasureProducts(Threads(flags), options.dtype, absl::Milliseconds(300)));
  Json result;
  result["machine"] = Machine(flags);
  result["rows"] = Json::array();
  std::vector<std::vector<std::string>> table = {
      {"path", "tokens/s", "step (s)", "GFLOP/s", "ceiling", "ratio",
       "of in core", "#wrong"}};
  int wrong = 0;
  for (const StepBenchModel& model : StepBenchModels()) {
    if (!flags.model.empty() && flags.model != model.name) {
      continue;
    }
    auto rows = BenchSteps(model, options);
    if (!rows.ok()) {
      return Fail(rows.status());
    }
    for (Json& row : *rows) {
      wrong += row["wrong"].get<int>();
      table.push_back({row["path"], Number(row, "tokens_per_s", 0),
                       Number(row, "step_s", 2), Number(row, "gflops", 0),
                       Number(row, "ceiling_gflops", 0),
                       Number(row, "ratio", 2), Number(row, "of_in_core", 2),
                       absl::StrCat(row["wrong"].get<int>())});
      result["rows"].push_back(std::move(row));
    }
  }
  Print(flags, result, table,
        {false, true, true, true, true, true, true, true});
  return wrong == 0 ? kExitDone : kExitFailed;
}

void AddCommonFlags(CLI::App* command, BenchFlags* flags) {
  command->add_flag("--json", flags->json,
                    "Print one JSON object instead of a table.");
  command->add_option("--dtype", flags->dtype, "fp32 or bf16. Default: fp32.")
      ->check(CLI::IsMember({"fp32", "bf16"}));
}

}  // namespace

void AddBenchCommand(CLI::App* app, const Surroundings& surroundings,
                     Action* action) {
  // shared: the parser and the action both read the flags; the action outlives
  // this call.
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* bench = app->add_subcommand(
      "bench", "Measure this machine: each figure beside its ceiling.");
  bench->require_subcommand(1);
  CLI::App* gemm = bench->add_subcommand(
      "gemm", "Matrix products at the shapes of a small GPT.");
  AddCommonFlags(gemm, flags.get());
  gemm->add_option("--threads", flags->threads,
                   "Threads. Default: every core.");
  gemm->footer(HelpFooter("", "0 done  2 usage", "ballast bench gemm --json"));
  gemm->callback(
      [flags, action] { *action = [flags] { return BenchGemm(*flags); }; });
  CLI::App* step = bench->add_subcommand(
      "step",
      "Whole training steps, in core and out of core, beside the ceiling.");
  AddCommonFlags(step, flags.get());
  std::vector<std::string> names;
  for (const StepBenchModel& model : StepBenchModels()) {
    names.push_back(model.name);
  }
  step->add_option("--model", flags->model, "Only this one. Default: all.")
      ->check(CLI::IsMember(names));
  step->add_option("--steps", flags->steps,
                   "Steps of each run; the first 2 are warm-up. Default: 8.")
      ->check(CLI::Range(3, 1000));
  step->footer(HelpFooter(
      "Real processes, 1 worker and 1 server; takes some minutes. GFLOP/s "
      "counts "
      "6\noperations a parameter and token, so recomputation is a loss.",
      "0 done  1 a run failed or bits differ  2 usage",
      "ballast bench step --model gpt2-25m"));
  const std::string binary_dir = surroundings.binary_dir;
  step->callback([flags, action, binary_dir] {
    *action = [flags, binary_dir] { return BenchStep(*flags, binary_dir); };
  });
}

}  // namespace ballast
