// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/scripted_server.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "storage/data_dir.h"

namespace ballast::testing {

absl::Status ScriptedServer::Recover() {
  BALLAST_ASSIGN_OR_RETURN(const auto run, ReadDataDirectoryRun(disk_, dir_));
  if (!run && promises_->joined) {
    return absl::DataLossError("the data directory has lost its identity");
  }
  SlabStore::Options slab;
  slab.disk = disk_;
  slab.dir = dir_;
  slab.run = run.value_or(kRun);
  slab.owner = "server-0";
  slab.extend_bytes = 8 * kBodyBytes;
  BALLAST_ASSIGN_OR_RETURN(slab_, SlabStore::Open(slab));
  GradientLog::Options log;
  log.disk = disk_;
  log.dir = dir_;
  log.run = slab.run;
  log.keep = true;
  log.segment_bytes = 16 * kPageBytes;
  log.queue_depth = 4;
  log.buffer_bytes = 64 << 10;
  BALLAST_ASSIGN_OR_RETURN(log_, GradientLog::Open(log));
  BALLAST_RETURN_IF_ERROR(Redo());
  return CheckCheckpoints();
}

absl::Status ScriptedServer::Vote() {
  const uint64_t step = version_ + 1;
  VoteMark mark = {kTimeline, step, "server-0", VoteText(step), {}};
  std::vector<std::unique_ptr<AlignedBuffer>> gradients;
  int waiting = 0;
  absl::Status status;
  const auto done = [&](const absl::Status& ended) {
    status.Update(ended);
    --waiting;
  };
  for (uint32_t chunk = 0; chunk < kChunks && status.ok(); ++chunk) {
    gradients.push_back(Gradient(step, chunk));
    const AlignedBuffer& bytes = *gradients.back();
    // A span that waits for its sibling lies in the log too.
    GradientName name = {kTimeline, step, chunk, 0, {0, 4}};
    ++waiting;
    auto position = log_->Append(name, bytes.data(), 100, done);
    if (position.ok()) {
      name.use = kAllUses;
      name.span = {0, 8};
      ++waiting;
      position = log_->Append(name, bytes.data(), bytes.size(), done);
    }
    if (!position.ok()) {
      done(position.status());
      break;
    }
    mark.gradients.emplace_back(chunk, *position);
  }
  if (status.ok()) {
    ++waiting;
    const absl::Status marked = log_->AppendMark(mark, done);
    if (!marked.ok()) {
      done(marked);
    }
  }
  // The sync is asked for before the appends are written.
  if (status.ok()) {
    ++waiting;
    log_->Sync(done);
  }
  pump_([&] { return waiting == 0; });
  BALLAST_RETURN_IF_ERROR(status);
  promises_->vote = std::max(promises_->vote, step);
  version_ = step;  // The decision arrived and the update is made.
  return absl::OkStatus();
}

absl::Status ScriptedServer::PassBases() {
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    BALLAST_ASSIGN_OR_RETURN(const Extent extent, WriteBody(chunk));
    BALLAST_RETURN_IF_ERROR(
        slab_->CommitBase({{chunk, version_, kTimeline, extent}}));
    slab_->Release(extent);
  }
  promises_->joined = true;
  log_->DropThrough(version_);
  return absl::OkStatus();
}

absl::Status ScriptedServer::Checkpoint() {
  StoredCheckpoint checkpoint = {kTimeline, version_, {}};
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    BALLAST_ASSIGN_OR_RETURN(const Extent extent, WriteBody(chunk));
    checkpoint.entries.push_back({chunk, version_, kTimeline, extent});
  }
  BALLAST_RETURN_IF_ERROR(slab_->Commit(checkpoint));
  for (const CheckpointEntry& entry : checkpoint.entries) {
    slab_->Release(entry.extent);
  }
  const uint64_t former = std::exchange(promises_->checkpoint, version_);
  return former == version_ ? absl::OkStatus() : slab_->Drop(kTimeline, former);
}

absl::Status ScriptedServer::Run(uint64_t until) {
  while (version_ < until) {
    if (version_ == 0) {
      BALLAST_RETURN_IF_ERROR(PassBases());
    }
    BALLAST_RETURN_IF_ERROR(Vote());
    if (version_ % 3 == 0) {
      BALLAST_RETURN_IF_ERROR(PassBases());
    }
    if (version_ % 4 == 0) {
      BALLAST_RETURN_IF_ERROR(Checkpoint());
    }
  }
  return absl::OkStatus();
}

