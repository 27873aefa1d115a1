// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/training.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/status_macros.h"
#include "ps/cli/child_process.h"
#include "ps/cli/cluster_client.h"
#include "ps/cli/progress.h"
#include "storage/checkpoint.h"

namespace ballast {
namespace {

constexpr absl::Duration kTickEvery = absl::Milliseconds(500);
// A call to a coordinator on this machine; while it waits, signals do too.
constexpr absl::Duration kCallTimeout = absl::Seconds(1);
// A coordinator that neither announces itself nor ends is broken.
constexpr absl::Duration kAnnounceTimeout = absl::Seconds(30);
// From a failure to the kill of what is left: the death must be told within
// 15 s, and the others may want to say why they end.
constexpr absl::Duration kFailureGrace = absl::Seconds(6);
// The same once the coordinator has ended: nobody tells the others anything.
constexpr absl::Duration kOrphanGrace = absl::Seconds(2);
// From the coordinator's good end to the kill of what is left.
constexpr absl::Duration kEndGrace = absl::Seconds(10);

class Training {
 public:
  Training(const JobFile& file, const RunFolder& folder,
           const TrainingOptions& options, const Surroundings& surroundings)
      : job_(file.job),
        folder_(folder),
        options_(options),
        surroundings_(surroundings),
        printer_(file.job, surroundings.terminal, stdout) {}
  ~Training();
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  int Run();

 private:
  enum class Stage {
    kRunning,
    kStopping,  // Asked to stop; the cluster drains.
    kFailing,   // A child failed; the others get a moment to end.
    kEnding,    // The coordinator has ended well; the others follow.
    kKilled,    // SIGKILL to all.
  };

  absl::Status TakeSignals();
  absl::Status StartCoordinator();
  absl::Status AwaitAddress();
  absl::Status StartMembers();
  absl::Status StartChild(std::string name, std::vector<std::string> argv,
                          int keep_fd);
  void Watch();
  void Tick();
  // Waits for a signal or a child's end, at most until `until`; handles it.
  // Also returns when `fd` (-1: none) has something to read.
  void Wait(absl::Time until, int fd);
  void OnInterrupt();
  void OnChildEnd(const ChildProcess& child);
  bool EndedWell(const ChildProcess& child) const;
  void BeginFailure(const std::string& what);
  void SignalAll(int signal);
  void KillAll();
  bool AnyAlive() const;
  int Report();
  // The failed child whose log says most about why; null: none failed.
  const ChildProcess* Culprit() const;
  void ReportFailure();
  std::string ResumeHint() const;

  const Job& job_;
  const RunFolder& folder_;
  const TrainingOptions& options_;
  const Surroundings& surroundings_;
  ProgressPrinter printer_;

  int signal_fd_ = -1;
  int announce_fd_ = -1;
  std::string address_;
  std::unique_ptr<ClusterClient> client_;
  std::vector<std::unique_ptr<ChildProcess>> children_;  // Still alive.
  std::vector<std::unique_ptr<ChildProcess>> failed_;    // In order of death.

  Stage stage_ = Stage::kRunning;
  absl::Time deadline_ = absl::InfiniteFuture();  // Then all are killed.
  bool coordinator_done_ = false;
  bool interrupted_ = false;
  bool terminated_ = false;  // SIGTERM was sent to all.
  bool summary_shown_ = false;
  std::string failure_;  // What went wrong, for the last line.
  v1::StatusReply status_;
};

Training::~Training() {
  children_.clear();
  for (const int fd : {signal_fd_, announce_fd_}) {
    if (fd >= 0) {
      close(fd);
    }
  }
}

absl::Status Training::TakeSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) {
    sigaddset(&set, signal);
  }
  // Before the first thread, so that gRPC's threads have them blocked too.
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);  // A closed pager must not end the run.
  signal_fd_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signal_fd_ < 0) {
    return absl::InternalError(
        absl::StrCat("signalfd: ", std::generic_category().message(errno)));
  }
  return absl::OkStatus();
}

