// SPDX-License-Identifier: Apache-2.0
// `ballast train`: a whole cluster on this machine, from one job file.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/job_file.h"
#include "ps/cli/run_folder.h"
#include "ps/cli/text_table.h"
#include "ps/cli/tool.h"
#include "ps/cli/training.h"

namespace ballast {
namespace {

struct Arguments {
  TrainingOptions options;
  std::vector<std::string> set;
  std::optional<std::string> chaos;
  uint32_t servers = 0;  // 0: as the job says.
  uint32_t workers = 0;
  bool print_config = false;
};

// CLI11's own range names the largest double there is.
CLI::Validator AtLeastOne() {
  return CLI::Validator(
      [](const std::string& text) {
        uint64_t number = 0;
        return absl::SimpleAtoi(text, &number) && number > 0
                   ? std::string()
                   : absl::StrCat("is `", text,
                                  "`; want a whole number from 1");
      },
      "");
}

void PrintConfig(const JobFile& file) {
  std::vector<std::vector<std::string>> rows;
  for (const ConfigEntry& entry : file.entries) {
    rows.push_back({entry.key, entry.value, absl::StrCat("# ", entry.source)});
  }
  std::fputs(FormatTable(rows).c_str(), stdout);
}

// The job and its overrides as one would type them again: what a message says
// to run must mean the same run.
std::string AsTyped(const std::string& job_path,
                    const std::vector<std::string>& set) {
  std::string typed = job_path;
  for (const std::string& one : set) {
    const bool plain =
        one.find_first_of(" \t\n'\"\\$`*?[]{}()<>|&;#~") == std::string::npos;
    absl::StrAppend(
        &typed, " --set ",
        plain ? one
              : absl::StrCat("'", absl::StrReplaceAll(one, {{"'", "'\\''"}}),
                             "'"));
  }
  return typed;
}

int Train(const Arguments& arguments, const Surroundings& surroundings) {
  TrainingOptions options = arguments.options;
  if (arguments.chaos.has_value()) {
    absl::StatusOr<ChaosPlan> chaos = ParseChaos(*arguments.chaos);
    if (!chaos.ok()) {
      return Fail(chaos.status(), kExitUsage);
    }
    options.chaos = *std::move(chaos);
  }
  std::vector<std::string> set = arguments.set;
  if (arguments.servers > 0) {
    set.push_back(absl::StrCat("server.count=", arguments.servers));
  }
  if (arguments.workers > 0) {
    set.push_back(absl::StrCat("worker.count=", arguments.workers));
  }
  absl::StatusOr<JobFile> file = LoadJobFile(arguments.options.job_path, set);
  if (!file.ok()) {
    return Fail(file.status(), kExitBadConfig);
  }
  if (arguments.print_config) {
    PrintConfig(*file);
    return kExitDone;
  }
  const absl::Status text = CheckText(file->job);
  if (!text.ok()) {
    return Fail(text, kExitBadConfig);
  }
  const absl::StatusOr<std::string> hash = HashText(file->job);
  if (!hash.ok()) {
    return Fail(hash.status(), kExitBadConfig);
  }
  options.job_path = AsTyped(options.job_path, set);
  set.push_back(absl::StrCat("data.hash=", *hash));
  file = LoadJobFile(arguments.options.job_path, set);
  if (!file.ok()) {
    return Fail(file.status(), kExitBadConfig);
  }
  const absl::StatusOr<LockedRunFolder> folder =
      LockedRunFolder::Open(*file, options.resume, options.job_path);
  if (!folder.ok()) {
    return Fail(folder.status(), absl::IsInvalidArgument(folder.status())
                                     ? kExitBadConfig
                                     : kExitFailed);
  }
  return RunTraining(*file, *folder, options, surroundings);
}

}  // namespace

void AddTrainCommand(CLI::App* app, const Surroundings& surroundings,
                     Action* action) {
  auto arguments = std::make_shared<Arguments>();  // Lives in the callback.
  CLI::App* command = app->add_subcommand(
      "train", "Run a whole cluster on this machine until the job is done.");
  command->add_option("job", arguments->options.job_path, "Job file (YAML).")
      ->required()
      ->type_name("JOB.yaml");
  command
      ->add_option("--servers", arguments->servers,
                   "Shard servers. Default: server.count of the job.")
      ->check(AtLeastOne())
      ->type_name("N");
  command
      ->add_option("--workers", arguments->workers,
                   "Workers. Default: worker.count of the job.")
      ->check(AtLeastOne())
      ->type_name("M");
  command
      ->add_option("--set", arguments->set,
                   "Override a key of the job; the value is YAML. May be "
                   "repeated.")
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");
  command->add_flag(
      "--resume", arguments->options.resume,
      "Continue the run of the run folder: from its newest step, or "
      "from its\nnewest checkpoint under server.durability "
      "checkpoint.");
  command
      ->add_option("--stop-after", arguments->options.stop_after,
                   "End after this step, with a checkpoint. Default: "
                   "run.steps.")
      ->check(AtLeastOne())
      ->type_name("STEP");
  command->add_flag("--keep", arguments->options.keep,
                    "Hold the cluster up after the last step, until Ctrl-C or "
                    "`ballast stop`.");
  command
      ->add_option("--chaos", arguments->chaos,
                   "Rehearse: kill (SIGKILL) or stop (SIGSTOP for twice "
                   "cluster.lease) a member of a\nrole again and again, "
                   "chosen by the seed.")
      ->type_name("seed=N,kill=ROLE:PERIOD[,kill=...][,stop=ROLE:PERIOD]");
  command->add_flag("--print-config", arguments->print_config,
                    "Print every key, its value and where it comes from; "
                    "start nothing.");
  command->footer(HelpFooter(
      "Starts a coordinator, shard servers and workers as processes, shows "
      "progress, and\nends them all. Who dies is started again, at once and "
      "then ever later; a member\nthat dies cluster.restarts_max times "
      "without a step in between ends the run.\n\nThe run folder (run.dir) "
      "gets config.yaml, metrics.jsonl, summary.json,\ncheckpoints/ and "
      "logs/. Ctrl-C finishes the step in flight, writes a checkpoint\nand "
      "ends; a second one ends at once.",
      "0 done, or stopped in good order   1 failed, or ended at once\n  2 "
      "usage   78 bad configuration",
      "ballast train examples/austen.yaml --workers 2 --set run.seed=7"));
  command->callback([action, arguments, surroundings] {
    *action = [arguments, surroundings] {
      return Train(*arguments, surroundings);
    };
  });
}

}  // namespace ballast
