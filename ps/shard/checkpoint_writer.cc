// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/checkpoint_writer.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/crash_point.h"

namespace ballast {
namespace {

// In the background: a second write keeps the disk busy, more would only be in
// the way of others.
constexpr uint32_t kSavesMax = 2;

}  // namespace

void CheckpointWriter::Start(uint64_t timeline, uint64_t step) {
  Job job;
  job.timeline = timeline;
  job.step = step;
  for (ChunkState& chunk : options_.chunks->chunks()) {
    BALLAST_CHECK(chunk.version == step);
    CheckpointEntry entry;
    entry.chunk = chunk.chunk.id;
    entry.version = chunk.data_version;
    entry.timeline = chunk.data_timeline;
    job.entries.push_back(entry);
    job.extents.push_back(chunk.extent);
    // Already set when nothing was updated since the checkpoint before.
    chunk.save_pending |= chunk.extent == nullptr;
  }
  jobs_.push_back(std::move(job));
}

bool CheckpointWriter::Repeat(uint64_t timeline, uint64_t step) const {
  for (const Job& job : jobs_) {
    if (job.timeline == timeline && job.step == step) {
      return true;
    }
  }
  for (const StoredCheckpoint& stored : options_.slab->checkpoints()) {
    if (stored.timeline == timeline && stored.step == step) {
      options_.saved(PartOf(stored));
      return true;
    }
  }
  return false;
}

void CheckpointWriter::Abandon() {
  abandoned_ = true;
  jobs_.clear();
}

void CheckpointWriter::SaveNow(ChunkState* chunk) {
  if (!chunk->save_pending || abandoned_) {
    return;
  }
  if (!chunk->extent) {
    const absl::Status status = options_.chunks->Save(chunk);
    if (!status.ok()) {
      options_.fail(status);  // A full disk: asked again.
      return;
    }
  }
  const auto position =
      static_cast<size_t>(chunk - options_.chunks->chunks().data());
  for (Job& job : jobs_) {
    if (!job.extents[position]) {
      job.extents[position] = chunk->extent;
    }
  }
  chunk->save_pending = !options_.chunks->IsOnDisk(*chunk);
}

bool CheckpointWriter::IsWritten(const Job& job) const {
  for (size_t i = 0; i < job.extents.size(); ++i) {
    const ChunkState& chunk = options_.chunks->chunks()[i];
    // An extent that is not the chunk's any more was replaced by an update,
    // which waits for the write before it.
    if (!job.extents[i] ||
        (job.extents[i] == chunk.extent && !options_.chunks->IsOnDisk(chunk))) {
      return false;
    }
  }
  return true;
}

void CheckpointWriter::Work() {
  if (jobs_.empty()) {
    return;
  }
  uint32_t saving = 0;
  for (ChunkState& chunk : options_.chunks->chunks()) {
    if (chunk.save_pending && (chunk.extent || saving < kSavesMax)) {
      SaveNow(&chunk);
      saving += chunk.save_pending ? 1 : 0;
    }
  }
  // One after the other: each is told when it is committed.
  Job& job = jobs_.front();
  if (!job.committing && IsWritten(job)) {
    Commit(&job);
  }
}

void CheckpointWriter::Commit(Job* job) {
  job->committing = true;
  StoredCheckpoint checkpoint;
  checkpoint.timeline = job->timeline;
  checkpoint.step = job->step;
  for (size_t i = 0; i < job->entries.size(); ++i) {
    checkpoint.entries.push_back(job->entries[i]);
    checkpoint.entries.back().extent = *job->extents[i];
  }
  BALLAST_CRASH_POINT("server.checkpoint.before_commit");
  // shared: a task must be copyable, and holds the extents meanwhile.
  auto whole = std::make_shared<StoredCheckpoint>(std::move(checkpoint));
  options_.tasks->Run(
      [slab = options_.slab, whole] { return slab->Commit(*whole); },
      [this, whole, held = job->extents](const absl::Status& status) {
        BALLAST_CRASH_POINT("server.checkpoint.committed");
        if (abandoned_) {
          return;
        }
        if (!status.ok()) {
          jobs_.front().committing = false;  // A full disk: tried again.
          options_.fail(status);
          return;
        }
        jobs_.pop_front();
        options_.saved(PartOf(*whole));
      });
}

v1::CheckpointSaved CheckpointWriter::PartOf(
    const StoredCheckpoint& checkpoint) const {
  v1::CheckpointSaved saved;
  saved.set_timeline(checkpoint.timeline);
  saved.set_step(checkpoint.step);
  saved.set_data_dir(options_.data_dir);
  for (const CheckpointEntry& entry : checkpoint.entries) {
    v1::SavedRecord* record = saved.add_records();
    record->set_chunk(entry.chunk);
    record->set_timeline(entry.timeline);
    record->set_version(entry.version);
    record->set_extent_offset(entry.extent.offset);
    record->set_extent_bytes(entry.extent.bytes);
  }
  return saved;
}

void CheckpointWriter::Prune(const std::vector<v1::CheckpointId>& kept) {
  const auto key = [](uint64_t timeline, uint64_t step) {
    return std::pair(timeline, step);
  };
  std::vector<std::pair<uint64_t, uint64_t>> wanted;
  wanted.reserve(kept.size());
  for (const v1::CheckpointId& id : kept) {
    wanted.push_back(key(id.timeline(), id.step()));
  }
  if (wanted.empty()) {
    return;
  }
  const auto newest = *std::max_element(wanted.begin(), wanted.end());
  for (const StoredCheckpoint& stored : options_.slab->checkpoints()) {
    const auto id = key(stored.timeline, stored.step);
    if (id >= newest ||
        std::find(wanted.begin(), wanted.end(), id) != wanted.end()) {
      continue;
    }
    options_.tasks->Run(
        [slab = options_.slab, id] { return slab->Drop(id.first, id.second); },
        [this](const absl::Status& status) {
          if (!status.ok() && !abandoned_) {
            options_.fail(status);
          }
        });
  }
}

}  // namespace ballast
