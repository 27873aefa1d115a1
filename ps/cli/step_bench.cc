// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/step_bench.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/dtype.h"
#include "common/random.h"
#include "common/status_macros.h"
#include "ps/cli/child_process.h"
#include "ps/cli/run_folder.h"
#include "storage/file.h"

namespace ballast {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kWarmupSteps = 2;
constexpr uint64_t kSummaryBytesMax = 1 << 20;
// A run that takes longer than this is a failure, not a slow machine.
constexpr absl::Duration kRunMax = absl::Minutes(10);

// A folder of its own under the system's temporary one, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "ballast-bench-XXXXXX")
            .string();
    if (mkdtemp(pattern.data()) != nullptr) {
      path_ = pattern;
    }
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Letters with some structure: the speed does not depend on the text.
std::string MakeText() {
  std::string text;
  for (uint64_t i = 0; i < 1 << 20; ++i) {
    text.push_back(static_cast<char>('a' + Philox(7, i / 2, 0)[0] % 26));
  }
  return text;
}

std::string JobText(const StepBenchModel& model, const std::string& folder,
                    const StepBenchOptions& options, bool in_core) {
  return absl::StrCat(
      "run: {name: bench, dir: ", folder, "/run, steps: ", options.steps,
      "}\nmodel: {layers: ", model.layers, ", heads: ", model.heads,
      ", width: ", model.width, ", context: ", model.context,
      "}\ndata: {path: ", folder,
      "/text.txt}\nbatch: {micro_batches: ", model.micro_batches,
      ", micro_batch_size: ", model.micro_batch_size,
      "}\nprecision: {compute_dtype: ", DTypeName(options.dtype),
      "}\noptimizer: {lr: 1e-4}\nworker: {count: 1, memory: ",
      in_core ? "6GiB" : model.worker_memory,
      ", host_memory: 1GiB}\nserver: {count: 1, durability: "
      "checkpoint, memory: ",
      in_core ? "4GiB" : model.server_memory,
      "}\neval: {micro_batches: 1}\ncluster: {port: 0}\n");
}

absl::Status RunJob(const StepBenchOptions& options,
                    const std::string& folder) {
  const std::string log = absl::StrCat(folder, "/output.txt");
  BALLAST_ASSIGN_OR_RETURN(
      const std::unique_ptr<ChildProcess> run,
      ChildProcess::Start(
          {.name = "ballast train",
           .argv = {absl::StrCat(options.binary_dir, "/ballast"), "train",
                    absl::StrCat(folder, "/job.yaml")},
           .log_path = log}));
  const absl::Time end = MonotonicNow() + kRunMax;
  while (!run->Ended()) {
    if (MonotonicNow() > end) {
      return absl::InternalError(absl::StrCat("the run took longer than ",
                                              absl::FormatDuration(kRunMax),
                                              "\n", LastLines(log, 5)));
    }
    absl::SleepFor(absl::Milliseconds(50));
  }
  if (run->exit_code() != 0) {
    return absl::InternalError(
        absl::StrCat("ballast train ", run->Ending(), "\n", LastLines(log, 8)));
  }
  return absl::OkStatus();
}

double Median(std::vector<double> values) {
  if (values.empty()) {
    return 0;
  }
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

absl::StatusOr<Json> ReadJson(const std::string& text) {
  Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) {
    return absl::InternalError("the run left a file that is not JSON");
  }
  return json;
}

// Seconds of each measured step.
absl::StatusOr<std::vector<double>> StepSeconds(const std::string& run_dir) {
  std::ifstream lines(run_dir + "/metrics.jsonl");
  std::vector<double> seconds;
  for (std::string line; std::getline(lines, line);) {
    BALLAST_ASSIGN_OR_RETURN(const Json step, ReadJson(line));
    if (step.value("step", uint64_t{0}) > kWarmupSteps) {
      seconds.push_back(step.value("step_s", 0.0));
    }
  }
  return seconds;
}

absl::StatusOr<Json> BenchRun(const StepBenchModel& model,
                              const StepBenchOptions& options, bool in_core) {
  const TemporaryFolder folder;
  BALLAST_RETURN_IF_ERROR(WriteFileAtomically(
      absl::StrCat(folder.path(), "/text.txt"), MakeText()));
  BALLAST_RETURN_IF_ERROR(
      WriteFileAtomically(absl::StrCat(folder.path(), "/job.yaml"),
                          JobText(model, folder.path(), options, in_core)));
  BALLAST_RETURN_IF_ERROR(RunJob(options, folder.path()));
  const std::string run_dir = absl::StrCat(folder.path(), "/run");
  BALLAST_ASSIGN_OR_RETURN(
      const std::string text,
      ReadFile(run_dir + "/summary.json", kSummaryBytesMax));
  BALLAST_ASSIGN_OR_RETURN(const Json summary, ReadJson(text));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                           StepSeconds(run_dir));
  const double step_seconds = Median(seconds);
  const double tokens = static_cast<double>(
      uint64_t{model.micro_batches} * model.micro_batch_size * model.context);
  const auto parameters = summary.value("parameters", uint64_t{0});
  const double tokens_per_s = step_seconds > 0 ? tokens / step_seconds : 0;
  // Forward and backward products of a dense model: 6 operations a parameter
  // and token. Recomputation is not counted.
  const double gflops =
      6.0 * static_cast<double>(parameters) * tokens_per_s * 1e-9;
  Json row;
  row["path"] = absl::StrCat(model.name, " ", DTypeName(options.dtype),
                             in_core ? " in core" : " out of core");
  row["tokens_per_s"] = tokens_per_s;
  row["step_s"] = step_seconds;
  row["gflops"] = gflops;
  row["ceiling_gflops"] = options.ceiling_gflops;
  row["ratio"] = gflops / options.ceiling_gflops;
  row["parameters"] = parameters;
  row["tokens_per_step"] = tokens;
  row["workers"] = 1;
  row["servers"] = 1;
  row["durability"] = "checkpoint";
  for (const char* key :
       {"weights_bytes", "worker_budget_bytes", "worker_peak_bytes",
        "state_bytes", "server_ram_budget_bytes", "server_peak_bytes",
        "spilled_bytes_written", "pushed_bytes_per_step", "gradient_bytes",
        "minor_faults_per_step", "state_hash"}) {
    row[key] = summary.contains(key) ? summary[key] : Json();
  }
  return row;
}

}  // namespace

