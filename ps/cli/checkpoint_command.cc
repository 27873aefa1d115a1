// SPDX-License-Identifier: Apache-2.0
// `ballast checkpoint`: list, verify and export what a run has saved.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/units.h"
#include "ps/cli/checkpoint_files.h"
#include "ps/cli/cluster_client.h"
#include "ps/cli/text_table.h"
#include "ps/cli/tool.h"
#include "ps/coordinator/startup.h"
#include "ps/membership/step_chain.h"
#include "storage/state_store.h"

namespace ballast {
namespace {

using Json = nlohmann::ordered_json;

constexpr absl::Duration kCallTimeout = absl::Seconds(5);
constexpr char kWhere[] =
    "With --run-dir no cluster needs to be up; without, the coordinator is "
    "asked.";
constexpr char kExits[] =
    "0 done   1 none there, damaged, or cannot be written   2 usage";

struct Arguments {
  Target target;
  std::optional<uint64_t> step;
  std::string chain;  // Of this run folder; empty: checkpoints are meant.
  std::string format = "safetensors";
  ExportOptions options;
  bool json = false;
};

// Where the checkpoints are: --run-dir needs no cluster, else the coordinator
// is asked for its run's folder.
absl::StatusOr<std::string> CheckpointsDir(const Target& target) {
  std::string run_dir = target.run_dir;
  if (run_dir.empty()) {
    BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<ClusterClient> client,
                             ConnectTo(target));
    BALLAST_ASSIGN_OR_RETURN(const v1::StatusReply status,
                             client->GetStatus(kCallTimeout));
    run_dir = status.run_dir();
  }
  return absl::StrCat(run_dir, "/checkpoints");
}

int ListCheckpoints(const Arguments& arguments) {
  const absl::StatusOr<std::string> dir = CheckpointsDir(arguments.target);
  if (!dir.ok()) {
    return Fail(dir.status());
  }
  const absl::Status any = ChooseCheckpoint(*dir, std::nullopt).status();
  if (!any.ok()) {
    return Fail(any);
  }
  Json json = Json::array();
  std::vector<std::vector<std::string>> rows = {
      {"step", "timeline", "parameters", "samples", "manifest"}};
  for (const CheckpointFolder& folder : FindCheckpoints(*dir)) {
    const absl::StatusOr<CheckpointManifest> manifest =
        ReadManifest(folder.path);
    if (!manifest.ok()) {
      rows.push_back({absl::StrCat(folder.step), "damaged", "", "",
                      std::string(manifest.status().message())});
      json.push_back({{"step", folder.step},
                      {"path", folder.path},
                      {"whole", false},
                      {"error", std::string(manifest.status().message())}});
      continue;
    }
    rows.push_back({absl::StrCat(folder.step), absl::StrCat(manifest->timeline),
                    WithCommas(manifest->layout.parameter_count()),
                    WithCommas(manifest->samples_consumed), folder.path});
    json.push_back({{"step", folder.step},
                    {"path", folder.path},
                    {"whole", true},
                    {"timeline", manifest->timeline},
                    {"parameters", manifest->layout.parameter_count()},
                    {"optimizer_step", manifest->optimizer_step},
                    {"samples_consumed", manifest->samples_consumed}});
  }
  const std::string text = arguments.json
                               ? Json({{"checkpoints", json}}).dump(2) + "\n"
                               : FormatTable(rows);
  std::fputs(text.c_str(), stdout);
  return kExitDone;
}

// All of them, or the one of --step.
absl::StatusOr<std::vector<CheckpointFolder>> ToVerify(
    const Arguments& arguments) {
  BALLAST_ASSIGN_OR_RETURN(const std::string dir,
                           CheckpointsDir(arguments.target));
  BALLAST_ASSIGN_OR_RETURN(const CheckpointFolder one,
                           ChooseCheckpoint(dir, arguments.step));
  return arguments.step.has_value() ? std::vector<CheckpointFolder>{one}
                                    : FindCheckpoints(dir);
}

absl::StatusOr<ChainReport> ReadChain(const std::string& run_dir) {
  const std::string dir = absl::StrCat(run_dir, "/coordinator");
  std::error_code error;
  if (!std::filesystem::is_directory(dir, error)) {
    return absl::NotFoundError(
        absl::StrCat("no step log in ", run_dir,
                     "; want the folder of a run (run.dir), such as "
                     "runs/austen"));
  }
  EmbeddedStoreOptions options;
  options.create = false;
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<StateStore> store,
                           OpenEmbeddedStateStore(dir, options));
  BALLAST_ASSIGN_OR_RETURN(const RunState state, ReadRunState(store.get()));
  return CheckChain(state);
}

