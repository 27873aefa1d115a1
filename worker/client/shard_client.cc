// SPDX-License-Identifier: Apache-2.0
#include "worker/client/shard_client.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/status_macros.h"
#include "rpc/endpoint.h"
#include "worker/client/fetch_link.h"
#include "worker/client/push_link.h"

namespace ballast {
namespace {

// Each wait in a pass is bounded; this only keeps a stream that was forgotten
// from living for ever.
constexpr absl::Duration kStreamMax = absl::Hours(6);

}  // namespace

absl::StatusOr<std::unique_ptr<ShardClient>> ShardClient::Create(
    const Options& options) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<Arena> staging,
                           Arena::Create({.name = "worker.host_memory",
                                          .bytes = options.staging_bytes}));
  return std::unique_ptr<ShardClient>(
      new ShardClient(options, std::move(staging)));
}

ShardClient::ShardClient(const Options& options, std::unique_ptr<Arena> staging)
    : options_(options),
      state_(std::make_shared<PassState>(std::move(staging))) {}

ShardClient::~ShardClient() { Drop(); }

void ShardClient::SetPlacement(PlacementMap placement) {
  // The old links end after the lock is given back.
  std::vector<std::unique_ptr<FetchLink>> fetch;
  std::vector<std::unique_ptr<PushLink>> push;
  for (const ServerAddress& server : placement.servers()) {
    // A connection each: a gradient must not wait behind weights.
    fetch.push_back(std::make_unique<FetchLink>(
        server, MakeChannel(server.address), options_.device, state_.get()));
    push.push_back(std::make_unique<PushLink>(
        server, MakeChannel(server.address), state_.get()));
  }
  MutexLock lock(&state_->mutex);
  for (const auto& link : fetch_) {
    link->AssertHeld();
    fetched_before_ += link->fetched_bytes();
  }
  for (const auto& link : push_) {
    link->AssertHeld();
    pushed_before_ += link->pushed_bytes();
  }
  fetch_.swap(fetch);
  push_.swap(push);
  placement_ = std::make_unique<PlacementMap>(std::move(placement));
}

void ShardClient::Begin(PassIdentity identity, bool push) {
  identity_ = identity;
  identity_.placement_version = placement_->version();
  pushing_ = push;
  push_waited_ = absl::ZeroDuration();
  {
    MutexLock lock(&state_->mutex);
    state_->failure = absl::OkStatus();
  }
  for (const auto& link : fetch_) {
    link->Open(identity_, kStreamMax);
  }
  if (push) {
    for (const auto& link : push_) {
      link->Open(identity_, kStreamMax);
    }
  }
}

absl::Status ShardClient::End() {
  if (pushing_) {
    const absl::Time begin = MonotonicNow();
    BALLAST_RETURN_IF_ERROR(Await(
        [this] {
          for (const auto& link : push_) {
            link->AssertHeld();
            if (!link->Idle()) {
              return false;
            }
          }
          return true;
        },
        [this] {
          state_->mutex.AssertHeld();
          return MissingAck();
        }));
    push_waited_ += MonotonicNow() - begin;
    for (const auto& link : push_) {
      BALLAST_RETURN_IF_ERROR(link->Close());
    }
  }
  for (const auto& link : fetch_) {
    BALLAST_RETURN_IF_ERROR(link->Close());
  }
  return absl::OkStatus();
}

void ShardClient::Drop() {
  for (const auto& link : fetch_) {
    link->Break();
  }
  for (const auto& link : push_) {
    link->Break();
  }
}

void ShardClient::Cancel() {
  // Outside the lock: breaking a stream off may let go of gradients, which
  // take the lock.
  std::vector<std::shared_ptr<RawStream>> streams;
  {
    MutexLock lock(&state_->mutex);
    if (state_->failure.ok()) {
      state_->failure = absl::CancelledError("the pass was called off");
    }
    for (const auto& link : fetch_) {
      link->AssertHeld();
      streams.push_back(link->stream());
    }
    for (const auto& link : push_) {
      link->AssertHeld();
      streams.push_back(link->stream());
    }
    state_->changed.NotifyAll();
  }
  for (const auto& stream : streams) {
    if (stream != nullptr) {
      stream->Cancel();
    }
  }
}

absl::Status ShardClient::Prefetch(uint32_t unit, uint64_t version,
                                   StreamMark after,
                                   absl::Span<std::byte* const> destination) {
  const ChunkTable& table = placement_->table();
  std::vector<FetchLink::Wanted> wanted;
  for (uint32_t server = 0; server < fetch_.size(); ++server) {
    wanted.clear();
    for (const PlacementMap::UnitChunk& part :
         placement_->chunks_of(server, unit)) {
      const uint64_t offset = table.chunk(part.chunk).begin *
                              DTypeBytes(table.tensor_of(part.chunk).served);
      wanted.push_back({part.chunk, table.served_bytes(part.chunk),
                        destination[part.slot] + offset});
    }
    if (!wanted.empty()) {
      BALLAST_RETURN_IF_ERROR(
          fetch_[server]->Request(unit, version, after, wanted));
    }
  }
  return absl::OkStatus();
}

