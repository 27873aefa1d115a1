// SPDX-License-Identifier: Apache-2.0
#include "storage/checkpoint_index.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/hash.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

// Entries in one value: some 36 KiB, so that reading the index stays within
// its small cache.
constexpr uint64_t kEntriesPerPart = 1024;
constexpr uint64_t kEntryBytes = 36;
// Bases read at once.
constexpr uint64_t kBasesPerRange = 1024;

std::string HeadKey(const StoredCheckpoint& checkpoint) {
  return absl::StrCat("checkpoint/",
                      absl::Hex(checkpoint.timeline, absl::kZeroPad16), "/",
                      absl::Hex(checkpoint.step, absl::kZeroPad16));
}

std::string PartKey(const StoredCheckpoint& checkpoint, uint64_t part) {
  return absl::StrCat(HeadKey(checkpoint), "/",
                      absl::Hex(part, absl::kZeroPad8));
}

uint64_t PartCount(uint64_t entries) {
  return (entries + kEntriesPerPart - 1) / kEntriesPerPart;
}

std::string BaseKey(uint32_t chunk) {
  return absl::StrCat("base/", absl::Hex(chunk, absl::kZeroPad8));
}

void PutEntry(const CheckpointEntry& entry, ByteWriter* writer) {
  writer->Put(entry.chunk);
  writer->Put(entry.version);
  writer->Put(entry.timeline);
  writer->Put(entry.extent.offset);
  writer->Put(entry.extent.bytes);
}

CheckpointEntry GetEntry(ByteReader* reader) {
  CheckpointEntry entry;
  entry.chunk = reader->Get<uint32_t>();
  entry.version = reader->Get<uint64_t>();
  entry.timeline = reader->Get<uint64_t>();
  entry.extent.offset = reader->Get<uint64_t>();
  entry.extent.bytes = reader->Get<uint64_t>();
  return entry;
}

std::string EncodePart(const StoredCheckpoint& checkpoint, uint64_t part) {
  ByteWriter writer;
  const uint64_t end = std::min<uint64_t>((part + 1) * kEntriesPerPart,
                                          checkpoint.entries.size());
  for (uint64_t i = part * kEntriesPerPart; i < end; ++i) {
    PutEntry(checkpoint.entries[i], &writer);
  }
  return writer.Take();
}

bool DecodePart(absl::string_view value, StoredCheckpoint* checkpoint) {
  if (value.size() % kEntryBytes != 0) {
    return false;
  }
  ByteReader reader(value);
  while (reader.remaining() > 0) {
    checkpoint->entries.push_back(GetEntry(&reader));
  }
  return true;
}

}  // namespace

absl::StatusOr<std::vector<StoredCheckpoint>> ReadCheckpoints(
    StateStore* store) {
  std::vector<StoredCheckpoint> checkpoints;
  std::string from = "checkpoint/";
  while (true) {
    // '0' follows '/', so this is the end of the folder of keys.
    BALLAST_ASSIGN_OR_RETURN(auto heads, store->Range(from, "checkpoint0", 1));
    if (heads.empty()) {
      return checkpoints;
    }
    const auto& [key, head] = heads.front();
    const auto damaged = [&key = key](absl::string_view what) {
      return absl::DataLossError(absl::StrCat("index entry ", key, " ", what));
    };
    ByteReader reader(head);
    StoredCheckpoint checkpoint;
    checkpoint.timeline = reader.Get<uint64_t>();
    checkpoint.step = reader.Get<uint64_t>();
    const auto entries = reader.Get<uint64_t>();
    if (!reader.ok() || reader.remaining() != 0 || key != HeadKey(checkpoint)) {
      return damaged("is damaged");
    }
    for (uint64_t part = 0; part < PartCount(entries); ++part) {
      const absl::StatusOr<std::string> value =
          store->Get(PartKey(checkpoint, part));
      if (absl::IsNotFound(value.status())) {
        return damaged(absl::StrCat("has lost part ", part));
      }
      BALLAST_RETURN_IF_ERROR(value.status());
      if (!DecodePart(*value, &checkpoint)) {
        return damaged(absl::StrCat("has a damaged part ", part));
      }
    }
    if (checkpoint.entries.size() != entries) {
      return damaged(absl::StrCat("has ", checkpoint.entries.size(),
                                  " records, want ", entries));
    }
    from = HeadKey(checkpoint) + "0";  // Behind its parts.
    checkpoints.push_back(std::move(checkpoint));
  }
}

absl::Status AddCheckpoint(const StoredCheckpoint& checkpoint,
                           StateStore* store) {
  ByteWriter head;
  head.Put(checkpoint.timeline);
  head.Put(checkpoint.step);
  head.Put(uint64_t{checkpoint.entries.size()});
  std::vector<StateChange> changes = {{HeadKey(checkpoint), head.Take()}};
  for (uint64_t p = 0; p < PartCount(checkpoint.entries.size()); ++p) {
    changes.push_back({PartKey(checkpoint, p), EncodePart(checkpoint, p)});
  }
  return store->Apply(changes);
}

absl::Status RemoveCheckpoint(const StoredCheckpoint& checkpoint,
                              StateStore* store) {
  std::vector<StateChange> changes = {{HeadKey(checkpoint), std::nullopt}};
  for (uint64_t p = 0; p < PartCount(checkpoint.entries.size()); ++p) {
    changes.push_back({PartKey(checkpoint, p), std::nullopt});
  }
  return store->Apply(changes);
}

absl::StatusOr<std::vector<CheckpointEntry>> ReadBases(StateStore* store) {
  std::vector<CheckpointEntry> bases;
  std::string from = "base/";
  while (true) {
    // '0' follows '/', so this is the end of the folder of keys.
    BALLAST_ASSIGN_OR_RETURN(const auto pairs,
                             store->Range(from, "base0", kBasesPerRange));
    if (pairs.empty()) {
      return bases;
    }
    for (const auto& [key, value] : pairs) {
      ByteReader reader(value);
      const CheckpointEntry entry = GetEntry(&reader);
      if (!reader.ok() || reader.remaining() != 0 ||
          key != BaseKey(entry.chunk)) {
        return absl::DataLossError(
            absl::StrCat("index entry ", key, " is damaged"));
      }
      bases.push_back(entry);
    }
    from = pairs.back().first + '\0';
  }
}

absl::Status ChangeBases(const std::vector<CheckpointEntry>& put,
                         const std::vector<uint32_t>& removed,
                         StateStore* store) {
  std::vector<StateChange> changes;
  for (const CheckpointEntry& entry : put) {
    ByteWriter writer;
    PutEntry(entry, &writer);
    changes.push_back({BaseKey(entry.chunk), writer.Take()});
  }
  for (const uint32_t chunk : removed) {
    changes.push_back({BaseKey(chunk), std::nullopt});
  }
  return store->Apply(changes);
}

}  // namespace ballast