absl::Status Training::StartChild(std::string name,
                                  std::vector<std::string> argv, int keep_fd) {
  ChildProcess::Options child;
  child.log_path = folder_.log_path(name);
  child.name = std::move(name);
  argv[0] = absl::StrCat(surroundings_.binary_dir, "/", argv[0]);
  child.argv = std::move(argv);
  child.keep_fd = keep_fd;
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<ChildProcess> started,
                           ChildProcess::Start(child));
  children_.push_back(std::move(started));
  return absl::OkStatus();
}

absl::Status Training::StartCoordinator() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return absl::InternalError(
        absl::StrCat("pipe: ", std::generic_category().message(errno)));
  }
  announce_fd_ = ends[0];
  std::vector<std::string> argv = {"ballast-coordinator", "--config",
                                   folder_.config_path(), "--announce-fd",
                                   absl::StrCat(ends[1])};
  if (options_.resume) {
    argv.push_back("--resume");
  }
  if (options_.keep) {
    argv.push_back("--keep");
  }
  if (options_.stop_after > 0) {
    argv.push_back("--stop-after");
    argv.push_back(absl::StrCat(options_.stop_after));
  }
  absl::Status started = StartChild("coordinator", std::move(argv), ends[1]);
  close(ends[1]);
  return started;
}

absl::Status Training::AwaitAddress() {
  const absl::Time until = MonotonicNow() + kAnnounceTimeout;
  std::string text;
  while (stage_ == Stage::kRunning) {
    if (MonotonicNow() >= until) {
      return absl::DeadlineExceededError(
          absl::StrCat("the coordinator has not said its address for ",
                       absl::FormatDuration(kAnnounceTimeout), "; see ",
                       folder_.log_path("coordinator")));
    }
    Wait(until, announce_fd_);
    char buffer[256];
    pollfd ready = {announce_fd_, POLLIN, 0};
    if (poll(&ready, 1, 0) != 1) {
      continue;
    }
    const ssize_t got = read(announce_fd_, buffer, sizeof(buffer));
    if (got > 0) {
      text.append(buffer, static_cast<size_t>(got));
    }
    if (got <= 0 || text.find('\n') != std::string::npos) {
      break;
    }
  }
  address_ =
      std::string(absl::StripAsciiWhitespace(text.substr(0, text.find('\n'))));
  if (address_.empty()) {  // It is ending; Watch says why.
    deadline_ = std::min(deadline_, MonotonicNow() + kFailureGrace);
  }
  return absl::OkStatus();
}

absl::Status Training::StartMembers() {
  for (uint32_t i = 0; i < job_.server.count; ++i) {
    BALLAST_RETURN_IF_ERROR(StartChild(
        absl::StrCat("server-", i),
        {"ballast-ps", "--config", folder_.config_path(), "--coordinator",
         address_, "--index", absl::StrCat(i), "--data-dir",
         absl::StrCat(job_.server.data_dir, "/server-", i), "--listen",
         absl::StrCat(job_.cluster.host, ":0")},
        -1));
  }
  for (uint32_t i = 0; i < job_.worker.count; ++i) {
    BALLAST_RETURN_IF_ERROR(
        StartChild(absl::StrCat("worker-", i),
                   {"ballast-worker", "--config", folder_.config_path(),
                    "--coordinator", address_, "--index", absl::StrCat(i)},
                   -1));
  }
  return absl::OkStatus();
}

bool Training::AnyAlive() const { return !children_.empty(); }

void Training::SignalAll(int signal) {
  terminated_ |= signal == SIGTERM;
  for (const auto& child : children_) {
    child->Signal(signal);
  }
}

void Training::KillAll() {
  stage_ = Stage::kKilled;
  deadline_ = absl::InfiniteFuture();
  SignalAll(SIGKILL);
}

