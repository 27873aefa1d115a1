// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/private_etcd.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/status_macros.h"
#include "storage/etcd_store.h"

namespace ballast::testing {
namespace {

constexpr char kProgram[] = "/usr/bin/etcd";
constexpr absl::Duration kStartMax = absl::Seconds(30);

// A port that is free now. Another process may take it before etcd does, so
// Start tries again.
std::string FreeAddress() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(bind(fd, raw, size), 0);
  EXPECT_EQ(getsockname(fd, raw, &size), 0);
  close(fd);
  return absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
}

}  // namespace

bool PrivateEtcd::Installed() { return access(kProgram, X_OK) == 0; }

absl::StatusOr<std::unique_ptr<PrivateEtcd>> PrivateEtcd::Start() {
  absl::Status status;
  for (int attempt = 0; attempt < 3; ++attempt) {
    std::unique_ptr<PrivateEtcd> etcd(new PrivateEtcd());
    etcd->address_ = FreeAddress();
    etcd->peer_address_ = FreeAddress();
    status = etcd->Launch();
    if (status.ok()) {
      return etcd;
    }
  }
  return status;
}

absl::Status PrivateEtcd::Launch() {
  const std::string client = absl::StrCat("http://", address_);
  const std::string peer = absl::StrCat("http://", peer_address_);
  const std::string log = dir_.path("log");
  std::vector<std::string> words = {
      kProgram,
      absl::StrCat("--data-dir=", dir_.path("data")),
      absl::StrCat("--listen-client-urls=", client),
      absl::StrCat("--advertise-client-urls=", client),
      absl::StrCat("--listen-peer-urls=", peer),
      absl::StrCat("--initial-advertise-peer-urls=", peer),
      absl::StrCat("--initial-cluster=default=", peer)};
  std::vector<char*> argv;
  for (std::string& word : words) {
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int fd = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    dup2(fd, 1);
    dup2(fd, 2);
    execv(kProgram, argv.data());
    _exit(127);
  }
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<SharedStateStore> store,
                           OpenEtcdStateStore({{address_}, "ready/"}));
  const absl::Time give_up = MonotonicNow() + kStartMax;
  while (absl::IsUnavailable(store->Get("x").status())) {
    const bool dead = waitpid(pid_, nullptr, WNOHANG) == pid_;
    if (dead || MonotonicNow() > give_up) {
      pid_ = dead ? 0 : pid_;
      Kill();
      return absl::UnavailableError(
          absl::StrCat("etcd did not start: ", Slurp(log)));
    }
    absl::SleepFor(absl::Milliseconds(20));  // Until it answers, or give_up.
  }
  return absl::OkStatus();
}

void PrivateEtcd::Kill() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
}

absl::Status PrivateEtcd::Restart() {
  Kill();
  return Launch();
}

void PrivateEtcd::Pause() { kill(pid_, SIGSTOP); }
void PrivateEtcd::Resume() { kill(pid_, SIGCONT); }

}  // namespace ballast::testing
