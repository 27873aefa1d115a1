// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/redo_pass.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/crash_point.h"
#include "common/status_macros.h"
#include "ps/shard/update_pass.h"

namespace ballast {
namespace {

// While one chunk computes, others are read and written.
constexpr size_t kJobsMax = 4;

std::string Describe(const ChunkState& chunk) {
  return absl::StrCat("chunk ", chunk.chunk.id, " (", chunk.tensor->name, " [",
                      chunk.chunk.begin, ", ", chunk.chunk.end, "))");
}

}  // namespace

// shared: a read of the log on its way outlives its place here.
struct RedoPass::Job {
  ChunkState* chunk = nullptr;
  std::shared_ptr<Image> image;  // The whole record.
  ArenaBuffer gradient;
  size_t next = 0;  // Of the decisions.
  bool reading = false;
  bool read = false;
  bool done = false;
};

RedoPass::RedoPass(Options options) : options_(std::move(options)) {
  BALLAST_CHECK(options_.decisions.empty() ||
                options_.decisions.back().step() <= options_.step);
}
RedoPass::~RedoPass() = default;

size_t RedoPass::FirstAfter(uint64_t version) const {
  const auto& decisions = options_.decisions;
  return static_cast<size_t>(
      std::partition_point(decisions.begin(), decisions.end(),
                           [version](const v1::Decision& decision) {
                             return decision.step() <= version;
                           }) -
      decisions.begin());
}

bool RedoPass::HasUpdates(size_t first) const {
  const auto& decisions = options_.decisions;
  return std::any_of(decisions.begin() + static_cast<ptrdiff_t>(first),
                     decisions.end(),
                     [](const v1::Decision& d) { return !d.skip(); });
}

absl::Status RedoPass::Check(const ChunkState& chunk) {
  const CheckpointEntry* base = options_.book->Base(chunk.chunk.id);
  BALLAST_CHECK(base != nullptr);
  if (base->version > options_.step) {
    return absl::FailedPreconditionError(absl::StrCat(
        Describe(chunk), " is at version ", base->version,
        " on disk and cannot go back to ", options_.step,
        "; the coordinator's step log is behind this server's directory"));
  }
  uint64_t version = base->version;
  for (size_t i = FirstAfter(version); i < options_.decisions.size(); ++i) {
    const v1::Decision& decision = options_.decisions[i];
    if (decision.step() != version + 1) {
      break;
    }
    ++version;
    if (decision.skip()) {
      continue;
    }
    if (options_.book->Gradient(decision.timeline(), decision.step(),
                                chunk.chunk.id) == nullptr) {
      return absl::DataLossError(absl::StrCat(
          Describe(chunk), ": its record is of version ", base->version,
          ", redoable through ", options_.book->ReachOf(*base).step,
          "; want version ", options_.step,
          ", and the gradient log has no gradient of timeline ",
          decision.timeline(), " step ", decision.step()));
    }
    ++gradients_;
  }
  if (version != options_.step) {
    return absl::FailedPreconditionError(absl::StrCat(
        Describe(chunk), ": the decisions sent do not lead from version ",
        base->version, " to ", options_.step));
  }
  return absl::OkStatus();
}

absl::Status RedoPass::Start(std::vector<size_t> places) {
  places_ = std::move(places);
  for (const size_t place : places_) {
    BALLAST_RETURN_IF_ERROR(Check(options_.chunks->chunks()[place]));
  }
  return absl::OkStatus();
}

bool RedoPass::Begin(size_t place) {
  ChunkState& chunk = options_.chunks->chunks()[place];
  const CheckpointEntry& base = *options_.book->Base(chunk.chunk.id);
  const size_t first = FirstAfter(base.version);
  const bool updates = HasUpdates(first);
  auto job = std::make_shared<Job>();
  job->chunk = &chunk;
  job->next = first;
  if (updates) {
    // Both or nothing: what has begun can always go on.
    absl::StatusOr<ArenaBuffer> gradient = options_.pool->arena->Allocate(
        chunk.layout.elem_count * sizeof(float), "gradients being redone");
    if (!gradient.ok()) {
      return false;
    }
    job->gradient = *std::move(gradient);
  }
  if (!chunk.extent) {
    chunk.version = chunk.data_version = base.version;
    chunk.data_timeline = base.timeline;
    options_.chunks->Adopt(&chunk, base.extent);
  }
  if (updates && chunk.tier != Tier::kWhole) {
    const auto need =
        jobs_.empty() ? ChunkStore::Need::kNow : ChunkStore::Need::kAhead;
    if (!options_.chunks->Bring(&chunk, /*whole=*/true, need)) {
      return false;
    }
    job->image = chunk.window;
    job->image->claimed = true;
  } else if (chunk.resident) {
    options_.chunks->FillResident(&chunk);
    job->image = updates ? chunk.resident : nullptr;
  }
  if (!updates) {
    chunk.version = options_.step;
    job->done = true;
  }
  jobs_.push_back(std::move(job));
  return true;
}

void RedoPass::ReadGradient(const std::shared_ptr<Job>& job) {
  const v1::Decision& decision = options_.decisions[job->next];
  const uint32_t chunk = job->chunk->chunk.id;
  const GradientName name = {decision.timeline(),
                             decision.step(),
                             chunk,
                             kAllUses,
                             {0, options_.micro_batches}};
  job->reading = true;
  ++options_.pool->in_flight;
  options_.pool->log->Read(
      name, *options_.book->Gradient(name.timeline, name.step, chunk),
      job->gradient.data(),
      [pool = options_.pool, mailbox = options_.pool->mailbox,
       job](const absl::Status& status) {
        mailbox->Post([pool, job, status] {
          --pool->in_flight;
          job->reading = false;
          job->read = status.ok();
          if (!status.ok()) {
            pool->fail(status);
          }
        });
      });
}

absl::Status RedoPass::Advance(Job* job, bool* worked) {
  if (!job->image->ready || job->reading) {
    return absl::OkStatus();
  }
  if (job->next == options_.decisions.size()) {
    return Finish(job, worked);
  }
  const v1::Decision& decision = options_.decisions[job->next];
  if (decision.skip()) {
    job->chunk->version = decision.step();
    ++job->next;
    *worked = true;
    return absl::OkStatus();
  }
  if (job->read) {
    BALLAST_CRASH_POINT("server.redo.middle");
    ApplyDecision(decision, options_.optimizer,
                  {job->gradient.as<float>(), job->chunk->layout.elem_count},
                  job->chunk, job->image);
    job->read = false;
    ++job->next;
    *worked = true;
  }
  return absl::OkStatus();
}

absl::Status RedoPass::Finish(Job* job, bool* worked) {
  ChunkState* chunk = job->chunk;
  if (chunk->tier != Tier::kWhole) {
    BALLAST_ASSIGN_OR_RETURN(SharedExtent extent,
                             options_.chunks->TakeExtent(*chunk));
    options_.chunks->Write(chunk, job->image, std::move(extent));
    if (chunk->tier == Tier::kWeights) {
      std::memcpy(chunk->resident->buffer.data(), job->image->buffer.data(),
                  chunk->layout.prefix_bytes);
      chunk->resident->ready = true;
    }
    job->image->claimed = false;
  }
  job->done = true;
  *worked = true;
  return absl::OkStatus();
}

absl::Status RedoPass::Work(bool* worked) {
  *worked = false;
  while (begun_ < places_.size() && jobs_.size() < kJobsMax &&
         Begin(places_[begun_])) {
    BALLAST_CRASH_POINT("server.load.chunk");
    ++begun_;
    *worked = true;
    std::erase_if(jobs_, [](const auto& job) { return job->done; });
  }
  absl::Status status;
  for (const std::shared_ptr<Job>& job : jobs_) {
    status.Update(Advance(job.get(), worked));
    const bool wants_gradient = !job->done && !job->reading && !job->read &&
                                job->next < options_.decisions.size() &&
                                !options_.decisions[job->next].skip();
    if (wants_gradient) {
      ReadGradient(job);
    }
  }
  std::erase_if(jobs_, [](const auto& job) { return job->done; });
  return status;
}

bool RedoPass::IsDone() const {
  return begun_ == places_.size() && jobs_.empty() &&
         options_.chunks->in_flight() == 0;
}

}  // namespace ballast
