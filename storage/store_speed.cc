// SPDX-License-Identifier: Apache-2.0
#include "storage/store_speed.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/layout.h"
#include "common/mutex.h"
#include "common/status_macros.h"
#include "storage/disk.h"
#include "storage/file.h"
#include "storage/record.h"
#include "storage/slab_store.h"

namespace ballast {
namespace {

constexpr Hash128 kRun = {0x5eed, 1};

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Runs items 0..count-1, each a read and then a write, a few at a time, each in
// a buffer of its own; the caller's thread does the work between the two.
class Cycle {
 public:
  using Done = std::function<void(absl::Status)>;
  using Start = std::function<void(uint64_t item, std::byte* data, Done done)>;
  using Work = std::function<void(uint64_t item, std::byte* data)>;

  Cycle(uint64_t body_bytes, uint32_t lanes) {
    for (uint32_t i = 0; i < lanes; ++i) {
      buffers_.emplace_back(body_bytes);
    }
  }

  absl::Status Run(uint64_t count, const Start& read, const Work& work,
                   const Start& write) {
    uint64_t started = 0;
    uint64_t finished = 0;
    for (uint32_t lane = 0; lane < buffers_.size() && started < count; ++lane) {
      StartRead({started++, lane, false}, read);
    }
    while (finished < count) {
      Event event;
      {
        MutexLock lock(&mutex_);
        while (events_.empty()) {
          arrived_.Wait(&mutex_);
        }
        event = events_.front();
        events_.erase(events_.begin());
      }
      if (!event.wrote) {
        std::byte* data = buffers_[event.lane].data();
        work(event.item, data);
        event.wrote = true;
        write(event.item, data, Report(event));
        continue;
      }
      ++finished;
      if (started < count) {
        StartRead({started++, event.lane, false}, read);
      }
    }
    MutexLock lock(&mutex_);
    return std::exchange(status_, absl::OkStatus());
  }

 private:
  struct Event {
    uint64_t item = 0;
    uint32_t lane = 0;
    bool wrote = false;
  };

  void StartRead(const Event& event, const Start& read) {
    read(event.item, buffers_[event.lane].data(), Report(event));
  }
  Done Report(const Event& event) {
    return [this, event](const absl::Status& status) {
      MutexLock lock(&mutex_);
      status_.Update(status);
      events_.push_back(event);
      arrived_.NotifyOne();
    };
  }

  std::vector<AlignedBuffer> buffers_;
  Mutex mutex_;
  CondVar arrived_;
  std::vector<Event> events_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// The ceiling: one preallocated file, every body rewritten in its place.
class RawFile {
 public:
  static absl::StatusOr<std::unique_ptr<RawFile>> Open(
      const StoreSpeedOptions& options) {
    auto raw = std::make_unique<RawFile>();
    BALLAST_ASSIGN_OR_RETURN(
        raw->file_,
        PosixDisk()->OpenDirect(options.dir + "/raw", /*create=*/true));
    BALLAST_RETURN_IF_ERROR(
        raw->file_->Preallocate(0, options.record_count * options.body_bytes));
    BALLAST_ASSIGN_OR_RETURN(
        raw->queue_, PosixDisk()->StartQueue({options.queue_depth, true}));
    raw->bytes_ = options.body_bytes;
    return raw;
  }
  absl::Status RunCycle(uint64_t count, Cycle* cycle) {
    const auto start = [this](bool write) {
      return [this, write](uint64_t item, std::byte* data, Cycle::Done done) {
        queue_->Submit({write ? IoKind::kWrite : IoKind::kRead, file_.get(),
                        item * bytes_, data, bytes_, std::move(done)});
      };
    };
    return cycle->Run(
        count, start(false), [](uint64_t, std::byte*) {}, start(true));
  }
  bool direct() const { return file_->direct(); }

 private:
  std::unique_ptr<DiskFile> file_;
  std::unique_ptr<IoQueue> queue_;
  uint64_t bytes_ = 0;
};

class StoreRun {
 public:
  static absl::StatusOr<std::unique_ptr<StoreRun>> Open(
      const StoreSpeedOptions& options) {
    auto run = std::make_unique<StoreRun>();
    SlabStore::Options store_options;
    store_options.dir = options.dir + "/store";
    store_options.run = kRun;
    store_options.owner = "store speed";
    store_options.queue_depth = options.queue_depth;
    BALLAST_ASSIGN_OR_RETURN(run->store_, SlabStore::Open(store_options));
    // As many elements as fit with three fp32 fields and the header.
    run->tensor_.name = "body";
    const uint64_t elems =
        std::max<uint64_t>((options.body_bytes - 2 * kPageBytes) / 12, 1);
    run->tensor_.shape = {elems};
    run->layout_ = RecordLayout::For(run->tensor_, {0, 0, 0, elems},
                                     OptimizerKind::kAdamW);
    run->extents_.resize(options.record_count);
    return run;
  }
  uint64_t body_bytes() const { return layout_.total_bytes; }
  uint64_t wrong() const { return wrong_; }

