// SPDX-License-Identifier: Apache-2.0
// A worker's view of all shard servers: weights of a unit in, gradients of a
// tensor out, both by chunk, on streams that last one pass. Whether something
// was asked for ahead of time changes when it arrives and nothing else.
//
// Every wait is bounded: when no server has answered anything for
// Options::silence_max, the wait ends with DEADLINE_EXCEEDED and says who waits
// for whom and for what.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
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

  // From now on talks to these servers. No pass may be open.
  void SetPlacement(PlacementMap placement);
  // Null before the first SetPlacement.
  const PlacementMap* placement() const { return placement_.get(); }

  // Opens a pass; `push` when gradients will follow. Lifts an earlier Cancel.
  // The identity's placement version is filled in.
  void Begin(PassIdentity identity, bool push);
  // Blocks until every gradient is acknowledged, then ends the streams.
  // Errors: those of the servers; DEADLINE_EXCEEDED  see above.
  absl::Status End();
  // Breaks the pass off: nothing is written or held any more.
  void Drop();
  // Any thread: makes the pass in progress fail with CANCELLED soon.
  void Cancel();

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
  // Time that Push and End spent waiting.
  absl::Duration push_waited() const { return push_waited_; }

 private:
  explicit ShardClient(const Options& options, std::unique_ptr<Arena> staging);

  // Blocks until `done` says so; `what` names what is missing. Both run under
  // the lock.
  template <typename Done, typename What>
  absl::Status Await(const Done& done, const What& what);
  // Grows when anything arrives.
  uint64_t Progress() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex);
  absl::StatusOr<std::shared_ptr<const StagedGradient>> Stage(const float* data,
                                                              uint64_t elems,
                                                              uint32_t chunk);
  std::string MissingUnit(uint32_t unit) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex);
  std::string MissingAck() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex);

  const Options options_;
  // shared: gradients that gRPC still sends hold it.
  const std::shared_ptr<PassState> state_;
  std::unique_ptr<PlacementMap> placement_;
  // By server. The step's thread writes them under the lock and reads them
  // freely; other threads read them under the lock.
  std::vector<std::unique_ptr<FetchLink>> fetch_;
  std::vector<std::unique_ptr<PushLink>> push_;
  PassIdentity identity_;
  bool pushing_ = false;
  Waiting waiting_ ABSL_GUARDED_BY(state_->mutex);
  // Of links that are gone.
  uint64_t fetched_before_ ABSL_GUARDED_BY(state_->mutex) = 0;
  uint64_t pushed_before_ ABSL_GUARDED_BY(state_->mutex) = 0;
  absl::Duration push_waited_;
};

}  // namespace ballast
