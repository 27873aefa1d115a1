// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/child_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

// In the child, between fork and exec: system calls only. `launcher` is the
// parent's id, `log` an open file.
[[noreturn]] void Become(char* const* argv, int log,
                         const ChildProcess::Options& options, pid_t launcher) {
  setsid();
  if (options.keeper != nullptr) {
    const Birth birth = {getpid(), options.coordinator ? 1 : 0};
    if (write(options.keeper->birth_fd(), &birth, sizeof(birth)) !=
        static_cast<ssize_t>(sizeof(birth))) {
      _exit(1);  // The keeper was killed.
    }
  } else {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
  }
  // It may have died before the lines above.
  if (getppid() != launcher) {
    _exit(1);
  }
  // A blocked or ignored signal stays so across exec.
  ::signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  dup2(null, STDIN_FILENO);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  // Whatever the launcher's own parent left open is not for the roles.
  close_range(STDERR_FILENO + 1, ~0u, CLOSE_RANGE_CLOEXEC);
  for (const int fd : options.keep_fds) {
    fcntl(fd, F_SETFD, 0);
  }
  execv(argv[0], argv);
  _exit(127);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(
    const Options& options) {
  const std::string& binary = options.argv[0];
  if (access(binary.c_str(), X_OK) != 0) {
    return absl::NotFoundError(absl::StrCat(
        "cannot run ", binary, ": ", std::generic_category().message(errno),
        "; the binaries of all roles stand side by side"));
  }
  const int log = open(options.log_path.c_str(),
                       O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (log < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot write ", options.log_path, ": ",
                     std::generic_category().message(errno)));
  }
  std::vector<char*> argv;
  for (const std::string& argument : options.argv) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    Become(argv.data(), log, options, launcher);
  }
  const int error = errno;
  close(log);
  if (pid < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot start ", options.name, ": ",
                     std::generic_category().message(error)));
  }
  return std::unique_ptr<ChildProcess>(new ChildProcess(options, pid));
}

ChildProcess::~ChildProcess() {
  if (!Ended()) {
    Signal(SIGKILL);
    while (waitpid(pid_, &wait_status_, 0) < 0 && errno == EINTR) {
    }
  }
}

bool ChildProcess::Ended() {
  if (!ended_ && waitpid(pid_, &wait_status_, WNOHANG) == pid_) {
    ended_ = true;
  }
  return ended_;
}

void ChildProcess::Signal(int number) {
  if (!ended_) {
    kill(pid_, number);
  }
}

int ChildProcess::exit_code() const {
  return WIFEXITED(wait_status_) ? WEXITSTATUS(wait_status_) : -1;
}

int ChildProcess::signal() const {
  return WIFSIGNALED(wait_status_) ? WTERMSIG(wait_status_) : 0;
}

std::string ChildProcess::Ending() const {
  if (signal() != 0) {
    const char* text = sigdescr_np(signal());
    return absl::StrCat("was killed by signal ", signal(), " (",
                        text == nullptr ? "unknown" : text, ")");
  }
  return absl::StrCat("exited with code ", exit_code());
}

}  // namespace ballast
