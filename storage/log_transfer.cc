// SPDX-License-Identifier: Apache-2.0
#include "storage/log_transfer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "common/status_macros.h"

namespace ballast {

void CopyPiece(const LogPiece& piece) {
  LogTransfer& transfer = *piece.transfer;
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

absl::Status CheckRead(const LogTransfer& transfer) {
  const LogHeader& wanted = transfer.header;
  const std::string where =
      absl::StrCat(transfer.segment->file->path(), " at ", wanted.offset,
                   " (wanted ", DescribeGradient(wanted.name), ")");
  BALLAST_ASSIGN_OR_RETURN(const LogHeader found,
                           DecodeLogHeader(transfer.page, where));
  if (found.name != wanted.name || found.kind != wanted.kind) {
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

}  // namespace ballast