absl::Status ScriptedServer::Redo() {
  version_ = 0;
  const std::vector<CheckpointEntry> bases = slab_->bases();
  if (bases.size() < kChunks) {
    return promises_->joined ? absl::DataLossError("a base is missing")
                             : absl::OkStatus();
  }
  uint64_t oldest = ~uint64_t{0};
  for (const CheckpointEntry& base : bases) {
    BALLAST_RETURN_IF_ERROR(CheckBody(base));
    oldest = std::min(oldest, base.version);
    version_ = std::max(version_, base.version);
  }
  std::map<uint64_t, const VoteMark*> marks;
  for (const VoteMark& mark : log_->contents().marks) {
    marks[mark.step] = &mark;
  }
  for (uint64_t step = oldest + 1; true; ++step) {
    const auto mark = marks.find(step);
    if (mark == marks.end()) {
      if (step <= version_) {
        return absl::DataLossError(absl::StrCat(
            "no redo of step ", step, " for the bases behind ", version_));
      }
      break;
    }
    if (mark->second->vote != VoteText(step)) {
      return absl::DataLossError("a vote is of other bytes");
    }
    for (const CheckpointEntry& base : bases) {
      if (base.version < step) {
        BALLAST_RETURN_IF_ERROR(CheckGradient(step, base.chunk));
      }
    }
    version_ = std::max(version_, step);
  }
  if (version_ < promises_->vote) {
    return absl::DataLossError(absl::StrCat(
        "recovers to ", version_, ", has voted for ", promises_->vote));
  }
  // What it says when it joins is a promise as well.
  promises_->joined = true;
  promises_->vote = version_;
  return absl::OkStatus();
}

absl::Status ScriptedServer::CheckCheckpoints() {
  bool found = promises_->checkpoint == 0;
  for (const StoredCheckpoint& checkpoint : slab_->checkpoints()) {
    found = found || checkpoint.step == promises_->checkpoint;
    for (const CheckpointEntry& entry : checkpoint.entries) {
      BALLAST_RETURN_IF_ERROR(CheckBody(entry));
    }
  }
  return found ? absl::OkStatus()
               : absl::DataLossError(absl::StrCat("the checkpoint of step ",
                                                  promises_->checkpoint,
                                                  " is missing"));
}

absl::StatusOr<Extent> ScriptedServer::WriteBody(uint32_t chunk) {
  BALLAST_ASSIGN_OR_RETURN(const Extent extent, slab_->Allocate(kBodyBytes));
  AlignedBuffer body(kBodyBytes);
  FillBody(version_, chunk, &body);
  BALLAST_RETURN_IF_ERROR(Await(
      [&](auto done) { slab_->Write(extent, body.data(), std::move(done)); }));
  return extent;
}

absl::Status ScriptedServer::CheckBody(const CheckpointEntry& entry) {
  AlignedBuffer wanted(kBodyBytes);
  FillBody(entry.version, entry.chunk, &wanted);
  AlignedBuffer found(kBodyBytes);
  BALLAST_RETURN_IF_ERROR(Await([&](auto done) {
    slab_->Read(entry.extent, kBodyBytes, found.data(), std::move(done));
  }));
  return std::memcmp(wanted.data(), found.data(), kBodyBytes) == 0
             ? absl::OkStatus()
             : absl::DataLossError(absl::StrCat(
                   "the record of chunk ", entry.chunk, " version ",
                   entry.version, " holds something else"));
}

absl::Status ScriptedServer::CheckGradient(uint64_t step, uint32_t chunk) {
  const auto& gradients = log_->contents().gradients;
  const auto it = gradients.find({kTimeline, step, chunk});
  if (it == gradients.end()) {
    return absl::DataLossError(absl::StrCat("the gradient of step ", step,
                                            " chunk ", chunk, " is missing"));
  }
  const auto wanted = Gradient(step, chunk);
  AlignedBuffer found(wanted->size());
  BALLAST_RETURN_IF_ERROR(Await([&](auto done) {
    log_->Read(it->second.name, it->second.position, found.data(),
               std::move(done));
  }));
  return it->second.position.bytes == wanted->size() &&
                 std::memcmp(wanted->data(), found.data(), found.size()) == 0
             ? absl::OkStatus()
             : absl::DataLossError("a gradient is of other bytes");
}

}  // namespace ballast::testing
