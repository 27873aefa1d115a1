// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/checkpoint_book.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

ManifestRecord RecordOf(const Chunk& chunk, const v1::SavedRecord& saved,
                        uint32_t directory) {
  ManifestRecord record;
  record.tensor = chunk.tensor;
  record.begin = chunk.begin;
  record.end = chunk.end;
  record.version = saved.version();
  record.timeline = saved.timeline();
  record.directory = directory;
  record.extent = {saved.extent_offset(), saved.extent_bytes()};
  return record;
}

}  // namespace

void CheckpointBook::Expect(const v1::Decision& decision,
                            std::vector<uint32_t> owner_of) {
  Pending& pending = pending_[{decision.timeline(), decision.step()}];
  pending.decision = decision;
  pending.saved.resize(owner_of.size());
  pending.missing.clear();
  for (const uint32_t slot : owner_of) {
    ++pending.missing[slot];
  }
  pending.owner_of = std::move(owner_of);
}

absl::Status CheckpointBook::AddPart(const v1::CheckpointSaved& part) {
  const auto found = pending_.find({part.timeline(), part.step()});
  if (found == pending_.end() || found->second.taken) {
    return absl::OkStatus();
  }
  Pending& pending = found->second;
  for (const v1::SavedRecord& saved : part.records()) {
    if (saved.chunk() >= pending.saved.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          part.data_dir(), " saved chunk ", saved.chunk(), " for step ",
          part.step(), "; the model has ", pending.saved.size()));
    }
    if (saved.version() > part.step() || saved.timeline() > part.timeline()) {
      return absl::InvalidArgumentError(
          absl::StrCat(part.data_dir(), " saved chunk ", saved.chunk(),
                       " at version ", saved.version(), " of timeline ",
                       saved.timeline(), " for step ", part.step()));
    }
  }
  const auto known = std::find(pending.directories.begin(),
                               pending.directories.end(), part.data_dir());
  const auto directory =
      static_cast<uint32_t>(known - pending.directories.begin());
  if (known == pending.directories.end() && !part.records().empty()) {
    pending.directories.push_back(part.data_dir());
  }
  for (const v1::SavedRecord& saved : part.records()) {
    std::optional<Saved>& place = pending.saved[saved.chunk()];
    if (place.has_value()) {
      continue;
    }
    place = Saved{saved, directory};
    const auto missing = pending.missing.find(pending.owner_of[saved.chunk()]);
    if (--missing->second == 0) {
      pending.missing.erase(missing);
    }
  }
  return absl::OkStatus();
}

bool CheckpointBook::Owes(uint32_t slot, const StepKey& key) const {
  const auto pending = pending_.find(key);
  return pending != pending_.end() && pending->second.missing.contains(slot);
}

std::vector<StepKey> CheckpointBook::OwedBy(uint32_t slot) const {
  std::vector<StepKey> owed;
  for (const auto& [key, pending] : pending_) {
    if (pending.missing.contains(slot)) {
      owed.push_back(key);
    }
  }
  return owed;
}

std::optional<CheckpointManifest> CheckpointBook::TakeComplete(
    const ChunkTable& table) {
  for (auto& [key, pending] : pending_) {
    if (pending.taken || !pending.missing.empty()) {
      continue;
    }
    CheckpointManifest manifest;
    manifest.timeline = key.timeline;
    manifest.step = key.step;
    manifest.optimizer_step = pending.decision.optimizer_step();
    manifest.samples_consumed = pending.decision.samples_consumed();
    manifest.decision = pending.decision.SerializeAsString();
    manifest.layout = table.layout();
    manifest.directories = pending.directories;
    for (uint32_t chunk = 0; chunk < pending.saved.size(); ++chunk) {
      const Saved& saved = *pending.saved[chunk];
      manifest.records.push_back(
          RecordOf(table.chunk(chunk), saved.record, saved.directory));
    }
    std::sort(manifest.records.begin(), manifest.records.end(),
              [](const ManifestRecord& a, const ManifestRecord& b) {
                return std::pair(a.tensor, a.begin) <
                       std::pair(b.tensor, b.begin);
              });
    pending.taken = true;
    return manifest;
  }
  return std::nullopt;
}

std::vector<StepKey> CheckpointBook::Logged(const StepKey& key,
                                            const std::string& path) {
  // Manifests are written in order, so an older one is not under way.
  pending_.erase(pending_.begin(), pending_.upper_bound(key));
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
