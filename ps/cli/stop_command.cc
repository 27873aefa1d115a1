// SPDX-License-Identifier: Apache-2.0
// `ballast stop`: ends a run in good order.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock.h"
#include "ps/cli/cluster_client.h"
#include "ps/cli/tool.h"

namespace ballast {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(5);
// The step in flight, its checkpoint and the ends of all members.
constexpr absl::Duration kEndTimeout = absl::Minutes(2);

struct Arguments {
  Target target;
  bool abort = false;
};

int Stop(const Arguments& arguments) {
  auto client = ConnectTo(arguments.target);
  if (!client.ok()) {
    return Fail(client.status());
  }
  const absl::Status told =
      (*client)->Stop("asked by `ballast stop`", arguments.abort, kCallTimeout);
  if (!told.ok()) {
    return Fail(told);
  }
  const absl::Time until = MonotonicNow() + kEndTimeout;
  std::string waits_for;
  while (MonotonicNow() < until) {
    const absl::StatusOr<v1::StatusReply> status =
        (*client)->GetStatus(kCallTimeout);
    if (!status.ok()) {  // Gone.
      std::puts("stopped");
      return kExitDone;
    }
    waits_for = status->waits_for();
    absl::SleepFor(absl::Milliseconds(100));
  }
  return Fail(absl::DeadlineExceededError(absl::StrCat(
      "the run has not ended after ", absl::FormatDuration(kEndTimeout),
      waits_for.empty() ? "" : "; it waits for ", waits_for,
      "; ballast stop --abort ends it without a checkpoint")));
}

}  // namespace

void AddStopCommand(CLI::App* app, const Surroundings&, Action* action) {
  auto arguments = std::make_shared<Arguments>();  // Lives in the callback.
  CLI::App* command = app->add_subcommand(
      "stop",
      "End a run: finish the step in flight, write a checkpoint, end every "
      "process.");
  AddTargetOptions(command, &arguments->target);
  command->add_flag("--abort", arguments->abort,
                    "End at once: no step is finished, no checkpoint written.");
  command->footer(HelpFooter(
      "Returns when the coordinator is gone, after 2 minutes at most.",
      "0 stopped   1 no run there, or not ended   2 usage",
      "ballast stop --run-dir runs/austen"));
  command->callback([action, arguments] {
    *action = [arguments] { return Stop(*arguments); };
  });
}

}  // namespace ballast
