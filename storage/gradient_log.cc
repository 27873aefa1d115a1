// SPDX-License-Identifier: Apache-2.0
#include "storage/gradient_log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/check.h"
#include "common/mutex.h"
#include "common/status_macros.h"
#include "storage/file.h"
#include "storage/io_queue.h"
#include "storage/log_format.h"
#include "storage/record.h"

namespace ballast {
namespace {

constexpr uint64_t kBufferBytesMin = 64 << 10;
constexpr absl::string_view kSegmentPrefix = "segment-";

std::string SegmentPath(const std::string& folder, uint64_t serial) {
  return absl::StrCat(folder, "/", kSegmentPrefix,
                      absl::Hex(serial, absl::kZeroPad16));
}

std::optional<uint64_t> SegmentSerial(absl::string_view name) {
  uint64_t serial = 0;
  if (!absl::ConsumePrefix(&name, kSegmentPrefix) || name.size() != 16 ||
      !absl::SimpleHexAtoi(name, &serial)) {
    return std::nullopt;
  }
  return serial;
}

struct Segment {
  StorageFile file;
  uint64_t bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t step_end = 0;   // Above the steps of its records.
  uint32_t transfers = 0;  // Appends and reads that are not done.
};

// One append or read. Owned by the queue of waiting transfers until its last
// piece is given out, then by its pieces.
struct Transfer {
  bool write = false;
  Segment* segment = nullptr;
  LogHeader header;  // As written, or as expected.
  std::string page;  // The header's page; of a read, what was found.
  std::byte* payload = nullptr;  // Of an append only read.
  uint64_t next = 0;             // Bytes of the record that pieces cover.
  uint32_t pieces = 0;           // In flight.
  absl::Status status;
  GradientLog::Done done;

  uint64_t record_bytes() const { return LogRecordBytes(header.payload_bytes); }
  bool aligned() const {
    return reinterpret_cast<uintptr_t>(payload) % kPageBytes == 0;
  }
};

// Bytes [begin, begin + bytes) of a transfer's record: through a bounce buffer,
// or straight from or to the payload.
struct Piece {
  Transfer* transfer = nullptr;
  uint64_t begin = 0;
  uint64_t bytes = 0;
  AlignedBuffer* buffer = nullptr;
};

// Copies between a buffer and the parts of the record that the piece covers.
void CopyPiece(const Piece& piece) {
  Transfer& transfer = *piece.transfer;
  std::byte* buffer = piece.buffer->data();
  uint64_t from = piece.begin;
  if (from == 0) {
    if (transfer.write) {
      std::memcpy(buffer, transfer.page.data(), kPageBytes);
    } else {
      std::memcpy(transfer.page.data(), buffer, kPageBytes);
    }
    buffer += kPageBytes;
    from = kPageBytes;
  }
  const uint64_t end = piece.begin + piece.bytes;
  const uint64_t payload_end =
      std::min(end, kPageBytes + transfer.header.payload_bytes);
  const uint64_t bytes = payload_end > from ? payload_end - from : 0;
  if (bytes > 0) {
    std::byte* payload = transfer.payload + (from - kPageBytes);
    transfer.write ? std::memcpy(buffer, payload, bytes)
                   : std::memcpy(payload, buffer, bytes);
  }
  if (transfer.write && end > from + bytes) {
    std::memset(buffer + bytes, 0, end - from - bytes);
  }
}

// What a read found against what was asked for.
absl::Status CheckRead(const Transfer& transfer) {
  const LogHeader& wanted = transfer.header;
  const std::string where =
      absl::StrCat(transfer.segment->file.path, " at ", wanted.offset,
                   " (wanted ", DescribeGradient(wanted.name), ")");
  BALLAST_ASSIGN_OR_RETURN(const LogHeader found,
                           DecodeLogHeader(transfer.page, where));
  if (found.name != wanted.name) {
    return absl::DataLossError(
        absl::StrCat(where, " holds ", DescribeGradient(found.name)));
  }
  if (found.run != wanted.run || found.segment != wanted.segment ||
      found.offset != wanted.offset ||
      found.payload_bytes != wanted.payload_bytes) {
    return absl::DataLossError(absl::StrCat(
        where, " holds a record of another run, place or length: run ",
        HashHex(found.run), " segment ", found.segment, " offset ",
        found.offset, " bytes ", found.payload_bytes));
  }
  if (HashBytes(transfer.payload, wanted.payload_bytes) != found.payload_hash) {
    return absl::DataLossError(
        absl::StrCat(where, ": the payload does not match its checksum"));
  }
  return absl::OkStatus();
}

class GradientLogImpl final : public GradientLog {
 public:
  GradientLogImpl(const Options& options, std::string folder,
                  std::unique_ptr<IoQueue> queue)
      : options_(options),
        segment_bytes_(RoundUp(options.segment_bytes, kPageBytes)),
        // One buffer for each request in flight, if that leaves them useful.
        slot_bytes_(
            std::max<uint64_t>(kBufferBytesMin / 4,
                               options.buffer_bytes /
                                   std::max<uint32_t>(options.queue_depth, 2)) /
            kPageBytes * kPageBytes),
        folder_(std::move(folder)),
        queue_(std::move(queue)) {
    for (uint64_t at = 0; at + slot_bytes_ <= options.buffer_bytes;
         at += slot_bytes_) {
      buffers_.emplace_back(slot_bytes_);
    }
    for (AlignedBuffer& buffer : buffers_) {
      free_buffers_.push_back(&buffer);
    }
  }

