// SPDX-License-Identifier: Apache-2.0
// ballast-ps: one shard server.
//
// SIGTERM: asks to leave, finishes its writes and leaves; the second time at
// once.

#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/crash_point.h"
#include "common/job_file.h"
#include "common/log.h"
#include "common/memory_setup.h"
#include "common/mutex.h"
#include "ps/shard/shard_server.h"

namespace {

constexpr int kFailed = 1;
constexpr int kUsage = 2;
constexpr int kBadConfig = 78;

int ExitCode(const absl::Status& status) {
  if (status.ok()) {
    return EXIT_SUCCESS;
  }
  return absl::IsInvalidArgument(status) ? kBadConfig : kFailed;
}

// Takes SIGTERM on a thread of its own.
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
  void Serve(std::function<void()> drain) {
    ballast::MutexLock lock(&mutex_);
    drain_ = std::move(drain);
  }

 private:
  void Run() {
    for (int taken = 0;;) {
      int signal = 0;
      if (sigwait(&signals_, &signal) != 0) {
        continue;
      }
      ballast::MutexLock lock(&mutex_);
      // Whatever was promised is durable already; before the admission nothing
      // was.
      if (++taken > 1 || !drain_) {
        _exit(EXIT_SUCCESS);
      }
      drain_();
    }
  }

  sigset_t signals_;
  ballast::Mutex mutex_;
  std::function<void()> drain_ ABSL_GUARDED_BY(mutex_);
};

// host:port; a host alone gets a port of the system's choice.
bool ParseListen(const std::string& text, std::string* host, uint32_t* port) {
  const size_t colon = text.rfind(':');
  *host = text.substr(0, colon);
  *port = 0;
  return !host->empty() &&
         (colon == std::string::npos ||
          (absl::SimpleAtoi(text.substr(colon + 1), port) && *port <= 65535));
}

}  // namespace

// NOLINTNEXTLINE(bugprone-exception-escape): a wrong flag name of ours throws.
int main(int argc, char** argv) {
  ballast::KeepHeapMemory();
  CLI::App app(
      "ballast-ps - hold a part of a model: its parameters and optimizer "
      "state\n"
      "in memory and on disk, for workers to fetch and to push gradients to.\n"
      "`ballast train` starts it; it leaves when the coordinator says so.\n"
      "SIGTERM asks for that, a second one leaves at once.");
  app.footer(
      "Exit codes: 0 the run is done, 1 failed, 2 usage, 78 bad "
      "configuration.\n"
      "Example: ballast-ps --config runs/austen/config.yaml "
      "--coordinator 127.0.0.1:7400 --index 0");
  std::string config;
  std::string coordinator;
  std::string data_dir;
  std::string listen;
  std::string advertise;
  uint32_t index = 0;
  app.add_option("--config", config, "The run's effective job file.")
      ->required();
  app.add_option("--coordinator", coordinator, "host:port of the coordinator.")
      ->required();
  app.add_option("--index", index, "Which server this is: server-N.")
      ->required();
  app.add_option("--data-dir", data_dir,
                 "Its records. Default: <server.data_dir>/N.");
  app.add_option("--listen", listen,
                 "host:port to serve on. Default: cluster.host, any port.");
  app.add_option("--advertise", advertise,
                 "host:port at which others reach it, where a proxy or an "
                 "address translation\nstands in front. Default: where it "
                 "listens.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? EXIT_SUCCESS : kUsage;
  }

  const std::string name = absl::StrCat("server-", index);
  ballast::SetLogRole(name);
  // Never destroyed: its thread may run to the very end.
  static TermSignal& term = *new TermSignal();
  if (const char* const crash_dir = std::getenv("BALLAST_CRASH_DIR")) {
    ballast::ArmCrashPoints(crash_dir, name);
  }
  const auto file = ballast::LoadJobFile(config, {});
  if (!file.ok()) {
    std::cerr << "ballast-ps: " << file.status().message() << "\n";
    return kBadConfig;
  }
  ballast::ShardServerOptions options;
  options.job = file->job;
  options.coordinator = coordinator;
  options.name = name;
  options.advertise = advertise;
  options.data_dir = data_dir.empty()
                         ? absl::StrCat(file->job.server.data_dir, "/", index)
                         : data_dir;
  options.host = file->job.cluster.host;
  if (!listen.empty() && !ParseListen(listen, &options.host, &options.port)) {
    std::cerr << "ballast-ps: --listen is '" << listen << "'; want host:port\n";
    return kUsage;
  }
  options.on_admitted = [](std::function<void()> drain) {
    term.Serve(std::move(drain));
  };
  const absl::Status status = ballast::RunShardServer(options);
  if (!status.ok()) {
    std::cerr << "ballast-ps: " << name << ": " << status.message() << "\n";
  }
  return ExitCode(status);
}
