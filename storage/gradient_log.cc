// SPDX-License-Identifier: Apache-2.0
#include "storage/gradient_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "common/status_macros.h"
#include "storage/gradient_log_impl.h"
#include "storage/log_format.h"
#include "storage/record.h"

namespace ballast {
namespace {

constexpr uint64_t kBufferBytesMin = 64 << 10;

}  // namespace

GradientLogImpl::GradientLogImpl(const Options& options, std::string folder,
                                 std::unique_ptr<IoQueue> queue)
    : options_(options),
      disk_(options.disk),
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

absl::StatusOr<LogPosition> GradientLogImpl::Append(const GradientName& name,
                                                    const std::byte* payload,
                                                    uint64_t bytes, Done done) {
  auto transfer = std::make_unique<Transfer>();
  transfer->header.name = name;
  // One pointer for both directions; an append only reads through it.
  transfer->payload = const_cast<std::byte*>(payload);
  transfer->header.payload_bytes = bytes;
  transfer->done = std::move(done);
  return Enqueue(std::move(transfer));
}

absl::Status GradientLogImpl::AppendMark(const VoteMark& mark, Done done) {
  auto transfer = std::make_unique<Transfer>();
  transfer->header.kind = LogKind::kMark;
  transfer->header.name.timeline = mark.timeline;
  transfer->header.name.step = mark.step;
  transfer->mark = EncodeVoteMark(mark);
  transfer->payload = reinterpret_cast<std::byte*>(transfer->mark.data());
  transfer->header.payload_bytes = transfer->mark.size();
  transfer->done = std::move(done);
  return Enqueue(std::move(transfer)).status();
}

absl::StatusOr<LogPosition> GradientLogImpl::Enqueue(
    std::unique_ptr<Transfer> transfer) {
  LogHeader& header = transfer->header;
  transfer->write = true;
  header.run = options_.run;
  header.payload_hash = HashBytes(transfer->payload, header.payload_bytes);
  LogPosition position;
  {
    MutexLock lock(&mutex_);
    BALLAST_RETURN_IF_ERROR(failure_);
    const uint64_t record_bytes = transfer->record_bytes();
    BALLAST_RETURN_IF_ERROR(MakeRoom(record_bytes));
    const auto& [serial, owned] = *segments_.rbegin();
    Segment* segment = owned.get();
    position = {serial, segment->used_bytes, header.payload_bytes};
    header.segment = position.segment;
    header.offset = position.offset;
    header.synced_segment = synced_.segment;
    header.synced_offset = synced_.offset;
    header.previous_segment = segment->previous.segment;
    header.previous_end = segment->previous.offset;
    segment->used_bytes += record_bytes;
    segment->step_end = std::max(segment->step_end, header.name.step + 1);
    segment->dropped = false;
    ++segment->transfers;
    end_ = {serial, segment->used_bytes};
    if (options_.keep) {
      appending_.insert({position.segment, position.offset});
    }
    transfer->segment = segment;
    transfer->page = EncodeLogHeader(header);
    bytes_written_.fetch_add(record_bytes, std::memory_order_relaxed);
    waiting_.push_back(std::move(transfer));
  }
  Pump();
  return position;
}

void GradientLogImpl::Complete(Done done, absl::Status status) {
  // Completions run on the I/O thread, this one too.
  IoRequest request;
  request.done = [done = std::move(done), status = std::move(status)](
                     const absl::Status&) { done(status); };
  queue_->Submit(std::move(request));
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
  Complete(std::move(transfer->done),
           absl::DataLossError(
               absl::StrCat(SegmentPath(header.segment), " has no record of ",
                            header.payload_bytes, " bytes at ", header.offset,
                            " (wanted ", DescribeGradient(header.name), ")")));
}

// The next piece that may start; nullopt when nothing waits or no buffer is
// free for it.
std::optional<LogPiece> GradientLogImpl::NextPiece() {
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
  request.kind = transfer.write ? IoKind::kWrite : IoKind::kRead;
  request.file = transfer.segment->file.get();
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
    EndTransfer(*owned);
    owned->done(std::move(owned->status));
    if (owned->write && options_.keep) {
      PumpSync();
    }
  }
  Pump();
}

void GradientLogImpl::EndTransfer(const Transfer& transfer) {
  MutexLock lock(&mutex_);
  --transfer.segment->transfers;
  if (!transfer.write || !options_.keep) {
    return;
  }
  appending_.erase({transfer.header.segment, transfer.header.offset});
  transfer.segment->dirty = true;
  if (!transfer.status.ok() && failure_.ok()) {
    failure_ = absl::DataLossError(absl::StrCat(
        transfer.status.message(), "; the log has a hole there, so nothing is ",
        "voted from it again: restart the server"));
  }
}

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
  BALLAST_RETURN_IF_ERROR(options.disk->MakeDirectories(folder));
  IoQueue::Options queue_options;
  queue_options.depth = options.queue_depth;
  queue_options.use_io_uring = options.use_io_uring;
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<IoQueue> queue,
                           options.disk->StartQueue(queue_options));
  auto log =
      std::make_unique<GradientLogImpl>(options, folder, std::move(queue));
  BALLAST_RETURN_IF_ERROR(options.keep ? log->Recover() : log->TakeOver());
  return std::unique_ptr<GradientLog>(std::move(log));
}

}  // namespace ballast