void Training::Wait(absl::Time until, int fd) {
  pollfd ready[2] = {{signal_fd_, POLLIN, 0}, {fd, POLLIN, 0}};
  const absl::Duration left =
      std::clamp(std::min(until, deadline_) - MonotonicNow(),
                 absl::ZeroDuration(), absl::Minutes(1));
  poll(ready, 2, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
  signalfd_siginfo info = {};
  while (read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo != SIGCHLD) {
      OnInterrupt();
    }
  }
  // Ended children leave the list before anything is decided on what is left.
  std::vector<std::unique_ptr<ChildProcess>> ended;
  for (auto& child : children_) {
    if (child->Ended()) {
      ended.push_back(std::move(child));
    }
  }
  std::erase(children_, nullptr);
  for (auto& child : ended) {
    const bool by_itself = stage_ != Stage::kKilled;
    OnChildEnd(*child);
    if (by_itself && !EndedWell(*child)) {
      failed_.push_back(std::move(child));
    }
  }
  if (MonotonicNow() >= deadline_) {
    if (stage_ == Stage::kEnding && interrupted_ && !terminated_) {
      // Members that were about to join have nobody to tell them.
      SignalAll(SIGTERM);
      deadline_ = MonotonicNow() + kEndGrace;
      return;
    }
    if (failure_.empty() && AnyAlive()) {
      failure_ = absl::StrCat(children_.front()->name(),
                              " did not end in time and was killed");
    }
    KillAll();
  }
}

void Training::OnInterrupt() {
  if (interrupted_) {
    printer_.Say("ending at once\n");
    if (failure_.empty()) {
      failure_ = "ended at once, without finishing the step in flight";
    }
    KillAll();
    return;
  }
  interrupted_ = true;
  if (stage_ != Stage::kRunning) {
    return;
  }
  stage_ = Stage::kStopping;
  deadline_ = MonotonicNow() + job_.cluster.progress_timeout;
  printer_.Say(
      "stopping after the step in flight, with a checkpoint; once more ends "
      "it at once\n");
  const bool told =
      client_ != nullptr &&
      client_->Stop("interrupted", /*abort=*/false, kCallTimeout).ok();
  if (!told) {
    SignalAll(SIGTERM);
  }
}

bool Training::EndedWell(const ChildProcess& child) const {
  // A role may not yet have been ready to take the SIGTERM of a stop.
  return child.exit_code() == 0 ||
         (interrupted_ && terminated_ && child.signal() == SIGTERM);
}

void Training::OnChildEnd(const ChildProcess& child) {
  if (child.name() == "coordinator" && EndedWell(child)) {
    coordinator_done_ = true;
    if (stage_ == Stage::kRunning || stage_ == Stage::kStopping) {
      stage_ = Stage::kEnding;
      deadline_ = MonotonicNow() + (interrupted_ ? kOrphanGrace : kEndGrace);
    }
    return;
  }
  if (!EndedWell(child) && stage_ != Stage::kKilled) {
    BeginFailure(absl::StrCat(child.name(), " (pid ", child.pid(), ") ",
                              child.Ending()));
  }
  if (child.name() == "coordinator" && stage_ == Stage::kFailing) {
    SignalAll(SIGTERM);
    deadline_ = std::min(deadline_, MonotonicNow() + kOrphanGrace);
  }
}

void Training::BeginFailure(const std::string& what) {
  if (stage_ == Stage::kFailing) {
    return;
  }
  stage_ = Stage::kFailing;
  deadline_ = MonotonicNow() + kFailureGrace;
  failure_ = status_.step() > 0
                 ? absl::StrCat(what, " after step ", status_.step())
                 : what;
  if (client_ == nullptr ||
      !client_->Stop(what, /*abort=*/true, kCallTimeout).ok()) {
    SignalAll(SIGTERM);
  }
}

void Training::Tick() {
  if (client_ == nullptr || coordinator_done_) {
    return;
  }
  // Silence is not judged here: a coordinator that is gone is a child that
  // ended, one that is stuck is interrupted by the user or by its members.
  absl::StatusOr<v1::StatusReply> reply = client_->GetStatus(kCallTimeout);
  if (!reply.ok()) {
    return;
  }
  status_ = *std::move(reply);
  printer_.Show(status_, MonotonicNow());
  if (!status_.failure().empty() && stage_ == Stage::kRunning) {
    stage_ = Stage::kFailing;
    failure_ = status_.failure();
    deadline_ = MonotonicNow() + kFailureGrace;
  }
  if (options_.keep && status_.phase() == "done" && !summary_shown_) {
    summary_shown_ = true;
    printer_.Say(absl::StrCat(
        "\n", SummaryText(folder_.path()), "\nheld up at ", address_,
        " for queries; Ctrl-C or `ballast stop --coordinator ", address_,
        "` ends it\n"));
  }
}

