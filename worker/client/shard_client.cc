// SPDX-License-Identifier: Apache-2.0
#include "worker/client/shard_client.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/status_macros.h"
#include "worker/client/fetch_link.h"
#include "worker/client/push_link.h"

namespace ballast {
namespace {

// After one server has failed, for what others have already sent: what they
// have need not be pushed to them again.
constexpr absl::Duration kOthersMax = absl::Seconds(1);

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

void ShardClient::SetPlacement(std::shared_ptr<const PlacementMap> placement) {
  if (placement != placement_) {
    placement_ = std::move(placement);
    Relink(/*keep=*/true);
  }
}

void ShardClient::Reconnect() {
  if (placement_ != nullptr) {
    Relink(/*keep=*/false);
  }
}

void ShardClient::Relink(bool keep) {
  const std::vector<ServerAddress>& servers = placement_->servers();
  std::vector<Links> links;
  for (uint32_t i = 0; i < servers.size(); ++i) {
    if (!placement_->owns_chunks(i) || servers[i].incarnation == 0) {
      continue;
    }
    Links& link = links.emplace_back();
    link.server = i;
    const auto same = std::find_if(
        links_.begin(), links_.end(),
        [&](const Links& old) { return old.fetch->server() == servers[i]; });
    if (!keep || same == links_.end()) {
      link.fetch = std::make_unique<FetchLink>(servers[i], options_.device,
                                               state_.get());
      link.push = std::make_unique<PushLink>(servers[i], state_.get());
    }
  }
  // The old links end after the lock is given back.
  MutexLock lock(&state_->mutex);
  links_.swap(links);
  by_server_.assign(servers.size(), nullptr);
  for (Links& link : links_) {
    by_server_[link.server] = &link;
    if (link.fetch == nullptr) {
      const auto same =
          std::find_if(links.begin(), links.end(), [&](const Links& old) {
            return old.fetch != nullptr &&
                   old.fetch->server() == servers[link.server];
          });
      link.fetch = std::move(same->fetch);
      link.push = std::move(same->push);
    }
  }
  for (const Links& old : links) {
    if (old.fetch != nullptr) {
      old.fetch->AssertHeld();
      old.push->AssertHeld();
      fetched_before_ += old.fetch->fetched_bytes();
      pushed_before_ += old.push->pushed_bytes();
    }
  }
}

absl::Status ShardClient::Begin(uint64_t pass, PassIdentity identity,
                                std::vector<Target> targets) {
  identity_ = identity;
  identity_.placement_version = placement_->version();
  targets_ = std::move(targets);
  push_waited_ = absl::ZeroDuration();
  ended_ = false;
  const std::vector<ServerAddress>& servers = placement_->servers();
  wanted_.assign(targets_.size(), std::vector<bool>(servers.size(), false));
  std::vector<bool> pushed_to(servers.size(), false);
  for (size_t target = 0; target < targets_.size(); ++target) {
    for (const uint32_t server : targets_[target].servers) {
      wanted_[target][server] = true;
      pushed_to[server] = true;
    }
  }
  for (uint32_t i = 0; i < servers.size(); ++i) {
    if (placement_->owns_chunks(i) && by_server_[i] == nullptr) {
      return absl::UnavailableError(absl::StrCat(
          servers[i].name, " is not in; step ", identity_.step, " needs it"));
    }
  }
  {
    MutexLock lock(&state_->mutex);
    pass_ = pass;
    state_->failure = pass <= cancelled_
                          ? absl::CancelledError("the pass was called off")
                          : absl::OkStatus();
    BALLAST_RETURN_IF_ERROR(state_->failure);
  }
  for (const Links& link : links_) {
    link.fetch->Open(identity_);
    if (pushed_to[link.server]) {
      link.push->Open(identity_, targets_.size());
    }
  }
  return absl::OkStatus();
}

absl::Status ShardClient::End() {
  ended_ = true;
  const absl::Time begin = MonotonicNow();
  const absl::Status status = Await(
      [this] {
        for (const Links& link : links_) {
          link.push->AssertHeld();
          if (!link.push->Idle()) {
            return false;
          }
        }
        return true;
      },
      [this] {
        state_->mutex.AssertHeld();
        return MissingAck();
      });
  if (!status.ok()) {
    AwaitOthers();
  }
  push_waited_ += MonotonicNow() - begin;
  return status;
}

void ShardClient::AwaitOthers() {
  const absl::Time deadline = MonotonicNow() + kOthersMax;
  MutexLock lock(&state_->mutex);
  while (cancelled_ < pass_ && MonotonicNow() < deadline) {
    bool waits = false;
    for (const Links& link : links_) {
      link.push->AssertHeld();
      waits = waits || (link.push->IsOpen() && !link.push->Idle());
    }
    if (!waits) {
      return;
    }
    state_->changed.WaitFor(&state_->mutex, deadline - MonotonicNow());
  }
}

void ShardClient::Drop() {
  for (const Links& link : links_) {
    link.fetch->Break();
    link.push->Break();
  }
}

std::vector<ShardClient::Ack> ShardClient::Acks() const {
  std::vector<Ack> acks;
  if (!ended_) {
    return acks;  // Not all of any target was pushed.
  }
  MutexLock lock(&state_->mutex);
  for (size_t target = 0; target < targets_.size(); ++target) {
    for (const uint32_t server : targets_[target].servers) {
      const PushLink& link = *by_server_[server]->push;
      link.AssertHeld();
      if (link.HasAll(target)) {
        acks.push_back({target, server, link.server().incarnation});
      }
    }
  }
  return acks;
}

void ShardClient::Cancel(uint64_t pass) {
  // Outside the lock: breaking a stream off may let go of gradients, which
  // take the lock.
  std::vector<std::shared_ptr<RawStream>> streams;
  {
    MutexLock lock(&state_->mutex);
    cancelled_ = std::max(cancelled_, pass);
    if (pass_ != pass) {
      return;  // Over, or not begun yet.
    }
    if (state_->failure.ok()) {
      state_->failure = absl::CancelledError("the pass was called off");
    }
    for (const Links& link : links_) {
      link.fetch->AssertHeld();
      link.push->AssertHeld();
      streams.push_back(link.fetch->stream());
      streams.push_back(link.push->stream());
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
  for (const Links& link : links_) {
    wanted.clear();
    for (const PlacementMap::UnitChunk& part :
         placement_->chunks_of(link.server, unit)) {
      const uint64_t offset = table.chunk(part.chunk).begin *
                              DTypeBytes(table.tensor_of(part.chunk).served);
      wanted.push_back({part.chunk, table.served_bytes(part.chunk),
                        destination[part.slot] + offset});
    }
    if (!wanted.empty()) {
      BALLAST_RETURN_IF_ERROR(
          link.fetch->Request(unit, version, after, wanted));
    }
  }
  return absl::OkStatus();
}

absl::Status ShardClient::Wait(uint32_t unit) {
  return Await(
      [this, unit] {
        for (const Links& link : links_) {
          link.fetch->AssertHeld();
          if (link.fetch->Missing(unit).has_value()) {
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
  for (const Links& link : links_) {
    link.fetch->Break();
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
          return absl::StrCat(MissingAck(), ", for room to send ",
                              ChunkName(chunk));
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
  BALLAST_ASSIGN_OR_RETURN(const size_t target, TargetOf(piece.span));
  for (const uint32_t id : table.chunks_of_tensor(piece.use.tensor)) {
    const uint32_t server = placement_->owner(id);
    if (!wanted_[target][server]) {
      continue;  // It has this one.
    }
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
    by_server_[server]->push->Push(target, item, std::move(staged));
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

absl::StatusOr<size_t> ShardClient::TargetOf(const Span& span) const {
  for (size_t target = 0; target < targets_.size(); ++target) {
    if (targets_[target].node.Contains(span)) {
      return target;
    }
  }
  return absl::InternalError(
      absl::StrCat("a gradient of micro-batches [", span.first, ", ",
                   span.end(), "), which no target of the pass holds"));
}

uint64_t ShardClient::Progress() const {
  uint64_t progress = 0;
  for (const Links& link : links_) {
    link.fetch->AssertHeld();
    link.push->AssertHeld();
    progress += link.fetch->fetched_bytes() + link.push->progress();
  }
  return progress;
}

std::string ShardClient::ChunkName(uint32_t chunk) const {
  return absl::StrCat("chunk ", chunk, " of ",
                      placement_->table().tensor_of(chunk).name);
}

std::string ShardClient::MissingUnit(uint32_t unit) const {
  for (const Links& link : links_) {
    link.fetch->AssertHeld();
    if (const auto chunk = link.fetch->Missing(unit)) {
      return absl::StrCat(link.fetch->server().name, ": unit ",
                          placement_->table().layout().units[unit].name, ", ",
                          ChunkName(*chunk), ", for step ", identity_.step);
    }
  }
  return "nothing";
}

std::string ShardClient::MissingAck() const {
  for (const Links& link : links_) {
    link.push->AssertHeld();
    const BulkItem* const oldest = link.push->Oldest();
    if (oldest != nullptr) {
      return absl::StrCat(
          link.push->server().name, ": ",
          link.push->greeted() ? "acknowledgement of " : "credit to send ",
          ChunkName(oldest->chunk), ", micro-batches [", oldest->span.first,
          ", ", oldest->span.end(), ") in step ", identity_.step);
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
  for (const Links& link : links_) {
    link.fetch->AssertHeld();
    bytes += link.fetch->fetched_bytes();
  }
  return bytes;
}

uint64_t ShardClient::pushed_bytes() const {
  MutexLock lock(&state_->mutex);
  uint64_t bytes = pushed_before_;
  for (const Links& link : links_) {
    link.push->AssertHeld();
    bytes += link.push->pushed_bytes();
  }
  return bytes;
}

uint64_t ShardClient::progress() const {
  MutexLock lock(&state_->mutex);
  return Progress();
}

}  // namespace ballast
