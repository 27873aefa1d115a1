// SPDX-License-Identifier: Apache-2.0
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/log.h"
#include "common/mutex.h"
#include "storage/disk.h"
#include "storage/posix_file.h"
#include "storage/record.h"

namespace ballast {
namespace {

// The kernel gives EAGAIN when it is short of requests for a moment; a request
// that meets it this often in a row is given up.
constexpr uint32_t kRetriesMax = 1000;

struct Operation {
  IoRequest request;
  uint64_t moved = 0;
  uint32_t retries = 0;
};

struct Completion {
  Operation* operation = nullptr;
  int64_t result = 0;  // Bytes, or -errno.
};

absl::Status TransferError(const IoRequest& request, int error) {
  const std::string& path = request.file->path();
  if (request.kind == IoKind::kSync) {
    return absl::DataLossError(
        ErrnoError(error, absl::StrCat("cannot sync ", path)).message());
  }
  return ErrnoError(
      error, absl::StrCat(
                 "cannot ", request.kind == IoKind::kWrite ? "write " : "read ",
                 path, " at ", request.offset, " (", request.bytes, " bytes)"));
}

int FdOf(const IoRequest& request) {
  return static_cast<const PosixFile*>(request.file)->fd();
}

class UringQueue final : public IoQueue {
 public:
  UringQueue(const Options& options, UniqueFd wake)
      : depth_(std::clamp<uint32_t>(options.depth, 1, 1024)),
        wake_(std::move(wake)) {
    if (options.use_io_uring) {
      // One entry more for the read that waits for a wake.
      io_uring ring = {};
      const int error = io_uring_queue_init(depth_ + 1, &ring, 0);
      if (error == 0) {
        ring_ = ring;
      } else {
        LogEvent(Severity::kWarn, "io_uring_unavailable", {{"errno", -error}});
      }
    }
    thread_ = std::thread([this] { Run(); });
  }

  ~UringQueue() override {
    {
      MutexLock lock(&mutex_);
      stop_ = true;
    }
    Wake();
    thread_.join();
    if (ring_) {
      io_uring_queue_exit(&*ring_);
    }
  }

  void Submit(IoRequest request) override {
    BALLAST_CHECK(request.bytes % kPageBytes == 0);
    BALLAST_CHECK(request.offset % kPageBytes == 0);
    BALLAST_CHECK(reinterpret_cast<uintptr_t>(request.data) % kPageBytes == 0);
    auto operation = std::make_unique<Operation>();
    operation->request = std::move(request);
    bool wake = false;
    {
      MutexLock lock(&mutex_);
      pending_.push_back(std::move(operation));
      wake = std::exchange(waiting_, false);
    }
    if (wake) {
      Wake();
    }
  }

 private:
  void Wake() {
    const uint64_t one = 1;
    // Fails only when the counter is full, and then a wake is due anyway.
    [[maybe_unused]] const ssize_t put = write(wake_.get(), &one, sizeof(one));
  }

  // The I/O thread.
  void Run() {
    if (ring_) {
      ArmWake();
    }
    while (StartPending()) {
      std::vector<Completion> batch =
          finished_.empty() ? Wait() : std::exchange(finished_, {});
      {
        MutexLock lock(&mutex_);
        waiting_ = false;
      }
      for (const Completion& completion : batch) {
        Advance(completion);
      }
    }
  }

  // Starts what may start. False when stopped and nothing is left.
  bool StartPending() {
    std::vector<std::unique_ptr<Operation>> starting;
    {
      MutexLock lock(&mutex_);
      while (!pending_.empty() && in_flight_ + starting.size() < depth_) {
        starting.push_back(std::move(pending_.front()));
        pending_.pop_front();
      }
      if (stop_ && starting.empty() && in_flight_ == 0) {
        return false;
      }
      waiting_ = in_flight_ + starting.size() < depth_;
    }
    for (std::unique_ptr<Operation>& operation : starting) {
      ++in_flight_;
      Start(operation.release());  // Owned by the ring until it completes.
    }
    return true;
  }

  void Start(Operation* operation) {
    const IoRequest& request = operation->request;
    if (request.kind == IoKind::kSync) {
      StartSync(operation);
      return;
    }
    const bool write = request.kind == IoKind::kWrite;
    const uint64_t offset = request.offset + operation->moved;
    std::byte* data = request.data + operation->moved;
    // The kernel moves at most 2 GiB at once; the rest is continued.
    const uint64_t bytes =
        std::min<uint64_t>(request.bytes - operation->moved, 1u << 30);
    if (bytes == 0) {
      finished_.push_back({operation, 0});
      return;
    }
    if (!ring_) {
      const int fd = FdOf(request);
      const ssize_t got =
          write ? pwrite(fd, data, bytes, static_cast<off_t>(offset))
                : pread(fd, data, bytes, static_cast<off_t>(offset));
      finished_.push_back({operation, got < 0 ? -errno : got});
      return;
    }
    io_uring_sqe* entry = io_uring_get_sqe(&*ring_);
    BALLAST_CHECK(entry != nullptr);  // The ring has depth_ + 1 entries.
    if (write) {
      io_uring_prep_write(entry, FdOf(request), data,
                          static_cast<unsigned>(bytes), offset);
    } else {
      io_uring_prep_read(entry, FdOf(request), data,
                         static_cast<unsigned>(bytes), offset);
    }
    io_uring_sqe_set_data(entry, operation);
  }

