// SPDX-License-Identifier: Apache-2.0
#include "storage/gradient_log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <map>
#include <thread>
#include <vector>

#include "storage/record.h"
#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using testing::Await;
using testing::Says;

constexpr auto kLoss = absl::StatusCode::kDataLoss;

GradientName Name(uint64_t step, uint32_t chunk) {
  return {1, step, chunk, kAllUses, {0, 8}};
}

class GradientLogTest : public ::testing::TestWithParam<bool> {
 protected:
  GradientLog::Options Options() const {
    GradientLog::Options options;
    options.dir = dir_.path();
    options.run = testing::kRun;
    options.timeline = 1;
    options.segment_bytes = 1 << 20;
    options.queue_depth = 4;
    options.buffer_bytes = 64 << 10;
    options.use_io_uring = GetParam();
    return options;
  }
  std::unique_ptr<GradientLog> Open() {
    auto log = GradientLog::Open(Options());
    EXPECT_EQ(log.status(), absl::OkStatus());
    return *std::move(log);
  }
  // Appends random bytes, `shift` bytes off a page boundary.
  absl::StatusOr<LogPosition> Append(GradientLog* log, const GradientName& name,
                                     uint64_t bytes, uint64_t shift) {
    AlignedBuffer payload(bytes + shift + 1);
    testing::FillRandom(bytes + name.step + name.chunk,
                        payload.span().subspan(shift, bytes));
    absl::StatusOr<LogPosition> position;
    const absl::Status written = Await([&](auto done) {
      position = log->Append(name, payload.data() + shift, bytes, done);
      if (!position.ok()) {
        done(position.status());
      }
    });
    EXPECT_EQ(written, position.status());
    return position;
  }
  absl::Status Read(GradientLog* log, const GradientName& name,
                    const LogPosition& position, uint64_t shift) {
    AlignedBuffer wanted(position.bytes + 1);
    testing::FillRandom(position.bytes + name.step + name.chunk,
                        wanted.span().subspan(0, position.bytes));
    AlignedBuffer found(position.bytes + shift + 1);
    found.data()[position.bytes + shift] = std::byte{0x5a};
    const absl::Status status = Await([&](auto done) {
      log->Read(name, position, found.data() + shift, std::move(done));
    });
    if (status.ok()) {
      EXPECT_EQ(
          std::memcmp(found.data() + shift, wanted.data(), position.bytes), 0);
      EXPECT_EQ(found.data()[position.bytes + shift], std::byte{0x5a});
    }
    return status;
  }
  std::string SegmentPath(uint64_t serial) const {
    return dir_.path(
        absl::StrCat("log/segment-", absl::Hex(serial, absl::kZeroPad16)));
  }
  size_t SegmentCount() const {
    return static_cast<size_t>(
        std::distance(std::filesystem::directory_iterator(dir_.path("log")),
                      std::filesystem::directory_iterator()));
  }

  testing::TempDir dir_;
};