void Training::Watch() {
  absl::Time next_tick = MonotonicNow();
  while (AnyAlive()) {
    Wait(next_tick, -1);
    if (MonotonicNow() >= next_tick) {
      Tick();
      next_tick = MonotonicNow() + kTickEvery;
    }
  }
}

std::string Training::ResumeHint() const {
  const std::vector<uint64_t> steps = ListManifests(folder_.checkpoints_path());
  if (steps.empty()) {
    return absl::StrCat(
        "nothing was saved yet; start over with: ballast train ",
        options_.job_path, HoldsRun(job_) ? " --resume" : "");
  }
  return absl::StrCat("checkpoint of step ", steps.back(),
                      "; resume with: ballast train ", options_.job_path,
                      " --resume");
}

const ChildProcess* Training::Culprit() const {
  // A coordinator that ends by itself does so because a member failed, so it
  // speaks last.
  std::vector<const ChildProcess*> order;
  for (const auto& child : failed_) {
    order.push_back(child.get());
  }
  if (!order.empty() && order[0]->name() == "coordinator" &&
      order[0]->exit_code() >= 0) {
    std::rotate(order.begin(), order.begin() + 1, order.end());
  }
  for (const ChildProcess* child : order) {
    if (!LastComplaint(child->log_path()).empty()) {
      return child;
    }
  }
  return order.empty() ? nullptr : order[0];
}

void Training::ReportFailure() {
  const ChildProcess* culprit = Culprit();
  std::string why;
  if (culprit != nullptr) {
    why = LastComplaint(culprit->log_path());
    if (why.empty()) {
      const std::string text =
          absl::StrCat("last lines of ", culprit->log_path(), ":\n",
                       LastLines(culprit->log_path(), 8));
      std::fputs(text.c_str(), stderr);
    }
  }
  // What the coordinator told is often what the culprit wrote.
  Fail(absl::UnavailableError(absl::StrContains(failure_, why)
                                  ? failure_
                                  : absl::StrCat(failure_, ": ", why)));
  if (culprit != nullptr) {
    Fail(absl::UnavailableError(
        absl::StrCat("its log is ", culprit->log_path())));
  }
  Fail(absl::UnavailableError(ResumeHint()));
}

int Training::Report() {
  std::error_code error;  // The coordinator removes it when it ends well.
  std::filesystem::remove(AddressFile(folder_.path()), error);
  if (!failure_.empty()) {
    ReportFailure();
    const bool configuration = std::any_of(
        failed_.begin(), failed_.end(),
        [](const auto& child) { return child->exit_code() == kExitBadConfig; });
    return configuration ? kExitBadConfig : kExitFailed;
  }
  if (summary_shown_) {
    return kExitDone;
  }
  const uint64_t target = options_.stop_after > 0
                              ? std::min(options_.stop_after, job_.run.steps)
                              : job_.run.steps;
  const std::vector<uint64_t> saved = ListManifests(folder_.checkpoints_path());
  const bool finished = !saved.empty() && saved.back() >= target;
  if (finished) {
    printer_.Say(absl::StrCat("\n", SummaryText(folder_.path())));
  }
  if (!finished || target < job_.run.steps) {
    printer_.Say(absl::StrCat("stopped: ", ResumeHint(), "\n"));
  }
  return kExitDone;
}

int Training::Run() {
  absl::Status started = TakeSignals();
  if (started.ok()) {
    started = StartCoordinator();
  }
  if (started.ok()) {
    started = AwaitAddress();
  }
  if (started.ok() && !address_.empty() && stage_ == Stage::kRunning) {
    started = StartMembers();
    client_ = std::make_unique<ClusterClient>(address_);
  }
  if (!started.ok()) {
    BeginFailure(std::string(started.message()));
  }
  Watch();
  return Report();
}

}  // namespace

int RunTraining(const JobFile& file, const RunFolder& folder,
                const TrainingOptions& options,
                const Surroundings& surroundings) {
  return Training(file, folder, options, surroundings).Run();
}

}  // namespace ballast
