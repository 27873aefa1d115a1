// SPDX-License-Identifier: Apache-2.0
// ballast-worker: computes the micro-batches that the coordinator assigns.
// Exit 0: told to exit. 1: failed. 2: usage. 78: the job cannot run here.
// SIGTERM: finishes its assignment and leaves; the second time at once.

#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/crash_point.h"
#include "common/job_file.h"
#include "common/log.h"
#include "common/memory_setup.h"
#include "common/mutex.h"
#include "worker/worker.h"

namespace ballast {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitConfiguration = 78;

int Fail(const absl::Status& status, int code) {
  LogEvent(Severity::kError, "failed",
           {{"code", absl::StatusCodeToString(status.code())},
            {"why", status.message()}});
  return code;
}

bool IsConfiguration(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) ||
         absl::IsPermissionDenied(status) ||
         absl::IsResourceExhausted(status) ||
         absl::IsFailedPrecondition(status);
}

// Takes SIGTERM on a thread of its own, before and while there is a worker.
class TermSignal {
 public:
  // Before any other thread: they inherit the mask.
  TermSignal() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
    // Lives as long as the process.
    std::thread([this] { Run(); }).detach();
  }
  // Null: nobody (any more).
  void Serve(Worker* worker) {
    MutexLock lock(&mutex_);
    worker_ = worker;
  }

 private:
  void Run() {
    for (int taken = 0;;) {
      int signal = 0;
      if (sigwait(&signals_, &signal) != 0) {
        continue;
      }
      MutexLock lock(&mutex_);
      // Nothing of ours lasts, so nothing is lost.
      if (++taken > 1 || worker_ == nullptr || !worker_->Term()) {
        _exit(0);
      }
    }
  }

  sigset_t signals_;
  Mutex mutex_;
  Worker* worker_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

int Main(const std::string& config, const std::string& coordinator,
         uint32_t index) {
  // Never destroyed: its thread may run to the very end.
  static TermSignal& term = *new TermSignal();
  const std::string name = absl::StrCat("worker-", index);
  SetLogRole(name);
  if (const char* const crash_dir = std::getenv("BALLAST_CRASH_DIR")) {
    ArmCrashPoints(crash_dir, name);
  }
  const auto file = LoadJobFile(config, {});
  if (!file.ok()) {
    return Fail(file.status(), kExitConfiguration);
  }
  const auto worker = Worker::Create(file->job, coordinator, name);
  if (!worker.ok()) {
    return Fail(worker.status(), IsConfiguration(worker.status())
                                     ? kExitConfiguration
                                     : kExitFailed);
  }
  term.Serve(worker->get());
  const absl::Status status = (*worker)->Run();
  term.Serve(nullptr);
  return status.ok() ? 0 : Fail(status, kExitFailed);
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  ballast::KeepHeapMemory();
  CLI::App app("Computes the micro-batches that the coordinator assigns.",
               "ballast-worker");
  std::string config;
  std::string coordinator;
  uint32_t index = 0;
  app.add_option("--config", config, "Job file")->required();
  app.add_option("--coordinator", coordinator,
                 "host:port, or several with commas between")
      ->required();
  app.add_option("--index", index, "Number of this worker, from 0")->required();
  app.footer(
      "Exit codes: 0 told to exit, 1 failed, 2 usage, 78 the job cannot run "
      "here.\nExample: ballast-worker --config runs/austen/config.yaml "
      "--coordinator 127.0.0.1:7400 --index 0");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : ballast::kExitUsage;
  }
  return ballast::Main(config, coordinator, index);
}