int VerifyChain(const Arguments& arguments) {
  const absl::StatusOr<ChainReport> report = ReadChain(arguments.chain);
  if (!report.ok()) {
    return Fail(report.status());
  }
  const std::string head = absl::BytesToHexString(report->head);
  const std::string text =
      arguments.json ? Json({{"run_dir", arguments.chain},
                             {"records", report->records},
                             {"checked", report->checked},
                             {"timelines", report->timelines},
                             {"first_step", report->first_step},
                             {"last_step", report->last_step},
                             {"chain", head}})
                               .dump(2) +
                           "\n"
      : report->records == 0
          ? absl::StrCat("the step log of ", arguments.chain,
                         " holds no step yet\n")
          : absl::StrCat(
                "steps ", report->first_step, " to ", report->last_step,
                "  whole: ", report->checked, " of ", report->records,
                " records follow from the one before, on ", report->timelines,
                report->timelines == 1 ? " timeline" : " timelines", "  chain ",
                head, "\n");
  std::fputs(text.c_str(), stdout);
  return kExitDone;
}

int VerifyCheckpoints(const Arguments& arguments) {
  if (!arguments.chain.empty()) {
    return VerifyChain(arguments);
  }
  const absl::StatusOr<std::vector<CheckpointFolder>> folders =
      ToVerify(arguments);
  if (!folders.ok()) {
    return Fail(folders.status());
  }
  int damaged = 0;
  Json json = Json::array();
  for (const CheckpointFolder& folder : *folders) {
    const absl::StatusOr<Hash128> hash = VerifyCheckpoint(folder.path);
    Json entry = {
        {"step", folder.step}, {"path", folder.path}, {"whole", hash.ok()}};
    if (hash.ok()) {
      entry["state_hash"] = HashHex(*hash);
    } else {
      ++damaged;
      entry["error"] = std::string(hash.status().message());
      Fail(absl::DataLossError(absl::StrCat("checkpoint of step ", folder.step,
                                            ": ", hash.status().message())));
    }
    if (!arguments.json && hash.ok()) {
      std::printf("step %llu  whole  state_hash %s  %s\n",
                  static_cast<unsigned long long>(folder.step),
                  HashHex(*hash).c_str(), folder.path.c_str());
    }
    json.push_back(std::move(entry));
  }
  if (arguments.json) {
    std::puts(
        Json({{"damaged", damaged}, {"checkpoints", json}}).dump(2).c_str());
  }
  return damaged == 0 ? kExitDone : kExitFailed;
}

absl::StatusOr<std::string> Export(const Arguments& arguments) {
  BALLAST_ASSIGN_OR_RETURN(const std::string dir,
                           CheckpointsDir(arguments.target));
  BALLAST_ASSIGN_OR_RETURN(const CheckpointFolder folder,
                           ChooseCheckpoint(dir, arguments.step));
  BALLAST_ASSIGN_OR_RETURN(const CheckpointManifest manifest,
                           ReadManifest(folder.path));
  BALLAST_RETURN_IF_ERROR(ExportCheckpoint(manifest, arguments.options));
  if (arguments.json) {
    return Json({{"output", arguments.options.output},
                 {"step", manifest.step},
                 {"parameters", manifest.layout.parameter_count()},
                 {"full", arguments.options.full}})
               .dump() +
           "\n";
  }
  return absl::StrCat("step ", manifest.step, ": ",
                      WithCommas(manifest.layout.parameter_count()),
                      " parameters",
                      arguments.options.full ? " and optimizer state" : "",
                      " in ", arguments.options.output, "\n");
}

