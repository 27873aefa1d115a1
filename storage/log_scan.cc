// SPDX-License-Identifier: Apache-2.0
#include "storage/log_scan.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/rule.h"
#include "common/status_macros.h"
#include "storage/file.h"
#include "storage/log_format.h"
#include "storage/record.h"

namespace ballast {
namespace {

// Read at once where every page is looked at.
constexpr uint64_t kWindowBytes = 64 << 10;

absl::string_view AsText(const std::byte* data, uint64_t bytes) {
  return {reinterpret_cast<const char*>(data), bytes};
}

std::string Where(const DiskFile& file, uint64_t offset) {
  return absl::StrCat(file.path(), " at ", offset);
}

// The headers of one segment that are whole and of this place.
class SegmentWalk {
 public:
  // `window` is scratch.
  SegmentWalk(const Hash128& run, uint64_t serial, const DiskFile& file,
              AlignedBuffer* window)
      : run_(run), serial_(serial), file_(file), window_(*window) {}

  absl::StatusOr<std::vector<LogHeader>> Run() {
    BALLAST_ASSIGN_OR_RETURN(const uint64_t file_bytes, file_.Bytes());
    bytes_ = file_bytes / kPageBytes * kPageBytes;
    std::vector<LogHeader> headers;
    bool searching = false;  // Behind a bad record: any page may hold the next.
    for (uint64_t at = 0; at < bytes_;) {
      BALLAST_ASSIGN_OR_RETURN(const auto header, HeaderAt(at, searching));
      searching = !header.has_value();
      at += header ? LogRecordBytes(header->payload_bytes) : kPageBytes;
      if (header) {
        headers.push_back(*header);
      }
    }
    return headers;
  }

 private:
  absl::StatusOr<std::optional<LogHeader>> HeaderAt(uint64_t at, bool ahead) {
    if (at < begin_ || at >= begin_ + filled_) {
      begin_ = at;
      filled_ = std::min(ahead ? kWindowBytes : kPageBytes, bytes_ - at);
      BALLAST_RETURN_IF_ERROR(
          file_.Read(at, window_.span().subspan(0, filled_)));
    }
    const absl::StatusOr<LogHeader> header =
        DecodeLogHeader(AsText(window_.data() + (at - begin_), kPageBytes), "");
    if (!header.ok() || header->run != run_ || header->offset != at ||
        header->payload_bytes > bytes_ ||
        LogRecordBytes(header->payload_bytes) > bytes_ - at) {
      return std::optional<LogHeader>();
    }
    if (BALLAST_RULE(kSegmentSerialChecked) && header->segment != serial_) {
      return std::optional<LogHeader>();  // Left by the file's former use.
    }
    return std::optional<LogHeader>(*header);
  }

  const Hash128& run_;
  const uint64_t serial_;
  const DiskFile& file_;
  AlignedBuffer& window_;
  uint64_t bytes_ = 0;
  uint64_t begin_ = 0;
  uint64_t filled_ = 0;
};

// A segment of the chain.
struct Link {
  uint64_t serial = 0;
  const DiskFile* file = nullptr;
  std::vector<LogHeader> headers;
  std::optional<uint64_t> end;  // Of its records, if another one follows.
};

class Scanner {
 public:
  Scanner(const Hash128& run,
          const std::map<uint64_t, std::unique_ptr<DiskFile>>& files)
      : run_(run), files_(files), window_(kWindowBytes) {}

  absl::StatusOr<LogScan> Run() {
    BALLAST_RETURN_IF_ERROR(FindChain());
    for (const Link& link : chain_) {
      BALLAST_ASSIGN_OR_RETURN(const bool whole, TakeSegment(link));
      if (!whole) {
        break;
      }
    }
    BALLAST_RETURN_IF_ERROR(CheckMarks());
    return std::move(scan_);
  }

 private:
  // From the newest segment with a record back to the oldest; chain_ ascends.
  absl::Status FindChain() {
    std::optional<LogPlace> end;  // What the segment after it says.
    for (auto it = files_.rbegin(); it != files_.rend(); ++it) {
      if (end && it->first > end->segment) {
        continue;  // Given up by a later life.
      }
      if (end && it->first < end->segment) {
        break;  // What is older was dropped.
      }
      Link link = {it->first, it->second.get(), {}, {}};
      BALLAST_ASSIGN_OR_RETURN(
          link.headers,
          SegmentWalk(run_, it->first, *link.file, &window_).Run());
      if (end) {
        link.end = end->offset;
        std::erase_if(link.headers, [&end](const LogHeader& header) {
          return header.offset >= end->offset;
        });
      }
      if (link.headers.empty()) {
        if (end) {
          // Nothing of it has reached the disk, so what follows it is a tail,
          // and its way back is lost: the next older file is the log's end.
          BALLAST_RETURN_IF_ERROR(
              Bad(*link.file, {link.serial, 0}, "no whole record"));
          for (const Link& tail : chain_) {
            CountTail(tail, 0);
          }
          chain_.clear();
          end.reset();
        }
        continue;
      }
      for (const LogHeader& header : link.headers) {
        synced_ =
            std::max(synced_, {header.synced_segment, header.synced_offset});
      }
      const LogHeader& any = link.headers.front();
      end = LogPlace{any.previous_segment, any.previous_end};
      chain_.push_back(std::move(link));
    }
    std::reverse(chain_.begin(), chain_.end());
    return absl::OkStatus();
  }

