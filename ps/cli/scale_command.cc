// SPDX-License-Identifier: Apache-2.0
// `ballast worker add|drain` and `ballast server add|drain`: a running
// cluster's size.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/status_macros.h"
#include "ps/cli/cluster_client.h"
#include "ps/cli/scale.h"
#include "ps/cli/tool.h"

namespace ballast {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(5);
constexpr absl::Duration kAskEvery = absl::Milliseconds(100);
// A coordinator that is started again answers well within this.
constexpr absl::Duration kSilenceMax = absl::Seconds(30);

struct Arguments {
  Target target;
  v1::Role role = v1::ROLE_WORKER;
  bool add = false;
  uint32_t count = 1;
  std::string id;
  bool no_wait = false;
  std::string timeout = "10m";
  bool json = false;
};

void Print(const Arguments& arguments, const std::vector<std::string>& names,
           bool done) {
  if (arguments.json) {
    nlohmann::ordered_json json = {{"names", names}, {"done", done}};
    std::puts(json.dump().c_str());
    return;
  }
  const char* what = arguments.add ? (done ? "takes part" : "is asked for")
                                   : (done ? "has left" : "is told to leave");
  for (const std::string& name : names) {
    std::printf("%s %s\n", name.c_str(), what);
  }
}

// Who is not yet where he was asked to be, and what he does instead.
absl::StatusOr<std::vector<std::string>> Missing(
    const Arguments& arguments, ClusterClient* client,
    const std::vector<std::string>& names, const v1::StatusReply& status,
    absl::Duration timeout) {
  if (!arguments.add) {
    return NotOutYet(status, names);
  }
  std::vector<std::string> missing = NotInYet(status, names);
  if (missing.empty() && arguments.role == v1::ROLE_SERVER) {
    // It serves nothing before chunks have moved to it.
    BALLAST_ASSIGN_OR_RETURN(const v1::Placement placement,
                             client->GetPlacement(timeout));
    missing = WithoutChunks(placement, names);
  }
  return missing;
}

// Until what was asked for is so. A coordinator that is away may come back, so
// only a long silence, or an address that was taken away, means the run's end.
int AwaitDone(const Arguments& arguments, ClusterClient* client,
              const std::vector<std::string>& names, absl::Duration timeout) {
  const absl::Time until = MonotonicNow() + timeout;
  absl::Time heard = MonotonicNow();
  std::string waits_for = "the coordinator does not answer";
  while (MonotonicNow() < until) {
    const absl::Duration patience =
        std::min(kCallTimeout, until - MonotonicNow());
    const absl::StatusOr<v1::StatusReply> status = client->GetStatus(patience);
    const absl::StatusOr<std::vector<std::string>> missing =
        status.ok() ? Missing(arguments, client, names, *status, patience)
                    : status.status();
    if (missing.ok()) {
      heard = MonotonicNow();
      if (missing->empty()) {
        Print(arguments, names, /*done=*/true);
        return kExitDone;
      }
      if (status->phase() == "done" || status->phase() == "failed") {
        return Fail(absl::FailedPreconditionError(
            absl::StrCat("the run is ", status->phase(), " while ",
                         absl::StrJoin(*missing, ", "))));
      }
      waits_for = absl::StrCat(
          absl::StrJoin(*missing, ", "), "; the run is ", status->phase(),
          " at step ", status->step(),
          status->waits_for().empty()
              ? ""
              : absl::StrCat(" and waits for ", status->waits_for()));
    } else if (MonotonicNow() - heard > kSilenceMax ||
               !CoordinatorAddress(arguments.target).ok()) {
      return Fail(absl::UnavailableError(
          absl::StrCat("the run has ended meanwhile; before, ", waits_for)));
    }
    absl::SleepFor(kAskEvery);
  }
  return Fail(absl::DeadlineExceededError(absl::StrCat(
                  "not done after ", absl::FormatDuration(timeout), ": ",
                  waits_for, ". It goes on; watch it with `ballast status`")),
              kExitPending);
}

int Scale(const Arguments& arguments) {
  absl::Duration timeout;
  if (!absl::ParseDuration(arguments.timeout, &timeout) ||
      timeout <= absl::ZeroDuration()) {
    return Fail(absl::InvalidArgumentError(
                    absl::StrCat("--timeout is `", arguments.timeout,
                                 "`; want a time above 0, such as 90s or 10m")),
                kExitUsage);
  }
  v1::ScaleRequest request;
  request.set_role(arguments.role);
  if (arguments.add) {
    request.set_add(arguments.count);
  } else {
    const absl::StatusOr<std::string> name =
        MemberName(arguments.role, arguments.id);
    if (!name.ok()) {
      return Fail(name.status(), kExitUsage);
    }
    request.set_drain(*name);
  }
  auto client = ConnectTo(arguments.target);
  if (!client.ok()) {
    return Fail(client.status());
  }
  const absl::StatusOr<v1::ScaleReply> reply =
      (*client)->Scale(request, kCallTimeout);
  if (!reply.ok()) {
    return Fail(reply.status());
  }
  const std::vector<std::string> names(reply->names().begin(),
                                       reply->names().end());
  if (arguments.no_wait) {
    Print(arguments, names, /*done=*/false);
    return kExitDone;
  }
  return AwaitDone(arguments, client->get(), names, timeout);
}

constexpr char kExits[] =
    "0 done (or asked for, with --no-wait)   1 refused, no answer, or the run "
    "ended   2 usage\n  3 not done within --timeout; it goes on";

CLI::App* AddPart(CLI::App* parent, const char* name,
                  const std::string& description,
                  const std::shared_ptr<Arguments>& arguments, bool add,
                  Action* action) {
  CLI::App* command = parent->add_subcommand(name, description);
  AddTargetOptions(command, &arguments->target);
  command->add_flag("--no-wait", arguments->no_wait,
                    "Return when the coordinator has noted it.");
  command
      ->add_option("--timeout", arguments->timeout,
                   "How long to wait, such as 90s. Default: 10m.")
      ->type_name("TIME");
  command->add_flag("--json", arguments->json, "Print one JSON object.");
  command->callback([action, arguments, add] {
    arguments->add = add;
    *action = [arguments] { return Scale(*arguments); };
  });
  return command;
}

void AddRole(CLI::App* app, v1::Role role, Action* action) {
  auto arguments = std::make_shared<Arguments>();  // Lives in the callbacks.
  arguments->role = role;
  const std::string word(RoleWord(role));
  const bool server = role == v1::ROLE_SERVER;
  CLI::App* group = app->add_subcommand(
      word, server ? "Add shard servers to a running cluster, or drain one."
                   : "Add workers to a running cluster, or drain one.");
  group->require_subcommand(1);
  group->footer(
      HelpFooter("", kExits, absl::StrCat("ballast ", word, " add 1")));

  CLI::App* add = AddPart(
      group, "add",
      server ? "Have more shard servers; chunks move to them while training "
               "goes on."
             : "Have more workers; each takes part from the next step after "
               "its start.",
      arguments, /*add=*/true, action);
  add->add_option("N", arguments->count, "How many. Default: 1.")
      ->check(CLI::Range(1, 65536).description(""));
  add->footer(HelpFooter(
      absl::StrCat("`ballast train` starts what is asked for. Of a cluster "
                   "without it, start\nballast-",
                   server ? "ps" : "worker",
                   " with the index of the name that is printed. Ends when "
                   "the new\n",
                   word, " takes part."),
      kExits, absl::StrCat("ballast ", word, " add 2 --run-dir runs/austen")));

  CLI::App* drain =
      AddPart(group, "drain",
              server ? "Move a shard server's chunks away and let it leave."
                     : "Let a worker finish its work and leave.",
              arguments, /*add=*/false, action);
  drain
      ->add_option("ID", arguments->id,
                   absl::StrCat("The ", word, ": ", word, "-1, or 1."))
      ->required();
  drain->footer(HelpFooter(
      server ? "Training goes on while the chunks move. The data folder "
               "stays, since checkpoints\nmay need it. Ends when the server "
               "is gone."
             : "The others take its share from the next step on. Ends when "
               "the worker is gone.",
      kExits,
      absl::StrCat("ballast ", word, " drain ", word,
                   "-1 --run-dir runs/austen")));
}

}  // namespace

void AddWorkerCommand(CLI::App* app, const Surroundings&, Action* action) {
  AddRole(app, v1::ROLE_WORKER, action);
}

void AddServerCommand(CLI::App* app, const Surroundings&, Action* action) {
  AddRole(app, v1::ROLE_SERVER, action);
}

}  // namespace ballast