int ExportChosen(const Arguments& arguments) {
  const absl::StatusOr<std::string> text = Export(arguments);
  if (!text.ok()) {
    return Fail(text.status());
  }
  std::fputs(text->c_str(), stdout);
  return kExitDone;
}

CLI::App* AddPart(CLI::App* parent, const char* name, const char* description,
                  const std::shared_ptr<Arguments>& arguments,
                  int (*run)(const Arguments&), Action* action) {
  CLI::App* command = parent->add_subcommand(name, description);
  AddTargetOptions(command, &arguments->target);
  command->add_flag("--json", arguments->json, "Print one JSON object.");
  command->callback([action, arguments, run] {
    *action = [arguments, run] { return run(*arguments); };
  });
  return command;
}

}  // namespace

void AddCheckpointCommand(CLI::App* app, const Surroundings&, Action* action) {
  auto arguments = std::make_shared<Arguments>();  // Lives in the callbacks.
  CLI::App* checkpoint = app->add_subcommand(
      "checkpoint", "List, verify or export what a run has saved.");
  checkpoint->require_subcommand(1);
  checkpoint->footer(HelpFooter(
      kWhere, kExits, "ballast checkpoint list --run-dir runs/austen"));

  AddPart(checkpoint, "list", "List the checkpoints of a run.", arguments,
          ListCheckpoints, action)
      ->footer(HelpFooter(kWhere, kExits,
                          "ballast checkpoint list --run-dir runs/austen"));

  CLI::App* verify =
      AddPart(checkpoint, "verify",
              "Read checkpoints whole, check every block, print each "
              "state_hash.",
              arguments, VerifyCheckpoints, action);
  CLI::App* export_part = AddPart(checkpoint, "export",
                                  "Write a checkpoint as one safetensors file.",
                                  arguments, ExportChosen, action);
  CLI::Option* step =
      verify->add_option("--step", arguments->step,
                         "Only the checkpoint of this step. Default: all.");
  verify
      ->add_option("--chain", arguments->chain,
                   "Instead: check the hash chain over the steps that this run "
                   "has committed. No\ncluster may be up.")
      ->type_name("RUN_DIR")
      ->excludes(step)
      ->excludes("--run-dir")
      ->excludes("--coordinator");
  export_part->add_option("--step", arguments->step,
                          "The checkpoint of this step. Default: the newest.");
  export_part
      ->add_option("--format", arguments->format, "Default: safetensors.")
      ->check(CLI::IsMember({"safetensors"}).description(""))
      ->type_name("safetensors");
  export_part
      ->add_option("--output", arguments->options.output, "File to write.")
      ->required()
      ->type_name("FILE");
  export_part->add_flag("--full", arguments->options.full,
                        "Optimizer state too, as exp_avg.NAME and "
                        "exp_avg_sq.NAME.");
  export_part->add_flag("--force", arguments->options.force,
                        "Replace FILE when it is there.");
  verify->footer(HelpFooter(
      absl::StrCat(kWhere,
                   "\nWhile a run is up, old checkpoints may go meanwhile: "
                   "choose one with --step.\nThe chain of a log that was "
                   "pruned begins with a record that is taken on trust."),
      kExits, "ballast checkpoint verify --run-dir runs/austen"));
  export_part->footer(HelpFooter(
      absl::StrCat("The file holds fp32 parameters under the names that "
                   "Hugging Face's model of the\nsame family uses. ",
                   kWhere),
      kExits,
      "ballast checkpoint export --run-dir runs/austen --format safetensors "
      "--output austen.safetensors"));
}

}  // namespace ballast
