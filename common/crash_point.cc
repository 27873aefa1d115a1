// SPDX-License-Identifier: Apache-2.0
#include "common/crash_point.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "common/mutex.h"

namespace ballast {
namespace {

struct Armed {
  Mutex mutex;
  std::string count_path;
  std::string name;   // Of the point that ends the process; empty: none does.
  uint64_t pass = 0;  // Which pass of it.
  std::map<std::string, uint64_t> passes;
};

// Leaked: threads may pass points while the process ends.
Armed& TheArmed() {
  static Armed& armed = *new Armed;
  return armed;
}

void WriteCounts(const Armed& armed, const char* hit) {
  std::string text;
  if (hit != nullptr) {
    absl::StrAppend(&text, "hit ", hit, "\n");
  }
  for (const auto& [name, count] : armed.passes) {
    absl::StrAppend(&text, name, " ", count, "\n");
  }
  const int fd = open(armed.count_path.c_str(),
                      O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd >= 0) {
    if (write(fd, text.data(), text.size()) < 0) {
      std::perror("crash point counts");
    }
    close(fd);
  }
}

}  // namespace

std::atomic<bool> crash_points_armed = false;

void ArmCrashPoints(const std::string& dir, const std::string& role) {
  Armed& armed = TheArmed();
  MutexLock lock(&armed.mutex);
  armed.count_path = absl::StrCat(dir, "/", role, ".", getpid());
  const std::string path = absl::StrCat(dir, "/", role);
  std::ifstream file(path);
  if (file >> armed.name >> armed.pass) {
    unlink(path.c_str());
  } else {
    armed.name.clear();
  }
  std::atexit([] {
    MutexLock exit_lock(&TheArmed().mutex);
    WriteCounts(TheArmed(), nullptr);
  });
  crash_points_armed = true;
}

void PassCrashPoint(const char* name) {
  Armed& armed = TheArmed();
  MutexLock lock(&armed.mutex);
  if (++armed.passes[name] == armed.pass && armed.name == name) {
    WriteCounts(armed, name);
    kill(getpid(), SIGKILL);
  }
}

}  // namespace ballast
