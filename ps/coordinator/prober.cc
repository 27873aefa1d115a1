// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/prober.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <utility>

namespace ballast {
namespace {

// A machine of the cluster answers a connect within a millisecond.
constexpr absl::Duration kLimit = absl::Milliseconds(200);

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses Resolve(const std::string& address) {
  const size_t colon = address.rfind(':');
  addrinfo* found = nullptr;
  if (colon != std::string::npos) {
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(address.substr(0, colon).c_str(),
                    address.substr(colon + 1).c_str(), &hints, &found) != 0) {
      found = nullptr;
    }
  }
  return {found, &freeaddrinfo};
}

// The outcome of a connect as errno tells it; 0: connected.
int Connect(int fd, const addrinfo& to, absl::Duration limit) {
  if (connect(fd, to.ai_addr, to.ai_addrlen) == 0) {
    return 0;
  }
  if (errno != EINPROGRESS) {
    return errno;
  }
  pollfd ready = {fd, POLLOUT, 0};
  if (poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(limit))) !=
      1) {
    return ETIMEDOUT;
  }
  int error = 0;
  socklen_t size = sizeof(error);
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error
                                                                  : errno;
}

}  // namespace

ProbeAnswer ProbeAddress(const std::string& address, absl::Duration limit) {
  const Addresses to = Resolve(address);
  if (to == nullptr) {
    return ProbeAnswer::kUnclear;
  }
  const int fd =
      socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    return ProbeAnswer::kUnclear;
  }
  const int error = Connect(fd, *to, limit);
  close(fd);
  return error == 0              ? ProbeAnswer::kAccepted
         : error == ECONNREFUSED ? ProbeAnswer::kRefused
                                 : ProbeAnswer::kUnclear;
}

Prober::Prober(OnAnswer on_answer)
    : on_answer_(std::move(on_answer)), thread_([this] { Run(); }) {}

Prober::~Prober() {
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void Prober::Start(const Probe& probe) {
  MutexLock lock(&mutex_);
  if (waiting_.size() < kWaitingMax) {
    waiting_.push_back(probe);
    changed_.NotifyAll();
  }
}

void Prober::Run() {
  while (true) {
    Probe probe;
    {
      MutexLock lock(&mutex_);
      while (waiting_.empty() && !stopped_) {
        changed_.Wait(&mutex_);
      }
      if (stopped_) {
        return;
      }
      probe = std::move(waiting_.front());
      waiting_.pop_front();
    }
    const ProbeAnswer answer = ProbeAddress(probe.address, kLimit);
    if (answer != ProbeAnswer::kUnclear) {
      on_answer_(probe.incarnation, answer == ProbeAnswer::kAccepted);
    }
  }
}

}  // namespace ballast
