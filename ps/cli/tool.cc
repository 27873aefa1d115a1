// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/tool.h"

#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace ballast {
namespace {

// Another command is one line here and one file.
constexpr std::array<AddCommand, 8> kCommands = {
    AddTrainCommand, AddStatusCommand,     AddWorkerCommand, AddServerCommand,
    AddShardCommand, AddCheckpointCommand, AddStopCommand,   AddBenchCommand};

}  // namespace

int RunTool(int argc, const char* const* argv,
            const Surroundings& surroundings) {
  CLI::App app("ballast - train models larger than the device that trains them",
               "ballast");
  app.require_subcommand(1);
  app.set_version_flag("--version", BALLAST_VERSION);
  app.footer(HelpFooter("`ballast COMMAND --help` says more about each.",
                        "0 done   1 failed   2 usage   78 bad configuration",
                        "ballast train examples/austen.yaml"));
  Action action;
  for (const AddCommand add : kCommands) {
    add(&app, surroundings, &action);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {  // --help and --version.
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return Fail(absl::InvalidArgumentError(
                    absl::StrCat(error.what(),
                                 "; see `ballast --help` and `ballast COMMAND "
                                 "--help`")),
                kExitUsage);
  }
  return action();
}

int Fail(const absl::Status& status, int code) {
  const std::string line = absl::StrCat(
      "ballast: ", absl::StrReplaceAll(status.message(), {{"\n", " "}}), "\n");
  std::fflush(stdout);
  std::fputs(line.c_str(), stderr);
  return code;
}

std::string HelpFooter(const std::string& more, const std::string& exit_codes,
                       const std::string& example) {
  return absl::StrCat(more.empty() ? "" : "\n", more, more.empty() ? "" : "\n",
                      "\nExit codes:\n  ", exit_codes, "\n\nExample:\n  ",
                      example);
}

void AddTargetOptions(CLI::App* command, Target* target) {
  command->add_option("--coordinator", target->coordinator,
                      absl::StrCat("Coordinator to ask, host:port. Default: ",
                                   kDefaultCoordinator, "."));
  command
      ->add_option("--run-dir", target->run_dir,
                   "Run folder; its coordinator is asked unless --coordinator "
                   "names one.")
      ->type_name("DIR");
}

}  // namespace ballast