  void StartSync(Operation* operation) {
    const int fd = FdOf(operation->request);
    if (!ring_) {
      finished_.push_back({operation, fdatasync(fd) == 0 ? 0 : -errno});
      return;
    }
    io_uring_sqe* entry = io_uring_get_sqe(&*ring_);
    BALLAST_CHECK(entry != nullptr);  // The ring has depth_ + 1 entries.
    io_uring_prep_fsync(entry, fd, IORING_FSYNC_DATASYNC);
    io_uring_sqe_set_data(entry, operation);
  }

  void ArmWake() {
    io_uring_sqe* entry = io_uring_get_sqe(&*ring_);
    BALLAST_CHECK(entry != nullptr);
    io_uring_prep_read(entry, wake_.get(), &wake_count_, sizeof(wake_count_),
                       0);
    io_uring_sqe_set_data(entry, nullptr);
  }

  std::vector<Completion> Wait() {
    if (!ring_) {
      [[maybe_unused]] const ssize_t got =
          read(wake_.get(), &wake_count_, sizeof(wake_count_));
      return {};
    }
    const int submitted = io_uring_submit_and_wait(&*ring_, 1);
    // Anything else means that the ring itself is gone, and with it the
    // knowledge of which buffers the kernel still uses.
    BALLAST_CHECK(submitted >= 0 || submitted == -EINTR ||
                  submitted == -EAGAIN || submitted == -EBUSY);
    std::vector<Completion> batch;
    bool woken = false;
    unsigned head = 0;
    unsigned count = 0;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&*ring_, head, entry) {
      auto* operation = static_cast<Operation*>(io_uring_cqe_get_data(entry));
      if (operation == nullptr) {
        woken = true;
      } else {
        batch.push_back({operation, entry->res});
      }
      ++count;
    }
    io_uring_cq_advance(&*ring_, count);
    if (woken) {
      ArmWake();
    }
    return batch;
  }

  // Continues a short transfer, retries, or completes.
  void Advance(const Completion& completion) {
    Operation* operation = completion.operation;
    const IoRequest& request = operation->request;
    const int64_t result = completion.result;
    if ((result == -EAGAIN || result == -EINTR) &&
        ++operation->retries < kRetriesMax) {
      Start(operation);
      return;
    }
    absl::Status status;
    if (result < 0) {
      status = TransferError(request, static_cast<int>(-result));
    } else if (request.kind != IoKind::kSync) {
      // Only whole pages count, so that O_DIRECT can continue.
      const uint64_t pages =
          static_cast<uint64_t>(result) / kPageBytes * kPageBytes;
      operation->moved += pages;
      operation->retries = 0;
      if (operation->moved < request.bytes && pages > 0) {
        Start(operation);
        return;
      }
      if (operation->moved < request.bytes) {
        status = absl::DataLossError(absl::StrCat(
            request.file->path(), " ends or stops taking bytes at ",
            request.offset + operation->moved + static_cast<uint64_t>(result),
            "; want ", request.bytes, " bytes from ", request.offset));
      }
    }
    const std::unique_ptr<Operation> owned(operation);
    --in_flight_;
    owned->request.done(std::move(status));
  }

  const uint32_t depth_;
  const UniqueFd wake_;  // An eventfd.

  // Used by the I/O thread alone after construction.
  std::optional<io_uring> ring_;
  uint64_t wake_count_ = 0;
  uint64_t in_flight_ = 0;
  std::vector<Completion> finished_;

  Mutex mutex_;
  std::deque<std::unique_ptr<Operation>> pending_ ABSL_GUARDED_BY(mutex_);
  bool waiting_ ABSL_GUARDED_BY(mutex_) = false;  // A new request must wake.
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;  // Last: starts when everything above is there.
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> StartUringQueue(
    const IoQueue::Options& options) {
  UniqueFd wake(eventfd(0, EFD_CLOEXEC));
  if (!wake.valid()) {
    return ErrnoError(errno, "cannot create an eventfd");
  }
  return std::unique_ptr<IoQueue>(
      std::make_unique<UringQueue>(options, std::move(wake)));
}

}  // namespace ballast