absl::Status ShardClient::Wait(uint32_t unit) {
  return Await(
      [this, unit] {
        for (const auto& link : fetch_) {
          link->AssertHeld();
          if (link->Pending(unit)) {
            return false;
          }
        }
        return true;
      },
      [this, unit] {
        state_->mutex.AssertHeld();
        return MissingUnit(unit);
      });
}

void ShardClient::Abandon() {
  for (const auto& link : fetch_) {
    link->Break();
  }
}

absl::StatusOr<std::shared_ptr<const StagedGradient>> ShardClient::Stage(
    const float* data, uint64_t elems, uint32_t chunk) {
  const uint64_t bytes = elems * sizeof(float);
  auto buffer = state_->staging->Allocate(bytes, "gradients to be sent");
  if (!buffer.ok()) {
    const absl::Time begin = MonotonicNow();
    BALLAST_RETURN_IF_ERROR(Await(
        [&] {
          buffer = state_->staging->Allocate(bytes, "gradients to be sent");
          return buffer.ok();
        },
        [&] {
          state_->mutex.AssertHeld();
          return absl::StrCat("room to send ",
                              placement_->table().tensor_of(chunk).name, "; ",
                              MissingAck());
        }));
    push_waited_ += MonotonicNow() - begin;
  }
  options_.device->CopyOut(data, bytes, buffer->data());
  // shared: see PushLink::Push.
  return std::make_shared<const StagedGradient>(std::move(buffer).value(),
                                                state_);
}

absl::Status ShardClient::Push(const GradientPiece& piece) {
  const ChunkTable& table = placement_->table();
  for (const uint32_t id : table.chunks_of_tensor(piece.use.tensor)) {
    const Chunk& chunk = table.chunk(id);
    BALLAST_ASSIGN_OR_RETURN(
        std::shared_ptr<const StagedGradient> staged,
        Stage(piece.data + chunk.begin, chunk.elem_count(), id));
    BulkItem item;
    item.chunk = id;
    item.use = piece.use.use;
    item.span = piece.span;
    item.elem_count = chunk.elem_count();
    item.payload_bytes = chunk.elem_count() * sizeof(float);
    if (piece.loss.has_value() && id == table.loss_chunk() &&
        piece.use.use == table.loss_use()) {
      item.has_loss = true;
      item.loss = *piece.loss;
    }
    push_[placement_->owner(id)]->Push(item, std::move(staged));
  }
  MutexLock lock(&state_->mutex);
  return state_->failure;
}

template <typename Done, typename What>
absl::Status ShardClient::Await(const Done& done, const What& what) {
  MutexLock lock(&state_->mutex);
  const absl::Time begin = MonotonicNow();
  absl::Time last = begin;
  uint64_t progress = Progress();
  absl::Status status;
  while (true) {
    status = state_->failure;
    if (!status.ok() || done()) {
      break;
    }
    const absl::Time now = MonotonicNow();
    if (Progress() != progress || waiting_.what.empty()) {
      progress = Progress();
      last = now;
      waiting_ = {what(), begin};
    }
    const absl::Duration left = last + options_.silence_max - now;
    if (left <= absl::ZeroDuration()) {
      status = absl::DeadlineExceededError(
          absl::StrCat(options_.name, " waits for ", what(), " since ",
                       absl::ToInt64Milliseconds(now - begin) / 1000,
                       " s (cluster.progress_timeout)"));
      break;
    }
    state_->changed.WaitFor(&state_->mutex, left);
  }
  waiting_ = {};
  return status;
}

uint64_t ShardClient::Progress() const {
  uint64_t progress = 0;
  for (const auto& link : fetch_) {
    link->AssertHeld();
    progress += link->fetched_bytes();
  }
  for (const auto& link : push_) {
    link->AssertHeld();
    progress += link->progress();
  }
  return progress;
}

std::string ShardClient::MissingUnit(uint32_t unit) const {
  for (const auto& link : fetch_) {
    link->AssertHeld();
    if (link->Pending(unit)) {
      return absl::StrCat(link->name(), ": unit ",
                          placement_->table().layout().units[unit].name,
                          " for step ", identity_.step);
    }
  }
  return "nothing";
}

std::string ShardClient::MissingAck() const {
  for (const auto& link : push_) {
    link->AssertHeld();
    if (!link->Idle()) {
      const int64_t chunk = link->OldestChunk();
      return absl::StrCat(
          link->name(), ": ",
          chunk < 0 ? "its greeting"
                    : absl::StrCat("acknowledgement of ",
                                   placement_->table()
                                       .tensor_of(static_cast<uint32_t>(chunk))
                                       .name),
          " in step ", identity_.step);
    }
  }
  return "nothing";
}

ShardClient::Waiting ShardClient::waiting() const {
  MutexLock lock(&state_->mutex);
  return waiting_;
}

uint64_t ShardClient::fetched_bytes() const {
  MutexLock lock(&state_->mutex);
  uint64_t bytes = fetched_before_;
  for (const auto& link : fetch_) {
    link->AssertHeld();
    bytes += link->fetched_bytes();
  }
  return bytes;
}

uint64_t ShardClient::pushed_bytes() const {
  MutexLock lock(&state_->mutex);
  uint64_t bytes = pushed_before_;
  for (const auto& link : push_) {
    link->AssertHeld();
    bytes += link->pushed_bytes();
  }
  return bytes;
}

}  // namespace ballast
