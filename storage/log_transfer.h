// SPDX-License-Identifier: Apache-2.0
// One append or read of the gradient log on its way: which bytes of a record
// lie in which buffer, and whether what was read is what was asked for. A part
// of GradientLog; others include storage/gradient_log.h.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "storage/disk.h"
#include "storage/file.h"
#include "storage/gradient_log.h"
#include "storage/log_format.h"
#include "storage/log_scan.h"
#include "storage/record.h"

namespace ballast {

struct LogSegment {
  std::unique_ptr<DiskFile> file;
  uint64_t bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t step_end = 0;   // Above the steps of its records.
  uint32_t transfers = 0;  // Appends, reads and syncs that are not done.
  bool dropped = false;    // Nobody needs its records.
  bool dirty = false;      // Written since the last sync began.
  LogPlace previous;       // The log's end when this segment was begun.
};

// One append or read. Owned by the queue of waiting transfers until its last
// piece is given out, then by its pieces.
struct LogTransfer {
  bool write = false;
  LogSegment* segment = nullptr;
  LogHeader header;  // As written, or as expected.
  std::string page;  // The header's page; of a read, what was found.
  std::byte* payload = nullptr;  // Of an append only read.
  std::string mark;              // The payload, of a mark.
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
struct LogPiece {
  LogTransfer* transfer = nullptr;
  uint64_t begin = 0;
  uint64_t bytes = 0;
  AlignedBuffer* buffer = nullptr;
};

// Copies between a buffer and the parts of the record that the piece covers.
void CopyPiece(const LogPiece& piece);

// What a read found against what was asked for.
absl::Status CheckRead(const LogTransfer& transfer);

}  // namespace ballast