TEST_P(GradientLogTest, ReadsBackWhatItAppendedOfAnySizeAndAlignment) {
  const auto log = Open();
  uint32_t chunk = 0;
  uint64_t record_bytes = 0;
  for (const uint64_t bytes :
       {uint64_t{0}, uint64_t{1}, uint64_t{4}, kPageBytes - 1, kPageBytes,
        kPageBytes + 1, uint64_t{100'000}, uint64_t{131'072}, uint64_t{300'001},
        uint64_t{3 << 20}}) {
    for (const uint64_t shift : {0, 4, 2048}) {
      const GradientName name = Name(3, ++chunk);
      const auto position = Append(log.get(), name, bytes, shift);
      ASSERT_EQ(position.status(), absl::OkStatus());
      EXPECT_EQ(position->offset % kPageBytes, 0u);
      EXPECT_EQ(position->bytes, bytes);
      record_bytes += kPageBytes + RoundUp(bytes, kPageBytes);
      for (const uint64_t read_shift : {0, 64}) {
        EXPECT_EQ(Read(log.get(), name, *position, read_shift),
                  absl::OkStatus())
            << bytes << " " << shift << " " << read_shift;
      }
    }
  }
  EXPECT_EQ(log->stats().bytes_written, record_bytes);
  EXPECT_EQ(log->stats().bytes_read, 2 * record_bytes);
}

TEST_P(GradientLogTest, AnyOtherNameIsLoss) {
  const auto log = Open();
  const GradientName name = Name(3, 7);
  const LogPosition position = *Append(log.get(), name, 5000, 0);
  for (const GradientName& wrong :
       std::vector<GradientName>{{2, 3, 7, kAllUses, {0, 8}},
                                 {1, 4, 7, kAllUses, {0, 8}},
                                 {1, 3, 8, kAllUses, {0, 8}},
                                 {1, 3, 7, 0, {0, 8}},
                                 {1, 3, 7, kAllUses, {0, 4}}}) {
    EXPECT_TRUE(
        Says(Read(log.get(), wrong, position, 0), kLoss, "step 3 chunk 7"));
  }
}

TEST_P(GradientLogTest, AnyOtherPlaceIsLoss) {
  const auto log = Open();
  const GradientName name = Name(3, 7);
  const LogPosition good = *Append(log.get(), name, 5000, 0);
  *Append(log.get(), Name(3, 8), 5000, 0);
  for (const LogPosition& wrong : std::vector<LogPosition>{
           {good.segment + 1, good.offset, good.bytes},
           {0, good.offset, good.bytes},
           {good.segment, good.offset + kPageBytes, good.bytes},
           {good.segment, good.offset + 1, good.bytes},
           {good.segment, 1 << 30, good.bytes},
           {good.segment, ~uint64_t{0} - kPageBytes + 1, good.bytes},
           {good.segment, good.offset, good.bytes - 1},
           {good.segment, good.offset, 13000}}) {
    EXPECT_EQ(Read(log.get(), name, wrong, 0).code(), kLoss)
        << wrong.segment << " " << wrong.offset << " " << wrong.bytes;
  }
  // A length of which no buffer could be made is refused before it is used.
  std::byte nothing{};
  EXPECT_EQ(Await([&](auto done) {
              log->Read(name, {good.segment, 0, ~uint64_t{0}}, &nothing, done);
            }).code(),
            kLoss);
  EXPECT_EQ(Read(log.get(), name, good, 0), absl::OkStatus());
}

TEST_P(GradientLogTest, AnyFlippedByteOfARecordIsFound) {
  const auto log = Open();
  const GradientName name = Name(3, 7);
  const LogPosition position = *Append(log.get(), name, 5000, 0);
  const std::string path = SegmentPath(position.segment);
  std::vector<uint64_t> offsets = {4095 + 1, 4096 + 4999};
  for (uint64_t i = 0; i < 128; i += 3) {
    offsets.push_back(i);
  }
  for (uint64_t i = 0; i < 5000; i += 97) {
    offsets.push_back(kPageBytes + i);
  }
  for (const uint64_t offset : offsets) {
    testing::FlipByte(path, position.offset + offset);
    EXPECT_TRUE(Says(Read(log.get(), name, position, 0), kLoss, path))
        << offset;
    testing::FlipByte(path, position.offset + offset);
  }
  EXPECT_EQ(Read(log.get(), name, position, 0), absl::OkStatus());
}

TEST_P(GradientLogTest, SegmentsAreRecycledUnderNewNumbersAfterADrop) {
  const auto log = Open();
  std::map<uint64_t, LogPosition> positions;
  uint64_t serial_max = 0;
  for (uint64_t step = 1; step <= 30; ++step) {
    for (uint32_t chunk = 0; chunk < 4; ++chunk) {
      const LogPosition position =
          *Append(log.get(), Name(step, chunk), 200'000, 0);
      EXPECT_GE(position.segment, serial_max);
      serial_max = position.segment;
      positions[step * 10 + chunk] = position;
    }
    if (step > 1) {  // The step before is still whole.
      for (uint32_t chunk = 0; chunk < 4; ++chunk) {
        EXPECT_EQ(Read(log.get(), Name(step - 1, chunk),
                       positions[(step - 1) * 10 + chunk], 0),
                  absl::OkStatus());
      }
      log->DropThrough(step - 1);
    }
  }
  EXPECT_GE(serial_max, 20u);
  EXPECT_LE(SegmentCount(), 5u);
  EXPECT_EQ(Read(log.get(), Name(1, 0), positions[10], 0).code(), kLoss);
}

TEST_P(GradientLogTest, ARecordOfStepZeroIsKeptUntilItIsDropped) {
  const auto log = Open();
  const LogPosition first = *Append(log.get(), Name(0, 0), 900'000, 0);
  *Append(log.get(), Name(0, 1), 900'000, 0);
  *Append(log.get(), Name(0, 2), 900'000, 0);
  EXPECT_EQ(Read(log.get(), Name(0, 0), first, 0), absl::OkStatus());
}

TEST_P(GradientLogTest, ANewLifeNeverUsesAnOldNumberAndClearsOldSpill) {
  uint64_t serial = 0;
  for (int life = 0; life < 4; ++life) {
    const auto log = Open();
    EXPECT_LE(SegmentCount(), 1u);
    for (uint32_t chunk = 0; chunk < 3; ++chunk) {
      const LogPosition position =
          *Append(log.get(), Name(1, chunk), 900'000, 0);
      EXPECT_GT(position.segment, serial);
      serial = position.segment;
    }
  }
}

TEST_P(GradientLogTest, LeavesFilesAloneThatAreNotSegments) {
  std::filesystem::create_directory(dir_.path("log"));
  for (const char* name : {"segment-", "segment-1", "segment-000000000000000g",
                           "notes", "segment-00000000000000010"}) {
    testing::Spill(dir_.path(absl::StrCat("log/", name)), "x");
  }
  *Append(Open().get(), Name(1, 0), 10, 0);
  EXPECT_EQ(SegmentCount(), 6u);
}

TEST_P(GradientLogTest, ManyThreadsShareFewBuffers) {
  const auto log = Open();
  constexpr int kThreads = 3;
  constexpr int kEach = 20;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      // All of a thread's appends are in flight at once: far more bytes than
      // there are buffers.
      std::vector<AlignedBuffer> payloads;
      std::vector<LogPosition> positions;
      std::latch written(kEach);
      std::atomic<int> failed = 0;
      for (int i = 0; i < kEach; ++i) {
        const uint64_t bytes = 100'000 + static_cast<uint64_t>(i);
        payloads.emplace_back(bytes + 4);
        testing::FillRandom(static_cast<uint64_t>(t * 100 + i),
                            payloads.back().span());
        positions.push_back(
            *log->Append(Name(1, static_cast<uint32_t>(t * 100 + i)),
                         payloads.back().data() + (i % 2) * 4, bytes,
                         [&](const absl::Status& status) {
                           failed += status.ok() ? 0 : 1;
                           written.count_down();
                         }));
      }
      written.wait();
      EXPECT_EQ(failed, 0);
      for (int i = 0; i < kEach; ++i) {
        const auto at = static_cast<size_t>(i);
        AlignedBuffer found(positions[at].bytes);
        EXPECT_EQ(Await([&](auto done) {
                    log->Read(Name(1, static_cast<uint32_t>(t * 100 + i)),
                              positions[at], found.data(), done);
                  }),
                  absl::OkStatus());
        EXPECT_EQ(std::memcmp(found.data(), payloads[at].data() + (i % 2) * 4,
                              positions[at].bytes),
                  0);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST_P(GradientLogTest, EndsOnlyAfterEveryAppendIsWritten) {
  std::atomic<int> completed = 0;
  const AlignedBuffer payload(200'000);
  {
    const auto log = Open();
    for (uint32_t i = 0; i < 20; ++i) {
      log->Append(Name(1, i), payload.data() + 4, 190'000,
                  [&](const absl::Status& status) {
                    completed += status.ok() ? 1 : 0;
                  })
          .status()
          .IgnoreError();
    }
  }
  EXPECT_EQ(completed, 20);
}

TEST_P(GradientLogTest, AFullDiskIsAnErrorThatHeals) {
  const testing::SmallDisk disk(4 << 20);
  if (!disk.ok()) {
    GTEST_SKIP() << "a small tmpfs cannot be mounted here (not root?): the "
                    "full disk is NOT tested";
  }
  GradientLog::Options options = Options();
  options.dir = disk.path("ps");
  const auto log = *GradientLog::Open(options);
  std::vector<LogPosition> positions;
  absl::Status full;
  for (uint32_t i = 0; i < 50 && full.ok(); ++i) {
    const auto position = Append(log.get(), Name(1, i), 300'000, 0);
    full = position.status();
    if (position.ok()) {
      positions.push_back(*position);
    }
  }
  EXPECT_TRUE(Says(full, absl::StatusCode::kResourceExhausted, "segment-"));
  EXPECT_GE(positions.size(), 9u);
  for (uint32_t i = 0; i < positions.size(); ++i) {
    EXPECT_EQ(Read(log.get(), Name(1, i), positions[i], 0), absl::OkStatus());
  }
  log->DropThrough(1);
  const auto position = Append(log.get(), Name(2, 0), 300'000, 0);
  ASSERT_EQ(position.status(), absl::OkStatus());
  EXPECT_EQ(Read(log.get(), Name(2, 0), *position, 0), absl::OkStatus());
}

TEST_P(GradientLogTest, OptionsOutOfRangeAreRefused) {
  GradientLog::Options options = Options();
  options.buffer_bytes = (64 << 10) - 1;
  EXPECT_EQ(GradientLog::Open(options).status().code(),
            absl::StatusCode::kInvalidArgument);
  options = Options();
  options.segment_bytes = 0;
  EXPECT_EQ(GradientLog::Open(options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(RingOrNot, GradientLogTest, ::testing::Bool(),
                         [](const auto& param) {
                           return param.param ? "Ring" : "Plain";
                         });

}  // namespace
}  // namespace ballast
