// SPDX-License-Identifier: Apache-2.0
// ballast-coordinator: forms the group, turns every step into a transaction,
// and ends the run. Exit 0 done, 1 failed, 2 usage, 78 bad configuration.
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/job_file.h"
#include "common/log.h"
#include "common/memory_setup.h"
#include "ps/coordinator/coordinator_loop.h"
#include "ps/coordinator/coordinator_service.h"
#include "ps/coordinator/startup.h"
#include "rpc/endpoint.h"

namespace ballast {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitConfig = 78;

struct Arguments {
  std::string config;
  int announce_fd = -1;
  int supervisor_fd = -1;
  std::optional<uint32_t> port;  // Else cluster.port.
  CoordinatorFlags flags;
};

int Complain(const absl::Status& status) {
  // One line for people; the code says who must act.
  std::fprintf(stderr, "ballast-coordinator: %s\n",
               std::string(status.message()).c_str());
  return absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status)
             ? kExitConfig
             : kExitFailed;
}

// SIGTERM and SIGINT are taken by main alone.
sigset_t BlockStopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

bool Announce(int fd, const std::string& address) {
  const std::string line = address + "\n";
  const bool told =
      write(fd, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  close(fd);
  return told;
}

// Whether the other end of a pipe that nobody writes to is gone.
bool IsAlone(int fd) {
  pollfd ready = {fd, POLLIN, 0};
  return fd >= 0 && poll(&ready, 1, 0) == 1 && (ready.revents & POLLHUP) != 0;
}

void Stop(const std::string& reason, bool abort, CoordinatorLoop* loop) {
  v1::StopRequest stop;
  stop.set_reason(reason);
  stop.set_abort(abort);
  loop->Stop(stop, [](const absl::StatusOr<v1::StopReply>&) {});
}

// Waits for the end; a first signal, or the end of the supervisor, stops the
// run with a checkpoint, a second signal at once.
void WaitForEnd(const sigset_t& signals, int supervisor_fd,
                CoordinatorLoop* loop) {
  int signals_taken = 0;
  bool alone = false;
  const timespec no_wait = {0, 0};
  while (!loop->WaitEnded(absl::Milliseconds(100))) {
    if (!alone && IsAlone(supervisor_fd)) {
      alone = true;
      Stop("its supervisor is gone", /*abort=*/false, loop);
    }
    const int taken = sigtimedwait(&signals, nullptr, &no_wait);
    if (taken > 0) {
      Stop(absl::StrCat("signal ", taken), ++signals_taken > 1, loop);
    }
  }
}

int RunCoordinator(const Arguments& arguments) {
  const sigset_t signals = BlockStopSignals();
  absl::StatusOr<JobFile> file = LoadJobFile(arguments.config, {});
  if (!file.ok()) {
    Complain(file.status());
    return kExitConfig;
  }
  const Job& job = file->job;
  absl::StatusOr<OpenedRun> run =
      OpenRun(*file, arguments.flags, MonotonicNow());
  if (!run.ok()) {
    return Complain(run.status());
  }
  CoordinatorLoop loop(job, std::move(run->core), run->store.get(),
                       run->folder.get(), MonotonicNow);
  CoordinatorService service(&loop);
  absl::StatusOr<std::unique_ptr<Endpoint>> endpoint = Endpoint::Start(
      job.cluster.host, arguments.port.value_or(job.cluster.port), {&service});
  if (!endpoint.ok()) {
    return Complain(endpoint.status());
  }
  loop.Start();
  const std::string& address = (*endpoint)->address();
  LogEvent(Severity::kInfo, "listening", {{"address", address}});
  const absl::Status written = run->folder->WriteAddress(address);
  if (!written.ok()) {
    return Complain(written);
  }
  if (arguments.announce_fd >= 0 && !Announce(arguments.announce_fd, address)) {
    return Complain(absl::UnavailableError(
        absl::StrCat("cannot write the address to descriptor ",
                     arguments.announce_fd, " (--announce-fd)")));
  }
  WaitForEnd(signals, arguments.supervisor_fd, &loop);
  run->folder->RemoveAddress();
  (*endpoint)->Stop(absl::Seconds(1));
  const absl::Status outcome = loop.outcome();
  if (!outcome.ok()) {
    Complain(outcome);
    return kExitFailed;
  }
  return 0;
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  ballast::KeepHeapMemory();
  ballast::SetLogRole("coordinator");
  CLI::App app(
      "ballast-coordinator - forms the group and turns every step into a "
      "transaction\n\nUsually started by `ballast train`. SIGTERM finishes the "
      "step in flight, writes\na checkpoint and ends the run; a second one "
      "ends it at once.");
  app.footer(
      "Exit codes:\n  0  done    1  failed    2  usage    78  bad "
      "configuration\n\nExample:\n  ballast-coordinator --config "
      "runs/austen/config.yaml --resume");
  ballast::Arguments arguments;
  app.add_option("--config", arguments.config, "The effective job file")
      ->required();
  app.add_flag("--resume", arguments.flags.resume,
               "Continue the run in run.dir from its newest checkpoint");
  app.add_option("--stop-after", arguments.flags.stop_after,
                 "Last step to run; the schedule's horizon stays run.steps");
  app.add_flag("--keep", arguments.flags.keep_up,
               "Stay up after the last step until SIGTERM or `ballast stop`");
  app.add_option("--port", arguments.port,
                 "Port to listen on. Default: cluster.port")
      ->check(CLI::Range(0, 65535));
  app.add_option("--supervisor-fd", arguments.supervisor_fd,
                 "Read end of a pipe that the supervisor holds: when it is "
                 "gone, the run\nstops with a checkpoint");
  app.add_option("--announce-fd", arguments.announce_fd,
                 "Descriptor to write host:port to, once listening");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : ballast::kExitUsage;
  }
  return ballast::RunCoordinator(arguments);
}
