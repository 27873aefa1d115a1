// SPDX-License-Identifier: Apache-2.0
// ballast-coordinator: forms the group, turns every step into a transaction,
// and ends the run. Exit 0 done, 1 failed, 2 usage, 78 bad configuration.
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/crash_point.h"
#include "common/job_file.h"
#include "common/log.h"
#include "common/memory_setup.h"
#include "ps/coordinator/coordinator_loop.h"
#include "ps/coordinator/coordinator_service.h"
#include "ps/coordinator/standby.h"
#include "ps/coordinator/startup.h"
#include "rpc/endpoint.h"

namespace ballast {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitConfig = 78;
constexpr absl::Duration kListenPatience = absl::Seconds(10);
// Beyond the lease, in which members are told of an end at once.
constexpr absl::Duration kAbortPatience = absl::Seconds(5);
constexpr absl::Duration kListenRetry = absl::Milliseconds(50);

struct Arguments {
  std::string config;
  std::string state_store;  // Empty: in the run folder.
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
// run with a checkpoint, a second signal at once. False: even so it has not
// ended, since a store or a disk holds it up.
bool WaitForEnd(const sigset_t& signals, int supervisor_fd,
                absl::Duration patience, CoordinatorLoop* loop) {
  int signals_taken = 0;
  bool alone = false;
  absl::Time give_up = absl::InfiniteFuture();
  const timespec no_wait = {0, 0};
  while (!loop->WaitEnded(absl::Milliseconds(100))) {
    if (!alone && IsAlone(supervisor_fd)) {
      alone = true;
      Stop("its supervisor is gone", /*abort=*/false, loop);
    }
    const int taken = sigtimedwait(&signals, nullptr, &no_wait);
    if (taken > 0) {
      const bool abort = ++signals_taken > 1;
      Stop(absl::StrCat("signal ", taken), abort, loop);
      give_up = abort ? std::min(give_up, MonotonicNow() + patience) : give_up;
    }
    if (MonotonicNow() >= give_up) {
      return false;
    }
  }
  return true;
}

// Listens. A coordinator that was started again needs its old port, which a
// connection of somebody else may hold for a moment.
absl::StatusOr<std::unique_ptr<Endpoint>> Listen(const Arguments& arguments,
                                                 const Job& job,
                                                 CoordinatorService* service) {
  const absl::Time give_up = MonotonicNow() + kListenPatience;
  while (true) {
    absl::StatusOr<std::unique_ptr<Endpoint>> endpoint = Endpoint::Start(
        job.cluster.host, arguments.port.value_or(job.cluster.port), {service});
    if (endpoint.ok() || !arguments.flags.continue_run ||
        MonotonicNow() >= give_up) {
      return endpoint;
    }
    absl::SleepFor(kListenRetry);
  }
}

// One process: it stands by, leads, and stands by again when another took over.
class Coordinator {
 public:
  Coordinator(const Arguments& arguments, JobFile file, const sigset_t& signals)
      : arguments_(arguments), file_(std::move(file)), signals_(signals) {}

  int Run();

 private:
  // Leads once. nullopt: another leads now.
  std::optional<int> Lead(Accession accession);
  bool Tell();
  bool shared() const { return !arguments_.state_store.empty(); }