  absl::Status TakeOver();

  absl::StatusOr<LogPosition> Append(const GradientName& name,
                                     const std::byte* payload, uint64_t bytes,
                                     Done done) override;
  void Read(const GradientName& name, const LogPosition& position,
            std::byte* payload, Done done) override;
  void DropThrough(uint64_t step) override {
    MutexLock lock(&mutex_);
    dropped_end_ = std::max(dropped_end_, step + 1);
  }
  GradientLogStats stats() const override {
    return {bytes_written_.load(std::memory_order_relaxed),
            bytes_read_.load(std::memory_order_relaxed)};
  }

 private:
  bool IsSpare(const Segment& segment) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return segment.step_end <= dropped_end_ && segment.transfers == 0;
  }
  absl::Status MakeRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::unique_ptr<Segment>> NewSegment(uint64_t serial,
                                                      uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<Piece> NextPiece() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Pump();
  void Start(const Piece& piece);
  void Finish(const Piece& piece, absl::Status status);

  const Options options_;
  const uint64_t segment_bytes_;
  const uint64_t slot_bytes_;
  const std::string folder_;

  // Held across the making of a segment: the place of every later record
  // depends on it, and it happens once in segment_bytes.
  mutable Mutex mutex_;
  std::map<uint64_t, std::unique_ptr<Segment>> segments_
      ABSL_GUARDED_BY(mutex_);  // By serial; the last takes appends.
  bool open_ ABSL_GUARDED_BY(mutex_) = false;  // Whether it does already.
  uint64_t dropped_end_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::unique_ptr<Transfer>> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<AlignedBuffer*> free_buffers_ ABSL_GUARDED_BY(mutex_);
  std::vector<AlignedBuffer> buffers_;

  // Plain counters: no other memory hangs on them.
  std::atomic<uint64_t> bytes_written_ = 0;
  std::atomic<uint64_t> bytes_read_ = 0;

  // Last: its completions use what stands above.
  const std::unique_ptr<IoQueue> queue_;
};

// Keeps the newest segment of an earlier life, so that its number is not
// forgotten, and removes the others.
absl::Status GradientLogImpl::TakeOver() {
  MutexLock lock(&mutex_);
  std::error_code error;
  std::vector<uint64_t> serials;
  for (const auto& entry :
       std::filesystem::directory_iterator(folder_, error)) {
    if (const auto serial = SegmentSerial(entry.path().filename().string())) {
      serials.push_back(*serial);
    }
  }
  if (error) {
    return ErrnoError(error.value(), absl::StrCat("cannot list ", folder_));
  }
  if (serials.empty()) {
    return absl::OkStatus();
  }
  std::sort(serials.begin(), serials.end());
  for (const uint64_t serial : serials) {
    const std::string path = SegmentPath(folder_, serial);
    if (serial != serials.back() && unlink(path.c_str()) != 0) {
      return ErrnoError(errno, absl::StrCat("cannot remove ", path));
    }
  }
  auto segment = std::make_unique<Segment>();
  BALLAST_ASSIGN_OR_RETURN(
      segment->file,
      OpenDirect(SegmentPath(folder_, serials.back()), /*create=*/false));
  BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, FileBytes(segment->file));
  segment->bytes = bytes / kPageBytes * kPageBytes;
  segments_[serials.back()] = std::move(segment);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Segment>> GradientLogImpl::NewSegment(
    uint64_t serial, uint64_t bytes) {
  const std::string path = SegmentPath(folder_, serial);
  for (auto it = segments_.begin(); it != segments_.end(); ++it) {
    if (!IsSpare(*it->second) || it->second->bytes < bytes) {
      continue;
    }
    if (rename(it->second->file.path.c_str(), path.c_str()) != 0) {
      return ErrnoError(errno,
                        absl::StrCat("cannot rename ", it->second->file.path));
    }
    std::unique_ptr<Segment> segment = std::move(it->second);
    segments_.erase(it);
    segment->file.path = path;
    segment->used_bytes = 0;
    segment->step_end = 0;
    return segment;
  }
  auto segment = std::make_unique<Segment>();
  BALLAST_ASSIGN_OR_RETURN(segment->file, OpenDirect(path, /*create=*/true));
  segment->bytes = std::max(segment_bytes_, bytes);
  const absl::Status status = Preallocate(segment->file, 0, segment->bytes);
  if (!status.ok()) {
    unlink(path.c_str());
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
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<Segment> segment,
                           NewSegment(serial, bytes));
  segments_[serial] = std::move(segment);
  open_ = true;
  // A spare that is too short for the usual record (of a creation cut short)
  // would lie around for ever.
  for (auto it = segments_.begin(); it->first != serial;) {
    if (IsSpare(*it->second) && it->second->bytes < segment_bytes_) {
      unlink(it->second->file.path.c_str());
      it = segments_.erase(it);
    } else {
      ++it;
    }
  }
  return SyncDirectory(folder_);
}

absl::StatusOr<LogPosition> GradientLogImpl::Append(const GradientName& name,
                                                    const std::byte* payload,
                                                    uint64_t bytes, Done done) {
  auto transfer = std::make_unique<Transfer>();
  transfer->write = true;
  // One pointer for both directions; an append only reads through it.
  transfer->payload = const_cast<std::byte*>(payload);
  transfer->done = std::move(done);
  LogHeader& header = transfer->header;
  header.run = options_.run;
  header.name = name;
  header.payload_bytes = bytes;
  header.payload_hash = HashBytes(payload, bytes);
  LogPosition position;
  {
    MutexLock lock(&mutex_);
    const uint64_t record_bytes = transfer->record_bytes();
    BALLAST_RETURN_IF_ERROR(MakeRoom(record_bytes));
    Segment* segment = segments_.rbegin()->second.get();
    position = {segments_.rbegin()->first, segment->used_bytes, bytes};
    header.segment = position.segment;
    header.offset = position.offset;
    segment->used_bytes += record_bytes;
    segment->step_end = std::max(segment->step_end, name.step + 1);
    ++segment->transfers;
    transfer->segment = segment;
    transfer->page = EncodeLogHeader(header);
    bytes_written_.fetch_add(record_bytes, std::memory_order_relaxed);
    waiting_.push_back(std::move(transfer));
  }
  Pump();
  return position;
}

void GradientLogImpl::Read(const GradientName& name,
                           const LogPosition& position, std::byte* payload,
                           Done done) {
  auto transfer = std::make_unique<Transfer>();
  LogHeader& header = transfer->header;
  header.run = options_.run;
  header.name = name;
  header.segment = position.segment;
  header.offset = position.offset;
  header.payload_bytes = position.bytes;
  transfer->page.resize(kPageBytes);
  transfer->payload = payload;
  transfer->done = std::move(done);
  {
    MutexLock lock(&mutex_);
    const auto it = segments_.find(position.segment);
    const uint64_t used = it == segments_.end() ? 0 : it->second->used_bytes;
    // The first comparison keeps the sums in the others from overflowing.
    if (position.bytes < used && transfer->record_bytes() <= used &&
        position.offset <= used - transfer->record_bytes() &&
        position.offset % kPageBytes == 0) {
      transfer->segment = it->second.get();
      ++transfer->segment->transfers;
      bytes_read_.fetch_add(transfer->record_bytes(),
                            std::memory_order_relaxed);
      waiting_.push_back(std::move(transfer));
    }
  }
  if (transfer == nullptr) {
    Pump();
    return;
  }
  // Completions run on the I/O thread, this one too.
  IoRequest request;
  request.done = [done = std::move(transfer->done), header,
                  this](const absl::Status&) {
    done(absl::DataLossError(
        absl::StrCat(SegmentPath(folder_, header.segment), " has no record of ",
                     header.payload_bytes, " bytes at ", header.offset,
                     " (wanted ", DescribeGradient(header.name), ")")));
  };
  queue_->Submit(std::move(request));
}

// The next piece that may start; nullopt when nothing waits or no buffer is
// free for it.
std::optional<Piece> GradientLogImpl::NextPiece() {
  if (waiting_.empty()) {
    return std::nullopt;
  }
  Transfer* transfer = waiting_.front().get();
  const uint64_t rest = transfer->record_bytes() - transfer->next;
  const uint64_t whole_pages =
      transfer->header.payload_bytes / kPageBytes * kPageBytes;
  Piece piece = {transfer, transfer->next, 0, nullptr};
  const bool past_buffers = transfer->aligned() && whole_pages > 0;
  if (past_buffers && transfer->next == kPageBytes) {
    piece.bytes = whole_pages;
  } else if (free_buffers_.empty()) {
    return std::nullopt;
  } else {
    piece.buffer = free_buffers_.back();
    free_buffers_.pop_back();
    piece.bytes = past_buffers ? kPageBytes : std::min(rest, slot_bytes_);
  }
  transfer->next += piece.bytes;
  ++transfer->pieces;
  if (transfer->next == transfer->record_bytes()) {
    waiting_.front().release();  // Now owned by its pieces.
    waiting_.pop_front();
  }
  return piece;
}

void GradientLogImpl::Pump() {
  while (true) {
    std::optional<Piece> piece;
    {
      MutexLock lock(&mutex_);
      piece = NextPiece();
    }
    if (!piece) {
      return;
    }
    Start(*piece);
  }
}

void GradientLogImpl::Start(const Piece& piece) {
  const Transfer& transfer = *piece.transfer;
  if (transfer.write && piece.buffer != nullptr) {
    CopyPiece(piece);
  }
  IoRequest request;
  request.write = transfer.write;
  request.file = &transfer.segment->file;
  request.offset = transfer.header.offset + piece.begin;
  request.data = piece.buffer != nullptr
                     ? piece.buffer->data()
                     : transfer.payload + (piece.begin - kPageBytes);
  request.bytes = piece.bytes;
  request.done = [this, piece](absl::Status status) {
    Finish(piece, std::move(status));
  };
  queue_->Submit(std::move(request));
}

void GradientLogImpl::Finish(const Piece& piece, absl::Status status) {
  Transfer* transfer = piece.transfer;
  if (status.ok() && !transfer->write && piece.buffer != nullptr) {
    CopyPiece(piece);
  }
  bool last = false;
  {
    MutexLock lock(&mutex_);
    if (piece.buffer != nullptr) {
      free_buffers_.push_back(piece.buffer);
    }
    transfer->status.Update(std::move(status));
    last =
        --transfer->pieces == 0 && transfer->next == transfer->record_bytes();
  }
  if (last) {
    const std::unique_ptr<Transfer> owned(transfer);
    if (owned->status.ok() && !owned->write) {
      owned->status = CheckRead(*owned);
    }
    {
      MutexLock lock(&mutex_);
      --owned->segment->transfers;
    }
    owned->done(std::move(owned->status));
  }
  Pump();
}

}  // namespace

absl::StatusOr<std::unique_ptr<GradientLog>> GradientLog::Open(
    const Options& options) {
  if (options.buffer_bytes < kBufferBytesMin) {
    return absl::InvalidArgumentError(
        absl::StrCat("the gradient log has ", options.buffer_bytes,
                     " bytes of buffers; want at least ", kBufferBytesMin));
  }
  if (options.segment_bytes == 0) {
    return absl::InvalidArgumentError(
        "the gradient log has segments of 0 bytes; want some MiB");
  }
  const std::string folder = options.dir + "/log";
  BALLAST_RETURN_IF_ERROR(MakeDirectories(folder));
  IoQueue::Options queue_options;
  queue_options.depth = options.queue_depth;
  queue_options.use_io_uring = options.use_io_uring;
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<IoQueue> queue,
                           IoQueue::Start(queue_options));
  auto log =
      std::make_unique<GradientLogImpl>(options, folder, std::move(queue));
  BALLAST_RETURN_IF_ERROR(log->TakeOver());
  return std::unique_ptr<GradientLog>(std::move(log));
}

}  // namespace ballast
