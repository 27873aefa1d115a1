// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <latch>
#include <optional>
#include <thread>
#include <vector>

#include "storage/disk.h"
#include "storage/record.h"
#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using testing::Await;
using testing::Says;

// Both ways of doing I/O keep the same promises.
class IoQueueTest : public ::testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<IoQueue> Start(uint32_t depth) {
    return *PosixDisk()->StartQueue({depth, GetParam()});
  }
  absl::Status Do(IoQueue* queue, bool write, uint64_t offset,
                  absl::Span<std::byte> data) {
    return Await([&](auto done) {
      queue->Submit({write ? IoKind::kWrite : IoKind::kRead, file_.get(),
                     offset, data.data(), data.size(), done});
    });
  }

  testing::TempDir dir_;
  std::unique_ptr<DiskFile> file_ =
      *PosixDisk()->OpenDirect(dir_.path("file"), true);
};

TEST_P(IoQueueTest, ReadsBackWhatItWrote) {
  const auto queue = Start(4);
  AlignedBuffer out(5 << 20);
  testing::FillRandom(1, out.span());
  ASSERT_EQ(Do(queue.get(), true, 8192, out.span()), absl::OkStatus());
  AlignedBuffer in(5 << 20);
  ASSERT_EQ(Do(queue.get(), false, 8192, in.span()), absl::OkStatus());
  EXPECT_EQ(std::memcmp(in.data(), out.data(), in.size()), 0);
}

TEST_P(IoQueueTest, AReadBehindTheEndIsLoss) {
  const auto queue = Start(4);
  ASSERT_EQ(file_->Preallocate(0, 2 * kPageBytes), absl::OkStatus());
  AlignedBuffer in(4 * kPageBytes);
  EXPECT_TRUE(Says(Do(queue.get(), false, 0, in.span()),
                   absl::StatusCode::kDataLoss, dir_.path("file")));
  EXPECT_EQ(Do(queue.get(), false, 0, in.span().subspan(0, 2 * kPageBytes)),
            absl::OkStatus());
  // A file that ends within a page.
  ASSERT_EQ(truncate(dir_.path("file").c_str(), kPageBytes + 100), 0);
  EXPECT_EQ(
      Do(queue.get(), false, 0, in.span().subspan(0, 2 * kPageBytes)).code(),
      absl::StatusCode::kDataLoss);
}

TEST_P(IoQueueTest, AWriteToAReadOnlyFileSaysSo) {
  const auto queue = Start(4);
  ASSERT_EQ(file_->Preallocate(0, kPageBytes), absl::OkStatus());
  file_ = *PosixDisk()->OpenForRead(dir_.path("file"));
  AlignedBuffer data(kPageBytes);
  EXPECT_TRUE(Says(Do(queue.get(), true, 0, data.span()),
                   absl::StatusCode::kInternal, "cannot write"));
}

TEST_P(IoQueueTest, TakesFarMoreRequestsThanItsDepthFromManyThreads) {
  constexpr int kThreads = 4;
  constexpr int kEach = 100;
  const auto queue = Start(2);
  AlignedBuffer data(kThreads * kEach * kPageBytes);
  testing::FillRandom(2, data.span());
  std::latch finished(kThreads * kEach);
  std::atomic<int> failed = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    // The threads end before their requests do, and nothing is cancelled.
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        const uint64_t offset =
            static_cast<uint64_t>(t * kEach + i) * kPageBytes;
        queue->Submit({IoKind::kWrite, file_.get(), offset,
                       data.data() + offset, kPageBytes,
                       [&](const absl::Status& status) {
                         failed += status.ok() ? 0 : 1;
                         finished.count_down();
                       }});
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  finished.wait();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(HashBytes(testing::Slurp(file_->path())),
            HashBytes(data.data(), data.size()));
}

TEST_P(IoQueueTest, ACompletionMaySubmitTheNextRequest) {
  const auto queue = Start(1);
  AlignedBuffer data(kPageBytes);
  std::latch finished(1);
  int left = 50;
  std::function<void(absl::Status)> next = [&](const absl::Status& status) {
    if (!status.ok() || left-- == 0) {
      finished.count_down();
      return;
    }
    queue->Submit({IoKind::kWrite, file_.get(),
                   static_cast<uint64_t>(left) * kPageBytes, data.data(),
                   kPageBytes, next});
  };
  next(absl::OkStatus());
  finished.wait();
  EXPECT_EQ(left, -1);
}

TEST_P(IoQueueTest, ARequestOfNoBytesOnlyCompletes) {
  const auto queue = Start(1);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Await([&](auto done) {
                IoRequest request;
                request.done = done;
                queue->Submit(std::move(request));
              }),
              absl::OkStatus());
  }
}

TEST_P(IoQueueTest, ASyncCompletesAndAFailedOneIsLossNamingTheFile) {
  const auto queue = Start(2);
  const auto sync = [&queue](DiskFile* file) {
    return Await([&](auto done) {
      IoRequest request;
      request.kind = IoKind::kSync;
      request.file = file;
      request.done = done;
      queue->Submit(std::move(request));
    });
  };
  EXPECT_EQ(sync(file_.get()), absl::OkStatus());
  EXPECT_EQ(file_->Sync(), absl::OkStatus());
  // A pipe cannot be synced.
  ASSERT_EQ(mkfifo(dir_.path("pipe").c_str(), 0600), 0);
  const UniqueFd other(open(dir_.path("pipe").c_str(), O_RDWR | O_CLOEXEC));
  const auto pipe = *PosixDisk()->OpenForRead(dir_.path("pipe"));
  EXPECT_TRUE(Says(sync(pipe.get()), absl::StatusCode::kDataLoss,
                   "cannot sync " + dir_.path("pipe")));
  EXPECT_TRUE(Says(pipe->Sync(), absl::StatusCode::kDataLoss, "cannot sync"));
}

// The kernel ends the transfers of a killed process after its locks are gone;
// here a descriptor plays the part of such a transfer.
TEST(PosixDiskTest, AFileIsOpenedOnlyWhenNobodyElseCanStillWriteIt) {
  const testing::TempDir dir;
  const std::string path = dir.path("slab");
  std::optional<UniqueFd> former(
      UniqueFd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)));
  ASSERT_EQ(flock(former->get(), LOCK_EX), 0);
  std::atomic<bool> opened = false;
  std::thread opener([&] {
    EXPECT_EQ(PosixDisk()->OpenDirect(path, /*create=*/false).status(),
              absl::OkStatus());
    opened = true;
  });
  // It cannot be: the lock is held.
  EXPECT_FALSE(opened);
  former.reset();
  opener.join();
  EXPECT_TRUE(opened);
}

TEST_P(IoQueueTest, EndsOnlyAfterEveryCompletionRan) {
  std::atomic<int> completed = 0;
  AlignedBuffer data(64 * kPageBytes);
  {
    const auto queue = Start(2);
    for (uint64_t i = 0; i < 64; ++i) {
      queue->Submit({IoKind::kWrite, file_.get(), i * kPageBytes,
                     data.data() + i * kPageBytes, kPageBytes,
                     [&](const absl::Status&) { ++completed; }});
    }
  }
  EXPECT_EQ(completed, 64);
}

INSTANTIATE_TEST_SUITE_P(RingOrNot, IoQueueTest, ::testing::Bool(),
                         [](const auto& param) {
                           return param.param ? "Ring" : "Plain";
                         });

}  // namespace
}  // namespace ballast