  // Reads version `version - 1` of every record (not for the first) and
  // writes `version` to a fresh extent.
  absl::Status RunCycle(uint64_t version, bool checked, Cycle* cycle) {
    const auto read = [&](uint64_t item, std::byte* data, Cycle::Done done) {
      store_->Read(extents_[item], layout_.total_bytes, data, std::move(done));
    };
    const auto work = [&](uint64_t item, std::byte* data) {
      const absl::Span<std::byte> image(data, layout_.total_bytes);
      if (checked) {
        wrong_ +=
            CheckRecord(layout_, Id(item, version - 1), image, "slab").ok() ? 0
                                                                            : 1;
        SealRecord(layout_, Id(item, version), image);
      }
    };
    const auto write = [&](uint64_t item, std::byte* data, Cycle::Done done) {
      Replace(item, data, std::move(done));
    };
    return cycle->Run(extents_.size(), read, work, write);
  }

  absl::Status Fill(Cycle* cycle) {
    return cycle->Run(
        extents_.size(),
        [](uint64_t, std::byte*, const Cycle::Done& done) {
          done(absl::OkStatus());
        },
        [&](uint64_t item, std::byte* data) {
          SealRecord(layout_, Id(item, 0), {data, layout_.total_bytes});
        },
        [&](uint64_t item, std::byte* data, Cycle::Done done) {
          Replace(item, data, std::move(done));
        });
  }

  absl::Status Commit(uint64_t step) {
    StoredCheckpoint checkpoint = {0, step, {}};
    for (uint32_t i = 0; i < extents_.size(); ++i) {
      checkpoint.entries.push_back({i, step, 0, extents_[i]});
    }
    return store_->Commit(checkpoint);
  }
  absl::Status Drop(uint64_t step) { return store_->Drop(0, step); }

 private:
  RecordId Id(uint64_t item, uint64_t version) const {
    return {kRun, 0, version, {item, 0}, 0, layout_.elem_count};
  }
  void Replace(uint64_t item, std::byte* data, Cycle::Done done) {
    const absl::StatusOr<Extent> fresh = store_->Allocate(layout_.total_bytes);
    if (!fresh.ok()) {
      done(fresh.status());
      return;
    }
    if (extents_[item].bytes != 0) {
      store_->Release(extents_[item]);
    }
    extents_[item] = *fresh;
    store_->Write(*fresh, data, std::move(done));
  }

  std::unique_ptr<SlabStore> store_;
  TensorSpec tensor_;
  RecordLayout layout_;
  std::vector<Extent> extents_;
  uint64_t wrong_ = 0;
};

absl::StatusOr<double> Timed(const std::function<absl::Status()>& run) {
  const auto start = std::chrono::steady_clock::now();
  BALLAST_RETURN_IF_ERROR(run());
  return SecondsSince(start);
}

absl::StatusOr<StoreSpeed> Measure(const StoreSpeedOptions& options) {
  BALLAST_ASSIGN_OR_RETURN(const auto store, StoreRun::Open(options));
  StoreSpeedOptions raw_options = options;
  raw_options.body_bytes = store->body_bytes();
  BALLAST_ASSIGN_OR_RETURN(const auto raw, RawFile::Open(raw_options));
  const uint64_t count = options.record_count;
  Cycle cycle(store->body_bytes(), options.queue_depth);
  // Blocks that were never written are faster to read and slower to write.
  BALLAST_RETURN_IF_ERROR(store->Fill(&cycle));
  BALLAST_RETURN_IF_ERROR(raw->RunCycle(count, &cycle));
  StoreSpeed speed;
  speed.bytes = 2 * count * store->body_bytes();
  speed.direct = raw->direct();
  std::vector<double> raw_s;
  std::vector<double> store_s;
  std::vector<double> checked_s;
  std::vector<double> commit_s;
  uint64_t version = 0;
  for (uint32_t round = 0; round < std::max(options.rounds, 1u); ++round) {
    BALLAST_ASSIGN_OR_RETURN(raw_s.emplace_back(), Timed([&] {
                               return raw->RunCycle(count, &cycle);
                             }));
    BALLAST_ASSIGN_OR_RETURN(store_s.emplace_back(), Timed([&] {
                               return store->RunCycle(
                                   version, /*checked=*/false, &cycle);
                             }));
    ++version;
    BALLAST_ASSIGN_OR_RETURN(checked_s.emplace_back(), Timed([&] {
                               return store->RunCycle(version, /*checked=*/true,
                                                      &cycle);
                             }));
    BALLAST_ASSIGN_OR_RETURN(commit_s.emplace_back(),
                             Timed([&] { return store->Commit(version); }));
    BALLAST_RETURN_IF_ERROR(store->Drop(version));
  }
  const auto gbps = [&speed](const std::vector<double>& seconds) {
    return static_cast<double>(speed.bytes) / Median(seconds) / 1e9;
  };
  speed.raw_gbps = gbps(raw_s);
  speed.store_gbps = gbps(store_s);
  speed.checked_gbps = gbps(checked_s);
  speed.commit_ms = Median(commit_s) * 1e3;
  speed.wrong = store->wrong();
  return speed;
}

}  // namespace

absl::StatusOr<StoreSpeed> MeasureStoreSpeed(const StoreSpeedOptions& options) {
  if (std::filesystem::exists(options.dir)) {
    return absl::AlreadyExistsError(
        absl::StrCat(options.dir, " exists; name a new folder to measure in"));
  }
  BALLAST_RETURN_IF_ERROR(MakeDirectories(options.dir));
  absl::StatusOr<StoreSpeed> speed = Measure(options);
  std::error_code error;
  std::filesystem::remove_all(options.dir, error);
  return speed;
}

}  // namespace ballast
