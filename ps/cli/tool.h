// SPDX-License-Identifier: Apache-2.0
// `ballast`, the user's tool: what its commands share. Each command is one file
// that adds itself to the command line; tool.cc has the table of them.

#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace ballast {

// Part of the contract with scripts.
enum ExitCode : int {
  kExitDone = 0,
  kExitFailed = 1,
  kExitUsage = 2,
  kExitPending = 3,  // Asked for and going on, but not done in time.
  kExitBadConfig = 78,
};

// What the process knows of its surroundings; read in main alone.
struct Surroundings {
  std::string binary_dir;  // Where the binaries of the other roles are.
  bool terminal = false;   // Standard output is one.
};

// What a chosen command does; returns the exit code.
using Action = std::function<int()>;

// Adds one command to `app`; when the command line chooses it, *action is set.
using AddCommand = void (*)(CLI::App* app, const Surroundings& surroundings,
                            Action* action);
void AddTrainCommand(CLI::App* app, const Surroundings& surroundings,
                     Action* action);
void AddStatusCommand(CLI::App* app, const Surroundings& surroundings,
                      Action* action);
void AddStopCommand(CLI::App* app, const Surroundings& surroundings,
                    Action* action);
void AddShardCommand(CLI::App* app, const Surroundings& surroundings,
                     Action* action);
void AddCheckpointCommand(CLI::App* app, const Surroundings& surroundings,
                          Action* action);
void AddWorkerCommand(CLI::App* app, const Surroundings& surroundings,
                      Action* action);
void AddServerCommand(CLI::App* app, const Surroundings& surroundings,
                      Action* action);
void AddBenchCommand(CLI::App* app, const Surroundings& surroundings,
                     Action* action);

// Parses the command line, runs the command, returns the exit code.
int RunTool(int argc, const char* const* argv,
            const Surroundings& surroundings);

// Prints "ballast: <message>" on standard error and returns `code`.
int Fail(const absl::Status& status, int code = kExitFailed);

// The end of a command's help: what else there is to know (may be empty), exit
// codes, one command to copy.
std::string HelpFooter(const std::string& more, const std::string& exit_codes,
                       const std::string& example);

// Tells which cluster a command speaks to.
struct Target {
  std::string coordinator;  // host:port; empty: the default.
  std::string run_dir;      // Empty: by the coordinator alone.
};
inline constexpr char kDefaultCoordinator[] = "127.0.0.1:7400";
// Adds --coordinator and --run-dir.
void AddTargetOptions(CLI::App* command, Target* target);

}  // namespace ballast