  // Where a record should be and is not: damage, or the end of the log.
  absl::Status Bad(const DiskFile& file, const LogPlace& place,
                   absl::string_view why) const {
    if (place < synced_) {
      return absl::DataLossError(absl::StrCat(
          Where(file, place.offset), ": ", why, ", though the log up to ",
          "segment ", synced_.segment, " offset ", synced_.offset,
          " was synced; restore the server's data directory or resume from a ",
          "checkpoint"));
    }
    return absl::OkStatus();
  }

  // True when the segment's records are whole up to its end.
  absl::StatusOr<bool> TakeSegment(const Link& link) {
    LogPlace next = {link.serial, 0};
    for (const LogHeader& header : link.headers) {
      if (header.offset != next.offset) {
        BALLAST_RETURN_IF_ERROR(Bad(*link.file, next, "no whole record"));
        CountTail(link, header.offset);
        return false;
      }
      BALLAST_ASSIGN_OR_RETURN(const bool whole, TakeRecord(link, header));
      if (!whole) {
        CountTail(link, header.offset);
        return false;
      }
      next.offset += LogRecordBytes(header.payload_bytes);
      LogScan::Segment& segment = scan_.segments[link.serial];
      segment.used_bytes = next.offset;
      segment.step_end = std::max(segment.step_end, header.name.step + 1);
      scan_.end = next;
    }
    if (!link.end || next.offset != *link.end) {
      BALLAST_RETURN_IF_ERROR(Bad(*link.file, next, "no whole record"));
    }
    return link.end == next.offset;
  }

  // False when the record is not whole, and need not be.
  absl::StatusOr<bool> TakeRecord(const Link& link, const LogHeader& header) {
    const LogPlace place = {link.serial, header.offset};
    const bool mark = header.kind == LogKind::kMark;
    std::optional<AlignedBuffer> record;
    // Gradients below the line are checked when they are read.
    if (mark || place >= synced_) {
      record.emplace(LogRecordBytes(header.payload_bytes));
      BALLAST_RETURN_IF_ERROR(link.file->Read(header.offset, record->span()));
      if (HashBytes(record->data() + kPageBytes, header.payload_bytes) !=
          header.payload_hash) {
        BALLAST_RETURN_IF_ERROR(
            Bad(*link.file, place, "the payload does not match its checksum"));
        return false;
      }
    }
    const GradientName& name = header.name;
    if (mark) {
      BALLAST_ASSIGN_OR_RETURN(
          VoteMark found,
          DecodeVoteMark(
              AsText(record->data() + kPageBytes, header.payload_bytes),
              name.timeline, name.step, Where(*link.file, header.offset)));
      scan_.contents.marks.push_back(std::move(found));
    } else if (name.use == kAllUses) {
      scan_.contents.gradients[{name.timeline, name.step, name.chunk}] = {
          name, {link.serial, header.offset, header.payload_bytes}};
      complete_.insert(place);
    }
    return true;
  }

  void CountTail(const Link& link, uint64_t from) {
    for (const LogHeader& header : link.headers) {
      if (header.offset >= from) {
        scan_.contents.tail_bytes += LogRecordBytes(header.payload_bytes);
      }
    }
  }

  // A mark stands behind the gradients that it names, so they are there.
  absl::Status CheckMarks() const {
    for (const VoteMark& mark : scan_.contents.marks) {
      for (const auto& [chunk, position] : mark.gradients) {
        if (position.segment < chain_.front().serial ||
            complete_.count({position.segment, position.offset}) != 0) {
          continue;
        }
        return absl::DataLossError(absl::StrCat(
            "the vote of timeline ", mark.timeline, " step ", mark.step, " in ",
            chain_.front().file->path(), " and after names the gradient of ",
            "chunk ", chunk, " in segment ", position.segment, " at ",
            position.offset, ", where none is"));
      }
    }
    return absl::OkStatus();
  }

  const Hash128& run_;
  const std::map<uint64_t, std::unique_ptr<DiskFile>>& files_;
  AlignedBuffer window_;
  std::vector<Link> chain_;
  LogPlace synced_;
  std::set<LogPlace> complete_;  // Gradients.
  LogScan scan_;
};

}  // namespace

absl::StatusOr<LogScan> ScanLog(
    const Hash128& run,
    const std::map<uint64_t, std::unique_ptr<DiskFile>>& files) {
  return Scanner(run, files).Run();
}

}  // namespace ballast
