// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/checkpoint_writer.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace ballast {
namespace {

// In the background: a second write keeps the disk busy, more would only be in
// the way of others.
constexpr uint32_t kSavesMax = 2;

}  // namespace

CheckpointWriter::CheckpointWriter(const Options& options)
    : options_(options), thread_([this] {
        while (!stopped_) {
          blocking_mailbox_.Run(absl::Seconds(1));
        }
      }) {}

CheckpointWriter::~CheckpointWriter() {
  blocking_mailbox_.Post([this] { stopped_ = true; });
  thread_.join();
}

void CheckpointWriter::Block(std::function<absl::Status()> work,
                             std::function<void(const absl::Status&)> then) {
  ++blocking_;
  blocking_mailbox_.Post([this, mailbox = options_.mailbox,
                          work = std::move(work), then = std::move(then)] {
    const absl::Status status = work();
    mailbox->Post([this, then, status] {
      --blocking_;
      then(status);
    });
  });
}

void CheckpointWriter::Start(uint64_t timeline, uint64_t step,
                             ChunkStore* chunks) {
  chunks_ = chunks;
  Job job;
  job.timeline = timeline;
  job.step = step;
  for (ChunkState& chunk : chunks->chunks()) {
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

void CheckpointWriter::SaveNow(ChunkState* chunk) {
  if (!chunk->save_pending || chunk->extent) {
    return;  // Written, or being written.
  }
  BALLAST_CHECK(!jobs_.empty() && chunk->resident);
  const absl::Status status =
      chunks_->Write(chunk, chunk->resident, [this, chunk] {
        chunk->save_pending = false;
        --saving_;
      });
  if (!status.ok()) {
    options_.fail(status);
    return;
  }
  ++saving_;
  const auto position = static_cast<size_t>(chunk - chunks_->chunks().data());
  for (Job& job : jobs_) {
    if (!job.extents[position]) {
      job.extents[position] = chunk->extent;
    }
  }
}

bool CheckpointWriter::IsWritten(const Job& job) const {
  for (size_t i = 0; i < job.extents.size(); ++i) {
    const ChunkState& chunk = chunks_->chunks()[i];
    const auto is_writing = [](const std::shared_ptr<Image>& image) {
      return image && image->writing;
    };
    // An extent that is not the chunk's any more was replaced by an update,
    // which waits for the write before it.
    if (!job.extents[i] ||
        (job.extents[i] == chunk.extent &&
         (is_writing(chunk.resident) || is_writing(chunk.window)))) {
      return false;
    }
  }
  return true;
}

void CheckpointWriter::Work() {
  if (jobs_.empty()) {
    return;
  }
  for (ChunkState& chunk : chunks_->chunks()) {
    if (saving_ >= kSavesMax) {
      break;
    }
    SaveNow(&chunk);
  }
  for (Job& job : jobs_) {
    if (!job.committing && IsWritten(job)) {
      Commit(&job);
    }
  }
}

void CheckpointWriter::Commit(Job* job) {
  job->committing = true;
  StoredCheckpoint checkpoint;
  checkpoint.timeline = job->timeline;
  checkpoint.step = job->step;
  v1::CheckpointSaved saved;
  saved.set_timeline(job->timeline);
  saved.set_step(job->step);
  saved.set_data_dir(options_.data_dir);
  for (size_t i = 0; i < job->entries.size(); ++i) {
    CheckpointEntry entry = job->entries[i];
    entry.extent = *job->extents[i];
    checkpoint.entries.push_back(entry);
    v1::SavedRecord* record = saved.add_records();
    record->set_chunk(entry.chunk);
    record->set_timeline(entry.timeline);
    record->set_version(entry.version);
    record->set_extent_offset(entry.extent.offset);
    record->set_extent_bytes(entry.extent.bytes);
  }
  // shared: a task must be copyable.
  auto whole = std::make_shared<StoredCheckpoint>(std::move(checkpoint));
  auto report = std::make_shared<v1::CheckpointSaved>(std::move(saved));
  Block([slab = options_.slab, whole] { return slab->Commit(*whole); },
        [this, report](const absl::Status& status) {
          // Commits end in the order in which they began.
          jobs_.pop_front();
          if (!status.ok()) {
            options_.fail(status);
            return;
          }
          options_.saved(*report);
        });
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
    Block(
        [slab = options_.slab, id] { return slab->Drop(id.first, id.second); },
        [this](const absl::Status& status) {
          if (!status.ok()) {
            options_.fail(status);
          }
        });
  }
}

}  // namespace ballast
