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
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/clock.h"
#include "common/status_macros.h"
#include "ps/cli/child_process.h"
#include "ps/cli/cluster_client.h"
#include "ps/cli/keeper.h"
#include "ps/cli/progress.h"
#include "ps/cli/supervisor.h"
#include "storage/checkpoint.h"

namespace ballast {
namespace {

constexpr absl::Duration kTickEvery = absl::Milliseconds(500);
// A call to a coordinator on this machine; while it waits, signals do too.
constexpr absl::Duration kCallTimeout = absl::Seconds(1);

SupervisorOptions ToSupervisorOptions(const Job& job,
                                      const TrainingOptions& options) {
  SupervisorOptions out;
  out.servers = job.server.count;
  out.workers = job.worker.count;
  out.restarts_max = job.cluster.restarts_max;
  out.stop_timeout = job.cluster.progress_timeout;
  out.resume = options.resume;
  out.keep = options.keep;
  return out;
}

class Training {
 public:
  Training(const JobFile& file, const LockedRunFolder& folder,
           const TrainingOptions& options, const Surroundings& surroundings)
      : job_(file.job),
        folder_(folder),
        options_(options),
        surroundings_(surroundings),
        printer_(file.job, surroundings.terminal, stdout),
        supervisor_(ToSupervisorOptions(file.job, options)) {}
  ~Training();
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  int Run();

 private:
  // A member that the rehearsal has stopped.
  struct Stopped {
    std::string name;
    pid_t pid = 0;
    absl::Time until;
  };

  absl::Status TakeSignals();
  absl::Status GuardAgainstOwnDeath();
  // Carries out what the supervisor wants, until it wants nothing.
  void Perform();
  void PerformOne(const SupervisorAction& action);
  absl::Status Start(const SupervisorAction& action);
  absl::StatusOr<std::vector<std::string>> CoordinatorArguments(
      bool again, ChildProcess::Options* child);
  std::vector<std::string> MemberArguments(const std::string& name) const;
  ChildProcess* Find(const std::string& name);
  void TellExits();
  void Tick();
  // Waits for a signal, a child's end or the coordinator's word, at most until
  // `until`; handles it.
  void Wait(absl::Time until);
  void TakeEnded();
  void ReadAnnouncement();
  void MakeChaos();
  void Strike(const ChaosRule& rule);
  void WakeStopped(absl::Time now);
  int Report();
  // The dead whose log says most about why; empty: nobody died.
  std::string Culprit() const;
  void ReportFailure();
  std::string ResumeHint() const;

  const Job& job_;
  const LockedRunFolder& folder_;
  const TrainingOptions& options_;
  const Surroundings& surroundings_;
  ProgressPrinter printer_;
  Supervisor supervisor_;

  int signal_fd_ = -1;
  int announce_fd_ = -1;
  std::string announced_;  // So far.
  // The coordinator reads one end, which ends when this process does.
  int lifeline_[2] = {-1, -1};
  std::unique_ptr<Keeper> keeper_;
  std::string address_;
  std::unique_ptr<ClusterClient> client_;
  std::vector<std::unique_ptr<ChildProcess>> children_;  // Still alive.
  v1::StatusReply status_;
  bool summary_shown_ = false;

