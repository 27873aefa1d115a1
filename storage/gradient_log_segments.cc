// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/check.h"
#include "common/log.h"
#include "common/rule.h"
#include "common/status_macros.h"
#include "storage/gradient_log_impl.h"
#include "storage/record.h"

namespace ballast {
namespace {

constexpr absl::string_view kSegmentPrefix = "segment-";

std::optional<uint64_t> SegmentSerial(absl::string_view name) {
  uint64_t serial = 0;
  if (!absl::ConsumePrefix(&name, kSegmentPrefix) || name.size() != 16 ||
      !absl::SimpleHexAtoi(name, &serial)) {
    return std::nullopt;
  }
  return serial;
}

}  // namespace

std::string GradientLogImpl::SegmentPath(uint64_t serial) const {
  return absl::StrCat(folder_, "/", kSegmentPrefix,
                      absl::Hex(serial, absl::kZeroPad16));
}

absl::StatusOr<std::map<uint64_t, std::unique_ptr<DiskFile>>>
GradientLogImpl::OpenSegments() {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           disk_->List(folder_));
  std::map<uint64_t, std::unique_ptr<DiskFile>> files;
  for (const std::string& name : names) {
    if (const auto serial = SegmentSerial(name)) {
      BALLAST_ASSIGN_OR_RETURN(files[*serial],
                               disk_->OpenDirect(SegmentPath(*serial),
                                                 /*create=*/false));
    }
  }
  return files;
}

// Keeps the newest segment of an earlier life, so that its number is not
// forgotten, and removes the others.
absl::Status GradientLogImpl::TakeOver() {
  MutexLock lock(&mutex_);
  BALLAST_ASSIGN_OR_RETURN(auto files, OpenSegments());
  for (auto& [serial, file] : files) {
    if (serial != files.rbegin()->first) {
      BALLAST_RETURN_IF_ERROR(disk_->Unlink(file->path()));
      continue;
    }
    auto segment = std::make_unique<Segment>();
    BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, file->Bytes());
    segment->bytes = bytes / kPageBytes * kPageBytes;
    segment->file = std::move(file);
    segment->dropped = true;
    segments_[serial] = std::move(segment);
  }
  return absl::OkStatus();
}

// What an earlier life wrote may still be in the page cache alone: it is synced
// before anything of it is believed.
absl::Status GradientLogImpl::Recover() {
  MutexLock lock(&mutex_);
  BALLAST_ASSIGN_OR_RETURN(auto files, OpenSegments());
  if (BALLAST_RULE(kSyncOnOpen)) {
    // Their names are durable: that comes before their first record.
    for (const auto& [serial, file] : files) {
      BALLAST_RETURN_IF_ERROR(file->Sync());
    }
  }
  BALLAST_ASSIGN_OR_RETURN(LogScan scan, ScanLog(options_.run, files));
  contents_ = std::move(scan.contents);
  end_ = synced_ = scan.end;
  // What is given up goes newest first, each for sure before the next: a later
  // scan that met a segment without the one before it would take that for
  // dropped, and everything older with it.
  for (auto it = files.rbegin(); it != files.rend(); ++it) {
    if (scan.segments.count(it->first) == 0) {
      BALLAST_RETURN_IF_ERROR(disk_->Unlink(it->second->path()));
      BALLAST_RETURN_IF_ERROR(disk_->SyncDirectory(folder_));
    }
  }
  for (const auto& [serial, kept] : scan.segments) {
    auto segment = std::make_unique<Segment>();
    segment->file = std::move(files.at(serial));
    BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, segment->file->Bytes());
    segment->bytes = bytes / kPageBytes * kPageBytes;
    segment->used_bytes = kept.used_bytes;
    segment->step_end = kept.step_end;
    segments_[serial] = std::move(segment);
  }
  if (!scan.segments.empty()) {
    LogEvent(Severity::kInfo, "gradient_log_scanned",
             {{"path", folder_},
              {"segments", scan.segments.size()},
              {"gradients", contents_.gradients.size()},
              {"marks", contents_.marks.size()},
              {"tail_bytes", contents_.tail_bytes}});
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LogSegment>> GradientLogImpl::NewSegment(
    uint64_t serial, uint64_t bytes) {
  const std::string path = SegmentPath(serial);
  for (auto it = segments_.begin(); it != segments_.end(); ++it) {
    if (!IsSpare(*it->second) || it->second->bytes < bytes) {
      continue;
    }
    BALLAST_RETURN_IF_ERROR(disk_->Rename(it->second->file->path(), path));
    std::unique_ptr<Segment> segment = std::move(it->second);
    segments_.erase(it);
    segment->file->set_path(path);
    segment->used_bytes = 0;
    segment->step_end = 0;
    return segment;
  }
  auto segment = std::make_unique<Segment>();
  segment->dropped = true;
  BALLAST_ASSIGN_OR_RETURN(segment->file,
                           disk_->OpenDirect(path, /*create=*/true));
  segment->bytes = std::max(segment_bytes_, bytes);
  const absl::Status status = segment->file->Preallocate(0, segment->bytes);
  if (!status.ok()) {
    disk_->Unlink(path).IgnoreError();  // The first error says more.
    return status;
  }
  return segment;
}

absl::Status GradientLogImpl::MakeRoom(uint64_t bytes) {
  if (open_) {
    const Segment& last = *segments_.rbegin()->second;
    if (bytes <= last.bytes - last.used_bytes) {
      return absl::OkStatus();
    }
  }
  const uint64_t serial = segments_.empty() ? 1 : segments_.rbegin()->first + 1;
  open_ = false;  // If what follows fails, the next append tries again.
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<Segment> fresh,
                           NewSegment(serial, bytes));
  Segment* segment = fresh.get();
  segments_[serial] = std::move(fresh);  // A spare until its name is durable.
  // A spare that is too short for the usual record (of a creation cut short)
  // would lie around for ever.
  for (auto it = segments_.begin(); it->first != serial;) {
    if (IsSpare(*it->second) && it->second->bytes < segment_bytes_) {
      disk_->Unlink(it->second->file->path()).IgnoreError();  // Only space.
      it = segments_.erase(it);
    } else {
      ++it;
    }
  }
  BALLAST_RETURN_IF_ERROR(disk_->SyncDirectory(folder_));
  segment->dropped = false;
  segment->previous = end_;
  open_ = true;
  return absl::OkStatus();
}

