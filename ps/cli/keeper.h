// SPDX-License-Identifier: Apache-2.0
// Sees to it that the processes of a run end when their launcher is killed. A
// killed launcher can tell nobody, and the coordinator, which notices and stops
// the run with a checkpoint, does not know members that have not joined yet or
// may be dead itself. So a second small process waits for the launcher's end,
// lets the coordinator end the run, and then ends whoever is left. It also
// holds the run folder's lock until then.

#pragma once

#include <sys/types.h>

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ballast {

// What a child writes to the keeper before it becomes its role.
struct Birth {
  pid_t pid = 0;
  int coordinator = 0;  // 1: the others are left to it as long as it lives.
};

// Thread-compatible. Destroyed, it waits for the process, which then ends at
// once when all children have.
class Keeper {
 public:
  struct Options {
    // How long the coordinator may take to end the run, in good order.
    absl::Duration stop_timeout = absl::Minutes(1);
    // From its end to a SIGTERM for whoever is left, and to a second one.
    absl::Duration grace = absl::Seconds(2);
    // From then to SIGKILL.
    absl::Duration end_timeout = absl::Seconds(10);
    int lock_fd = -1;  // Stays open; -1: none.
  };

  // Call it before the process has threads.
  // Errors: FAILED_PRECONDITION  the system refuses a pipe or a process.
  static absl::StatusOr<std::unique_ptr<Keeper>> Start(const Options& options);
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  // Where children write their Birth; closed on exec.
  int birth_fd() const { return birth_fd_; }
  pid_t pid() const { return pid_; }

 private:
  Keeper(int birth_fd, pid_t pid) : birth_fd_(birth_fd), pid_(pid) {}

  const int birth_fd_;
  const pid_t pid_;
};

}  // namespace ballast
