// SPDX-License-Identifier: Apache-2.0
// `ballast status`: members, placement, step, tiers and waits of a run.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/units.h"
#include "ps/cli/cluster_client.h"
#include "ps/cli/progress.h"
#include "ps/cli/proto_json.h"
#include "ps/cli/text_table.h"
#include "ps/cli/tool.h"

namespace ballast {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(5);

struct Arguments {
  Target target;
  bool json = false;
};

int ShowStatus(const Arguments& arguments) {
  auto client = ConnectTo(arguments.target);
  if (!client.ok()) {
    return Fail(client.status());
  }
  const absl::StatusOr<v1::StatusReply> status =
      (*client)->GetStatus(kCallTimeout);
  if (!status.ok()) {
    return Fail(status.status());
  }
  const std::string text = arguments.json
                               ? MessageToJson(*status).dump(2) + "\n"
                               : StatusText(*status);
  std::fputs(text.c_str(), stdout);
  return kExitDone;
}

}  // namespace

void AddStatusCommand(CLI::App* app, const Surroundings&, Action* action) {
  auto arguments = std::make_shared<Arguments>();  // Lives in the callback.
  CLI::App* command = app->add_subcommand(
      "status",
      "Show a run: step, phase, members, where memory is, who waits.");
  AddTargetOptions(command, &arguments->target);
  command->add_flag("--json", arguments->json,
                    "Print one JSON object with the fields of StatusReply "
                    "(proto/ballast.proto).");
  command->footer(HelpFooter("", "0 shown   1 no answer   2 usage",
                             "ballast status --json"));
  command->callback([action, arguments] {
    *action = [arguments] { return ShowStatus(*arguments); };
  });
}

}  // namespace ballast
