// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/checkpoint_book.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

// Appends the records of one server's part. `seen` marks chunks found.
absl::Status AppendPart(const ChunkTable& table,
                        const v1::CheckpointSaved& part,
                        std::vector<bool>* seen, CheckpointManifest* manifest) {
  if (part.records().empty()) {
    return absl::OkStatus();  // A server without chunks.
  }
  const auto directory = static_cast<uint32_t>(manifest->directories.size());
  manifest->directories.push_back(part.data_dir());
  for (const v1::SavedRecord& saved : part.records()) {
    if (saved.chunk() >= table.chunks().size() || (*seen)[saved.chunk()]) {
      return absl::InternalError(absl::StrCat(
          part.data_dir(), " saved chunk ", saved.chunk(), " for step ",
          part.step(), ", which does not exist or was saved elsewhere too"));
    }
    if (saved.version() > part.step() || saved.timeline() > part.timeline()) {
      return absl::InternalError(
          absl::StrCat(part.data_dir(), " saved chunk ", saved.chunk(),
                       " at version ", saved.version(), " of timeline ",
                       saved.timeline(), " for step ", part.step()));
    }
    (*seen)[saved.chunk()] = true;
    const Chunk& chunk = table.chunk(saved.chunk());
    ManifestRecord record;
    record.tensor = chunk.tensor;
    record.begin = chunk.begin;
    record.end = chunk.end;
    record.version = saved.version();
    record.timeline = saved.timeline();
    record.directory = directory;
    record.extent = {saved.extent_offset(), saved.extent_bytes()};
    manifest->records.push_back(record);
  }
  return absl::OkStatus();
}

}  // namespace

void CheckpointBook::Expect(const v1::Decision& decision,
                            const std::vector<uint64_t>& servers) {
  Pending& pending = pending_[{decision.timeline(), decision.step()}];
  pending.decision = decision;
  for (const uint64_t server : servers) {
    pending.parts[server];
  }
}

void CheckpointBook::AddPart(uint64_t server, const v1::CheckpointSaved& part) {
  const auto pending = pending_.find({part.timeline(), part.step()});
  if (pending == pending_.end()) {
    return;
  }
  const auto place = pending->second.parts.find(server);
  if (place != pending->second.parts.end() && !place->second.has_value()) {
    place->second = part;
  }
}

bool CheckpointBook::Owes(uint64_t server, const StepKey& key) const {
  const auto pending = pending_.find(key);
  if (pending == pending_.end()) {
    return false;
  }
  const auto place = pending->second.parts.find(server);
  return place != pending->second.parts.end() && !place->second.has_value();
}

absl::StatusOr<std::optional<CheckpointManifest>> CheckpointBook::TakeComplete(
    const ChunkTable& table) {
  for (auto& [key, pending] : pending_) {
    const bool whole =
        std::all_of(pending.parts.begin(), pending.parts.end(),
                    [](const auto& part) { return part.second.has_value(); });
    if (pending.taken || !whole) {
      continue;
    }
    CheckpointManifest manifest;
    manifest.timeline = key.timeline;
    manifest.step = key.step;
    manifest.optimizer_step = pending.decision.optimizer_step();
    manifest.samples_consumed = pending.decision.samples_consumed();
    manifest.decision = pending.decision.SerializeAsString();
    manifest.layout = table.layout();
    std::vector<bool> seen(table.chunks().size(), false);
    for (const auto& [server, part] : pending.parts) {
      BALLAST_RETURN_IF_ERROR(AppendPart(table, *part, &seen, &manifest));
    }
    const auto missing = std::find(seen.begin(), seen.end(), false);
    if (missing != seen.end()) {
      return absl::InternalError(
          absl::StrCat("no server saved chunk ", missing - seen.begin(),
                       " for the checkpoint of step ", key.step));
    }
    std::sort(manifest.records.begin(), manifest.records.end(),
              [](const ManifestRecord& a, const ManifestRecord& b) {
                return std::pair(a.tensor, a.begin) <
                       std::pair(b.tensor, b.begin);
              });
    pending.taken = true;
    return std::optional<CheckpointManifest>(std::move(manifest));
  }
  return std::optional<CheckpointManifest>();
}

std::vector<StepKey> CheckpointBook::Logged(const StepKey& key,
                                            const std::string& path) {
  pending_.erase(key);
  standing_[key] = path;
  std::vector<StepKey> dropped;
  while (standing_.size() > keep_) {
    dropped.push_back(standing_.begin()->first);
    standing_.erase(standing_.begin());
  }
  return dropped;
}

std::vector<StepKey> CheckpointBook::Kept() const {
  std::vector<StepKey> kept;
  for (const auto& [key, path] : standing_) {
    kept.push_back(key);
  }
  for (const auto& [key, pending] : pending_) {
    kept.push_back(key);
  }
  return kept;
}

std::vector<StepKey> CheckpointBook::Expected() const {
  std::vector<StepKey> expected;
  for (const auto& [key, pending] : pending_) {
    expected.push_back(key);
  }
  return expected;
}

}  // namespace ballast
