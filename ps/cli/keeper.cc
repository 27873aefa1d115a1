// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/keeper.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/clock.h"

namespace ballast {
namespace {

// glibc 2.36 declares them without C linkage.
int OpenPidfd(pid_t pid) {
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

void SignalPidfd(int pidfd, int number) {
  syscall(SYS_pidfd_send_signal, pidfd, number, nullptr, 0);
}

// A child by a descriptor, which never means another process.
struct Kept {
  int pidfd = -1;
  bool coordinator = false;
};

// The keeper's own process.
class Watch {
 public:
  Watch(const Keeper::Options& options, int births)
      : options_(options), births_(births) {}

  void Run() {
    while (births_ >= 0) {
      Wait(absl::InfiniteFuture());
    }
    const absl::Time limit = MonotonicNow() + options_.stop_timeout;
    while (CoordinatorLives() && MonotonicNow() < limit) {
      Wait(limit);
    }
    for (const int number : {SIGTERM, SIGTERM, SIGKILL}) {
      WaitAll(number == SIGKILL ? options_.end_timeout : options_.grace);
      for (const Kept& one : kept_) {
        SignalPidfd(one.pidfd, number);
      }
    }
    WaitAll(options_.end_timeout);
  }

 private:
  bool CoordinatorLives() const {
    return std::any_of(kept_.begin(), kept_.end(),
                       [](const Kept& one) { return one.coordinator; });
  }

  void WaitAll(absl::Duration duration) {
    const absl::Time until = MonotonicNow() + duration;
    while (!kept_.empty() && MonotonicNow() < until) {
      Wait(until);
    }
  }

  // For a birth, a death, the launcher's end or `until`.
  void Wait(absl::Time until) {
    std::vector<pollfd> ready = {{births_, POLLIN, 0}};
    for (const Kept& one : kept_) {
      ready.push_back({one.pidfd, POLLIN, 0});
    }
    const absl::Duration left = std::clamp(
        until - MonotonicNow(), absl::ZeroDuration(), absl::Hours(1));
    poll(ready.data(), ready.size(),
         static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
    for (size_t i = kept_.size(); i > 0; --i) {
      if (ready[i].revents != 0) {
        close(kept_[i - 1].pidfd);
        kept_.erase(kept_.begin() + static_cast<ptrdiff_t>(i - 1));
      }
    }
    if (ready[0].revents != 0) {
      TakeBirth();
    }
  }

  void TakeBirth() {
    Birth birth;
    const ssize_t got = read(births_, &birth, sizeof(birth));
    if (got == static_cast<ssize_t>(sizeof(birth))) {
      const int pidfd = OpenPidfd(birth.pid);
      if (pidfd >= 0) {  // Else it has ended already.
        kept_.push_back({pidfd, birth.coordinator != 0});
      }
    } else if (got == 0) {
      close(births_);
      births_ = -1;
    }
  }

  const Keeper::Options options_;
  int births_;  // -1: the launcher has ended.
  std::vector<Kept> kept_;
};

[[noreturn]] void Keep(const Keeper::Options& options, int births) {
  setsid();  // A Ctrl-C is the launcher's.
  prctl(PR_SET_NAME, "ballast-keeper");
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
  // Held open, the launcher's other pipes would never end.
  const int low = std::min(births, std::max(options.lock_fd, 0));
  const int high = std::max(births, options.lock_fd);
  const auto close_between = [](int first, int last) {
    if (first <= last) {
      close_range(static_cast<unsigned>(first), static_cast<unsigned>(last), 0);
    }
  };
  if (options.lock_fd >= 0) {
    close_between(0, low - 1);
    close_between(low + 1, high - 1);
  } else {
    close_between(0, births - 1);
  }
  close_range(static_cast<unsigned>(high) + 1, ~0u, 0);
  Watch(options, births).Run();
  _exit(0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Keeper>> Keeper::Start(const Options& options) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("pipe: ", std::generic_category().message(errno)));
  }
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[1]);
    Keep(options, ends[0]);
  }
  const int error = errno;
  close(ends[0]);
  if (pid < 0) {
    close(ends[1]);
    return absl::FailedPreconditionError(
        absl::StrCat("cannot start another process: ",
                     std::generic_category().message(error)));
  }
  return std::unique_ptr<Keeper>(new Keeper(ends[1], pid));
}

Keeper::~Keeper() {
  close(birth_fd_);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace ballast
