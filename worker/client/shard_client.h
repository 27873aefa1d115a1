// SPDX-License-Identifier: Apache-2.0
// A worker's view of all shard servers: weights of a unit in, gradients of a
// tensor out, both by chunk, on streams that last one pass. Whether something
// was asked for ahead of time changes when it arrives and nothing else.
//
// A server that is gone fails the pass at once. Every wait is bounded: when no
// server has answered anything for Options::silence_max, the wait ends with
// DEADLINE_EXCEEDED and says who waits for whom and for what.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/span.h"
#include "worker/client/pass_state.h"
#include "worker/client/placement_map.h"
#include "worker/step/step_io.h"

namespace ballast {

class FetchLink;
class PushLink;
class StagedGradient;

// The thread that runs the step calls everything but what is marked.
class ShardClient : public WeightSource, public GradientSink {
 public:
  struct Options {
    std::string name;            // "worker-0", for messages.
    uint64_t staging_bytes = 0;  // Of gradients on their way out.
    absl::Duration silence_max = absl::Seconds(60);
    Device* device = nullptr;  // Outlives the client.
  };

  // Takes the staging memory. Errors: RESOURCE_EXHAUSTED  the system refuses.
  static absl::StatusOr<std::unique_ptr<ShardClient>> Create(
      const Options& options);
  ~ShardClient() override;

  // From now on talks to these servers; connections to lives that stay are
  // kept. No pass may be open.
  // shared: the caller's thread hands it over and keeps it.
  void SetPlacement(std::shared_ptr<const PlacementMap> placement);
  // Makes new connections to all, in case that one leads nowhere.
  void Reconnect();

  // Gradients that lie in `node`, and the servers (indices) that get them.
  struct Target {
    Span node;
    std::vector<uint32_t> servers;
  };
  // That every gradient of a target was acknowledged by this life of a server.
  struct Ack {
    size_t target = 0;
    uint32_t server = 0;
    uint64_t incarnation = 0;
  };

  // Opens pass `pass` (they grow); no targets when only weights are read. The
  // identity's placement version is filled in.
  // Errors: CANCELLED    it was cancelled before.
  //         UNAVAILABLE  a server that owns chunks is not in.
  absl::Status Begin(uint64_t pass, PassIdentity identity,
                     std::vector<Target> targets);
  // After the last Push: blocks until every gradient is acknowledged, or a
  // server has failed and the others have had a moment to answer.
  // Errors: those of the servers; DEADLINE_EXCEEDED  see above.
  absl::Status End();
  // Ends the streams: nothing is written or held any more.
  void Drop();
  // Of the last pass, once End was called and until the next Begin.
  std::vector<Ack> Acks() const;
  // Any thread: makes that pass and all before it fail with CANCELLED, soon
  // when it is open, else when it begins; a later one does not notice.
  void Cancel(uint64_t pass);

  absl::Status Prefetch(uint32_t unit, uint64_t version, StreamMark after,
                        absl::Span<std::byte* const> destination) override;
  absl::Status Wait(uint32_t unit) override;
  void Abandon() override;
  absl::Status Push(const GradientPiece& piece) override;

  // Any thread: what the step's thread waits for now, and since when; empty
  // when it does not.
  struct Waiting {
    std::string what;
    absl::Time since;
  };
  Waiting waiting() const;
  // Any thread: payload bytes since the client was made.
  uint64_t fetched_bytes() const;
  uint64_t pushed_bytes() const;
  // Any thread: grows when anything arrives.
  uint64_t progress() const;
  // Time that Push and End spent waiting.
  absl::Duration push_waited() const { return push_waited_; }

 private:
  explicit ShardClient(const Options& options, std::unique_ptr<Arena> staging);

  // The links to one server that owns chunks.
  struct Links {
    uint32_t server = 0;  // Index into the placement's.
    std::unique_ptr<FetchLink> fetch;
    std::unique_ptr<PushLink> push;
  };

  // Makes links_ what placement_ says; `keep` those of lives that stay.
  void Relink(bool keep);
  // Blocks until `done` says so; `what` names what is missing. Both run under
  // the lock.
  template <typename Done, typename What>
  absl::Status Await(const Done& done, const What& what);
  // Lets the servers that have not failed give their last answers.
  void AwaitOthers();
  uint64_t Progress() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex);
  absl::StatusOr<std::shared_ptr<const StagedGradient>> Stage(const float* data,
                                                              uint64_t elems,
                                                              uint32_t chunk);
  // Index into targets_ of the one that holds `span`.
  absl::StatusOr<size_t> TargetOf(const Span& span) const;
  // "chunk 7 of h.3.attn.weight".
  std::string ChunkName(uint32_t chunk) const;
  std::string MissingUnit(uint32_t unit) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex);
  std::string MissingAck() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex);

  const Options options_;
  // shared: gradients that gRPC still sends hold it.
  const std::shared_ptr<PassState> state_;
  // shared: see SetPlacement.
  std::shared_ptr<const PlacementMap> placement_;
  // The step's thread writes it under the lock and reads it freely; other
  // threads read it under the lock.
  std::vector<Links> links_;
  PassIdentity identity_;
  std::vector<Target> targets_;
  // links_ by server, null for one that owns nothing; and by target and server,
  // whether it goes there.
  std::vector<Links*> by_server_;
  std::vector<std::vector<bool>> wanted_;
  bool ended_ = false;  // End was called.
  uint64_t pass_ ABSL_GUARDED_BY(state_->mutex) = 0;
  uint64_t cancelled_ ABSL_GUARDED_BY(state_->mutex) = 0;  // This and earlier.
  Waiting waiting_ ABSL_GUARDED_BY(state_->mutex);
  // Of links that are gone.
  uint64_t fetched_before_ ABSL_GUARDED_BY(state_->mutex) = 0;
  uint64_t pushed_before_ ABSL_GUARDED_BY(state_->mutex) = 0;
  absl::Duration push_waited_;
};

}  // namespace ballast