  const Arguments& arguments_;
  const JobFile file_;
  const sigset_t signals_;
  CoordinatorFlags flags_ = arguments_.flags;
  bool told_ = false;
  CoordinatorService service_;
  std::unique_ptr<SharedStateStore> store_;
  std::unique_ptr<Endpoint> endpoint_;
};

// Announces the address, once.
bool Coordinator::Tell() {
  if (std::exchange(told_, true)) {
    return true;
  }
  LogEvent(Severity::kInfo, "listening", {{"address", endpoint_->address()}});
  return arguments_.announce_fd < 0 ||
         Announce(arguments_.announce_fd, endpoint_->address());
}

std::optional<int> Coordinator::Lead(Accession accession) {
  Leadership* const leadership = accession.leadership.get();
  if (accession.stood_by) {  // There is a run, begun or resumed by another.
    flags_.resume = false;
    flags_.continue_run = true;
  }
  absl::StatusOr<OpenedRun> run =
      OpenRun(file_, flags_, leadership, MonotonicNow());
  if (absl::IsAborted(run.status()) || absl::IsUnavailable(run.status())) {
    LogEvent(Severity::kWarn, "cannot_lead",
             {{"reason", std::string(run.status().message())}});
    return std::nullopt;
  }
  if (!run.ok()) {
    return Complain(run.status());
  }
  if (run->core == nullptr) {
    std::fprintf(stderr, "ballast-coordinator: %s\n", run->ended.c_str());
    run->folder->RemoveAddress();  // A killed coordinator left it.
    return Tell() ? 0 : kExitFailed;
  }
  CoordinatorLoop loop(file_.job, std::move(run->core), leadership,
                       run->folder.get(), MonotonicNow);
  loop.Restore(run->earlier);
  loop.Start();
  service_.Serve(&loop);
  // However this returns, nobody may be let into a loop that is gone.
  const auto withdraw = [](CoordinatorService* service) {
    service->StandBy("this coordinator leads no more");
  };
  const std::unique_ptr<CoordinatorService, decltype(withdraw)> serving(
      &service_, withdraw);
  if (shared()) {
    LogEvent(Severity::kInfo, "leading",
             {{"term", leadership->record().term},
              {"address", endpoint_->address()}});
  }
  const absl::Status written = run->folder->WriteAddress(endpoint_->address());
  if (!written.ok()) {
    return Complain(written);
  }
  if (!Tell()) {
    return Complain(absl::UnavailableError(
        absl::StrCat("cannot write the address to descriptor ",
                     arguments_.announce_fd, " (--announce-fd)")));
  }
  const absl::Duration patience = file_.job.cluster.lease + kAbortPatience;
  if (!WaitForEnd(signals_, arguments_.supervisor_fd, patience, &loop)) {
    return Complain(absl::CancelledError(
        "ended at once, on request; the run can be resumed"));
  }
  const absl::Status outcome = loop.outcome();
  if (shared() && absl::IsAborted(outcome)) {
    LogEvent(Severity::kWarn, "superseded",
             {{"reason", std::string(outcome.message())}});
    flags_.resume = false;
    flags_.continue_run = true;
    return std::nullopt;
  }
  run->folder->RemoveAddress();
  endpoint_->Stop(absl::Seconds(1));
  if (!outcome.ok()) {
    Complain(outcome);
    return kExitFailed;
  }
  return 0;
}

int Coordinator::Run() {
  const Job& job = file_.job;
  absl::StatusOr<std::unique_ptr<SharedStateStore>> store =
      OpenStore(job, arguments_.state_store);
  if (!store.ok()) {
    return Complain(store.status());
  }
  store_ = *std::move(store);
  absl::StatusOr<std::unique_ptr<Endpoint>> endpoint =
      Listen(arguments_, job, &service_);
  if (!endpoint.ok()) {
    return Complain(endpoint.status());
  }
  endpoint_ = *std::move(endpoint);
  if (shared() && !Tell()) {  // A standby is there too.
    return kExitFailed;
  }
  StandbyOptions options;
  options.address = endpoint_->address();
  options.give_up_after = job.cluster.give_up_after;
  options.on_wait = [this](const std::string& why) { service_.StandBy(why); };
  options.stop = [this] {
    const timespec no_wait = {0, 0};
    return IsAlone(arguments_.supervisor_fd) ||
           sigtimedwait(&signals_, nullptr, &no_wait) > 0;
  };
  while (true) {
    absl::StatusOr<Accession> accession = WaitToLead(store_.get(), options);
    if (absl::IsCancelled(accession.status())) {
      return 0;  // Whoever leads goes on.
    }
    if (!accession.ok()) {
      return Complain(accession.status());
    }
    const std::optional<int> code = Lead(*std::move(accession));
    if (code.has_value()) {
      return *code;
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
  return Coordinator(arguments, *std::move(file), signals).Run();
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  ballast::KeepHeapMemory();
  ballast::SetLogRole("coordinator");
  const char* crash_dir = std::getenv("BALLAST_CRASH_DIR");
  if (crash_dir != nullptr) {
    ballast::ArmCrashPoints(crash_dir, "coordinator");
  }
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
  CLI::Option* resume = app.add_flag(
      "--resume", arguments.flags.resume,
      "Train on from where the run in run.dir ended, as a new branch");
  app.add_flag("--continue", arguments.flags.continue_run,
               "Go on with the run where a coordinator left it, or begin it; "
               "for supervisors.\nA run that has ended is left alone (exit 0)")
      ->excludes(resume);
  app.add_option("--state-store", arguments.state_store,
                 "etcd://host:port[,host:port]: keep the run's state there, so "
                 "that several\ncoordinators can run, of which one leads. "
                 "Default: in run.dir");
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