std::vector<StepBenchModel> StepBenchModels() {
  return {{.name = "gpt2-25m",
           .layers = 8,
           .heads = 8,
           .width = 512,
           .context = 256,
           .micro_batches = 4,
           .micro_batch_size = 2,
           .worker_memory = "80MiB",
           .server_memory = "128MiB"},
          // examples/deep.yaml with one server: its budgets together.
          {.name = "deep",
           .layers = 32,
           .heads = 7,
           .width = 448,
           .context = 256,
           .micro_batches = 8,
           .micro_batch_size = 1,
           .worker_memory = "72MiB",
           .server_memory = "208MiB"}};
}

absl::StatusOr<std::vector<Json>> BenchSteps(const StepBenchModel& model,
                                             const StepBenchOptions& options) {
  BALLAST_ASSIGN_OR_RETURN(Json in_core, BenchRun(model, options, true));
  BALLAST_ASSIGN_OR_RETURN(Json out_of_core, BenchRun(model, options, false));
  in_core["of_in_core"] = 1.0;
  in_core["wrong"] = 0;
  out_of_core["of_in_core"] = out_of_core["tokens_per_s"].get<double>() /
                              in_core["tokens_per_s"].get<double>();
  out_of_core["wrong"] =
      out_of_core["state_hash"] == in_core["state_hash"] ? 0 : 1;
  return std::vector<Json>{std::move(in_core), std::move(out_of_core)};
}

}  // namespace ballast