  std::optional<ChaosSchedule> chaos_;  // From the first step on.
  std::set<pid_t> struck_;
  std::vector<Stopped> stopped_;
};

Training::~Training() {
  children_.clear();
  for (const int fd : {signal_fd_, announce_fd_, lifeline_[0], lifeline_[1]}) {
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

absl::Status Training::GuardAgainstOwnDeath() {
  Keeper::Options keeper;
  keeper.stop_timeout = job_.cluster.progress_timeout;
  keeper.lock_fd = folder_.lock_fd();
  BALLAST_ASSIGN_OR_RETURN(keeper_, Keeper::Start(keeper));
  if (pipe2(lifeline_, O_CLOEXEC) != 0) {
    return absl::InternalError(
        absl::StrCat("pipe: ", std::generic_category().message(errno)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> Training::CoordinatorArguments(
    bool again, ChildProcess::Options* child) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return absl::InternalError(
        absl::StrCat("pipe: ", std::generic_category().message(errno)));
  }
  if (announce_fd_ >= 0) {
    close(announce_fd_);
  }
  announce_fd_ = ends[0];
  announced_.clear();
  child->keep_fds = {ends[1], lifeline_[0]};
  std::vector<std::string> argv = {"ballast-coordinator",     "--config",
                                   folder_.config_path(),     "--announce-fd",
                                   absl::StrCat(ends[1]),     "--supervisor-fd",
                                   absl::StrCat(lifeline_[0])};
  if (again) {
    argv.push_back("--continue");
  } else if (options_.resume) {
    argv.push_back("--resume");
  }
  if (!address_.empty()) {  // Members look for it where it was.
    argv.push_back("--port");
    argv.push_back(address_.substr(address_.rfind(':') + 1));
  }
  if (options_.keep) {
    argv.push_back("--keep");
  }
  if (options_.stop_after > 0) {
    argv.push_back("--stop-after");
    argv.push_back(absl::StrCat(options_.stop_after));
  }
  return argv;
}

std::vector<std::string> Training::MemberArguments(
    const std::string& name) const {
  const std::string index = name.substr(name.rfind('-') + 1);
  std::vector<std::string> argv = {
      absl::StartsWith(name, "server-") ? "ballast-ps" : "ballast-worker",
      "--config",
      folder_.config_path(),
      "--coordinator",
      address_,
      "--index",
      index};
  if (absl::StartsWith(name, "server-")) {
    for (const std::string& one :
         {std::string("--data-dir"),
          absl::StrCat(job_.server.data_dir, "/", name),
          std::string("--listen"), absl::StrCat(job_.cluster.host, ":0")}) {
      argv.push_back(one);
    }
  }
  return argv;
}

absl::Status Training::Start(const SupervisorAction& action) {
  ChildProcess::Options child;
  child.name = action.name;
  child.log_path = folder_.log_path(action.name);
  child.keeper = keeper_.get();
  child.coordinator = action.name == kCoordinatorName;
  if (child.coordinator) {
    BALLAST_ASSIGN_OR_RETURN(child.argv,
                             CoordinatorArguments(action.again, &child));
  } else {
    child.argv = MemberArguments(action.name);
  }
  child.argv[0] = absl::StrCat(surroundings_.binary_dir, "/", child.argv[0]);
  absl::StatusOr<std::unique_ptr<ChildProcess>> started =
      ChildProcess::Start(child);
  if (child.coordinator) {
    close(child.keep_fds[0]);
  }
  BALLAST_RETURN_IF_ERROR(started.status());
  supervisor_.Started(action.name, (*started)->pid(), MonotonicNow());
  children_.push_back(*std::move(started));
  return absl::OkStatus();
}

ChildProcess* Training::Find(const std::string& name) {
  for (const auto& child : children_) {
    if (child->name() == name) {
      return child.get();
    }
  }
  return nullptr;
}

void Training::PerformOne(const SupervisorAction& action) {
  switch (action.kind) {
    case SupervisorAction::Kind::kStart: {
      const absl::Status started = Start(action);
      if (!started.ok()) {
        supervisor_.StartFailed(action.name, std::string(started.message()),
                                MonotonicNow());
      }
      break;
    }
    case SupervisorAction::Kind::kSignal: {
      ChildProcess* child = Find(action.name);
      if (child != nullptr) {
        child->Signal(action.signal);
      }
      break;
    }
    case SupervisorAction::Kind::kStopRun:
      if (client_ == nullptr ||
          !client_->Stop(action.text, action.abort, kCallTimeout).ok()) {
        supervisor_.StopRefused(MonotonicNow());
      }
      break;
    case SupervisorAction::Kind::kSay:
      printer_.Say(action.text);
      break;
  }
}

void Training::Perform() {
  // The survivors take over sooner than another process is up.
  TellExits();
  for (auto actions = supervisor_.TakeActions(); !actions.empty();
       actions = supervisor_.TakeActions()) {
    for (const SupervisorAction& action : actions) {
      PerformOne(action);
    }
  }
}

void Training::TellExits() {
  while (supervisor_.listening() && !supervisor_.unreported().empty()) {
    const ExitNotice& notice = supervisor_.unreported().front();
    v1::ExitReport report;
    report.set_name(notice.name);
    report.set_pid(notice.end.pid);
    report.set_exit_code(notice.end.exit_code);
    report.set_signal(notice.end.signal);
    report.set_seconds_ago(absl::ToDoubleSeconds(MonotonicNow() - notice.at));
    if (absl::IsUnavailable(client_->ReportExit(report, kCallTimeout))) {
      return;  // Told again at the next tick.
    }
    supervisor_.Reported();
  }
}

void Training::TakeEnded() {
  // Ended children leave the list before anything is decided on what is left.
  std::vector<std::unique_ptr<ChildProcess>> ended;
  for (auto& child : children_) {
    if (child->Ended()) {
      ended.push_back(std::move(child));
    }
  }
  std::erase(children_, nullptr);
  for (const auto& child : ended) {
    ProcessEnd end;
    end.pid = child->pid();
    end.exit_code = child->exit_code();
    end.signal = child->signal();
    end.text = absl::StrCat(
        child->Ending(), struck_.erase(child->pid()) > 0 ? " by --chaos" : "");
    supervisor_.Ended(child->name(), end, MonotonicNow());
    Perform();
  }
}

void Training::ReadAnnouncement() {
  pollfd ready = {announce_fd_, POLLIN, 0};
  if (announce_fd_ < 0 || poll(&ready, 1, 0) != 1) {
    return;
  }
  char buffer[256];
  const ssize_t got = read(announce_fd_, buffer, sizeof(buffer));
  if (got > 0) {
    announced_.append(buffer, static_cast<size_t>(got));
  }
  const size_t end = announced_.find('\n');
  if (got > 0 && end == std::string::npos) {
    return;
  }
  close(announce_fd_);
  announce_fd_ = -1;
  const std::string address(
      absl::StripAsciiWhitespace(announced_.substr(0, end)));
  if (end == std::string::npos || address.empty()) {
    return;  // It is ending; that says why.
  }
  address_ = address;
  client_ = std::make_unique<ClusterClient>(address_);
  supervisor_.Listening(MonotonicNow());
}

void Training::Wait(absl::Time until) {
  pollfd ready[2] = {{signal_fd_, POLLIN, 0}, {announce_fd_, POLLIN, 0}};
  const absl::Duration left = std::clamp(
      until - MonotonicNow(), absl::ZeroDuration(), absl::Minutes(1));
  poll(ready, 2, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
  signalfd_siginfo info = {};
  while (read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo != SIGCHLD) {
      supervisor_.Interrupted(MonotonicNow());
      Perform();
    }
  }
  TakeEnded();
  ReadAnnouncement();
  supervisor_.TimePassed(MonotonicNow());
  Perform();
}

void Training::Tick() {
  if (!supervisor_.listening()) {
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
  supervisor_.StatusSeen(status_, MonotonicNow());
  Perform();
  if (!chaos_.has_value() && status_.phase() == "training") {
    chaos_.emplace(options_.chaos, MonotonicNow());
  }
  if (options_.keep && status_.phase() == "done" && !summary_shown_) {
    summary_shown_ = true;
    printer_.Say(absl::StrCat(
        "\n", SummaryText(folder_.path()), "\nheld up at ", address_,
        " for queries; Ctrl-C or `ballast stop --coordinator ", address_,
        "` ends it\n"));
  }
}

void Training::Strike(const ChaosRule& rule) {
  std::vector<std::string> names;
  for (const auto& child : children_) {
    if (child->name() == rule.role ||
        absl::StartsWith(child->name(), absl::StrCat(rule.role, "-"))) {
      names.push_back(child->name());
    }
  }
  if (names.empty()) {
    return;  // It is being started; the next period finds it.
  }
  std::sort(names.begin(), names.end());
  ChildProcess* child = Find(chaos_->Choose(rule, names));
  if (rule.kind == ChaosKind::kKill) {
    struck_.insert(child->pid());
    child->Signal(SIGKILL);  // Its end prints the line.
    return;
  }
  const absl::Duration pause = 2 * job_.cluster.lease;
  stopped_.push_back({child->name(), child->pid(), MonotonicNow() + pause});
  child->Signal(SIGSTOP);
  printer_.Say(absl::StrCat(
      child->name(), " (pid ", child->pid(), ") is stopped by --chaos for ",
      absl::FormatDuration(pause), " after step ", status_.step(), "\n"));
}

void Training::WakeStopped(absl::Time now) {
  std::erase_if(stopped_, [this, now](const Stopped& one) {
    if (now < one.until) {
      return false;
    }
    ChildProcess* child = Find(one.name);
    if (child != nullptr && child->pid() == one.pid) {
      child->Signal(SIGCONT);
    }
    return true;
  });
}

void Training::MakeChaos() {
  const absl::Time now = MonotonicNow();
  const bool over = supervisor_.stage() != Supervisor::Stage::kRunning ||
                    status_.phase() == "finishing" || status_.phase() == "done";
  // Whatever ends must be able to.
  WakeStopped(over ? absl::InfiniteFuture() : now);
  if (!chaos_.has_value()) {
    return;
  }
  for (const ChaosRule& rule : chaos_->Take(now)) {
    if (!over) {
      Strike(rule);
    }
  }
}

std::string Training::ResumeHint() const {
  const std::string again = absl::StrCat("ballast train ", options_.job_path);
  const bool durable = job_.server.durability != Durability::kCheckpoint;
  const std::vector<uint64_t> steps = ListManifests(folder_.checkpoints_path());
  const uint64_t saved = steps.empty() ? 0 : steps.back();
  if (durable && status_.step() > saved) {
    return absl::StrCat("step ", status_.step(),
                        " and all before it are kept; resume with: ", again,
                        " --resume");
  }
  if (!steps.empty()) {
    return absl::StrCat("checkpoint of step ", saved, "; resume with: ", again,
                        " --resume");
  }
  if (!HoldsRun(job_)) {
    return absl::StrCat("nothing was saved yet; start over with: ", again);
  }
  return absl::StrCat(
      durable ? "no step is known to be committed" : "nothing was saved yet",
      "; go on with: ", again, " --resume");
}

std::string Training::Culprit() const {
  const std::vector<std::string> dead = supervisor_.dead();
  for (const std::string& name : dead) {
    if (!LastComplaint(folder_.log_path(name)).empty()) {
      return name;
    }
  }
  return dead.empty() ? "" : dead.front();
}

void Training::ReportFailure() {
  const std::string culprit = Culprit();
  const std::string& failure = supervisor_.failure();
  const std::string log = folder_.log_path(culprit);
  std::string why;
  if (!culprit.empty()) {
    why = LastComplaint(log);
    if (why.empty()) {
      const std::string text =
          absl::StrCat("last lines of ", log, ":\n", LastLines(log, 8));
      std::fputs(text.c_str(), stderr);
    }
  }
  // What the coordinator told is often what the culprit wrote.
  Fail(absl::UnavailableError(absl::StrContains(failure, why)
                                  ? failure
                                  : absl::StrCat(failure, ": ", why)));
  if (!culprit.empty()) {
    Fail(absl::UnavailableError(absl::StrCat("its log is ", log)));
  }
  Fail(absl::UnavailableError(ResumeHint()));
}

int Training::Report() {
  std::error_code error;  // The coordinator removes it when it ends well.
  std::filesystem::remove(AddressFile(folder_.path()), error);
  if (!supervisor_.failure().empty()) {
    ReportFailure();
    return supervisor_.bad_configuration() ? kExitBadConfig : kExitFailed;
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
  absl::Status ready = TakeSignals();
  if (ready.ok()) {
    ready = GuardAgainstOwnDeath();
  }
  if (!ready.ok()) {
    return Fail(ready);
  }
  supervisor_.Begin(MonotonicNow());
  Perform();
  absl::Time next_tick = MonotonicNow();
  while (!supervisor_.over()) {
    const absl::Time chaos_at =
        chaos_.has_value() ? chaos_->next_at() : absl::InfiniteFuture();
    Wait(std::min({next_tick, supervisor_.next_at(), chaos_at}));
    if (MonotonicNow() >= next_tick) {
      Tick();
      TellExits();
      next_tick = MonotonicNow() + kTickEvery;
    }
    MakeChaos();
  }
  return Report();
}

}  // namespace

int RunTraining(const JobFile& file, const LockedRunFolder& folder,
                const TrainingOptions& options,
                const Surroundings& surroundings) {
  return Training(file, folder, options, surroundings).Run();
}

}  // namespace ballast