void GradientLogImpl::Sync(Done done) {
  BALLAST_CHECK(options_.keep);
  {
    MutexLock lock(&mutex_);
    waiters_.push_back({end_, std::move(done)});
  }
  PumpSync();
}

std::vector<GradientLogImpl::Waiter> GradientLogImpl::TakeServed() {
  std::vector<Waiter> served;
  std::vector<Waiter> rest;
  for (Waiter& waiter : waiters_) {
    const bool ends = !failure_.ok() || waiter.reach <= synced_;
    (ends ? served : rest).push_back(std::move(waiter));
  }
  waiters_ = std::move(rest);
  return served;
}

void GradientLogImpl::PumpSync() {
  std::vector<Segment*> files;
  std::vector<Waiter> served;
  absl::Status failure;
  {
    MutexLock lock(&mutex_);
    if (sync_files_ > 0) {
      return;  // Its end begins the next one.
    }
    served = TakeServed();
    failure = failure_;
    // Everything before this place is written.
    const LogPlace written = appending_.empty() ? end_ : *appending_.begin();
    const bool wanted = std::any_of(
        waiters_.begin(), waiters_.end(),
        [&](const Waiter& waiter) { return waiter.reach <= written; });
    if (wanted) {
      for (const auto& [serial, segment] : segments_) {
        if (segment->dirty) {
          segment->dirty = false;
          ++segment->transfers;
          files.push_back(segment.get());
        }
      }
      syncing_ = written;
      sync_files_ = static_cast<uint32_t>(files.size());
      // What is not synced and not dirty has been dropped.
      if (files.empty()) {
        synced_ = std::max(synced_, syncing_);
        std::vector<Waiter> more = TakeServed();
        std::move(more.begin(), more.end(), std::back_inserter(served));
      }
    }
  }
  for (Segment* segment : files) {
    IoRequest request;
    request.kind = IoKind::kSync;
    request.file = segment->file.get();
    request.done = [this, segment](absl::Status status) {
      FinishSync(segment, std::move(status));
    };
    queue_->Submit(std::move(request));
  }
  for (Waiter& waiter : served) {
    Complete(std::move(waiter.done), failure);
  }
}

void GradientLogImpl::FinishSync(Segment* segment, absl::Status status) {
  std::vector<Waiter> served;
  absl::Status failure;
  {
    MutexLock lock(&mutex_);
    --segment->transfers;
    if (!status.ok() && failure_.ok()) {
      // The kernel reports a lost write once and then forgets it.
      failure_ = absl::DataLossError(absl::StrCat(
          status.message(), "; nothing is voted from this log again: restart ",
          "the server"));
    }
    if (--sync_files_ == 0 && failure_.ok()) {
      synced_ = std::max(synced_, syncing_);
    }
    syncs_.fetch_add(1, std::memory_order_relaxed);
    served = TakeServed();
    failure = failure_;
  }
  for (Waiter& waiter : served) {
    waiter.done(failure);
  }
  PumpSync();
}

void GradientLogImpl::DropThrough(uint64_t step) {
  MutexLock lock(&mutex_);
  for (const auto& [serial, segment] : segments_) {
    if (segment->step_end == 0 || segment->step_end - 1 <= step) {
      segment->dropped = true;
    } else if (options_.keep) {
      break;  // Without a gap, a recovery can walk what is left.
    }
  }
}

uint64_t GradientLogImpl::bytes() const {
  MutexLock lock(&mutex_);
  uint64_t bytes = 0;
  for (const auto& [serial, segment] : segments_) {
    bytes += segment->dropped ? 0 : segment->used_bytes;
  }
  return bytes;
}

}  // namespace ballast
