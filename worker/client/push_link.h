// SPDX-License-Identifier: Apache-2.0
// The Push stream to one server. Gradients wait in host memory until the server
// has granted credit, go out with as many as are ready in one message, and are
// kept until the life they were pushed to has acknowledged them.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "offload/arena.h"
#include "proto/bulk.h"
#include "worker/client/pass_state.h"
#include "worker/client/placement_map.h"
#include "worker/client/stream_link.h"

namespace ballast {

// One chunk's gradient in host memory; wakes whoever waits for the memory.
class StagedGradient {
 public:
  // shared: gRPC may let go of the last slice after the link is gone.
  StagedGradient(ArenaBuffer buffer, std::shared_ptr<PassState> state)
      : state_(std::move(state)), buffer_(std::move(buffer)) {}
  // Never under the state's lock.
  ~StagedGradient();
  std::byte* data() const { return buffer_.data(); }

 private:
  const std::shared_ptr<PassState> state_;  // Goes last.
  ArenaBuffer buffer_;
};

// One thread calls Open, Push and Break; the rest is thread-safe.
class PushLink : private StreamUser {
 public:
  // `state` outlives the link.
  PushLink(const ServerAddress& server, PassState* state);

  // Opens a stream for gradients of `targets` kinds, counted apart.
  void Open(const PassIdentity& identity, size_t targets);
  // Queues a gradient; what goes wrong fails the state.
  // shared: the link holds it until the acknowledgement, gRPC until it is sent.
  void Push(size_t target, const BulkItem& item,
            std::shared_ptr<const StagedGradient> gradient);
  // Breaks the stream off; nothing is held any more when it returns.
  void Break();

  // As StreamLink::AssertHeld.
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK(state_.mutex) {}
  std::shared_ptr<RawStream> stream() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    link_.AssertHeld();
    return link_.stream();
  }
  // Whether the server may still answer.
  bool IsOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    link_.AssertHeld();
    return link_.IsOpen();
  }
  // Whether the server has granted credit yet.
  bool greeted() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    return greeted_;
  }
  // Everything that was pushed is acknowledged.
  bool Idle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    return queue_.empty() && unacknowledged_.empty();
  }
  // The oldest gradient not acknowledged; null for none.
  const BulkItem* Oldest() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // Whether all that was pushed of `target` since Open is acknowledged by
  // server().incarnation; also after Break.
  bool HasAll(size_t target) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    return open_[target] == 0;
  }
  const ServerAddress& server() const { return server_; }
  // Payload bytes so far.
  uint64_t pushed_bytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    return pushed_bytes_;
  }
  // Acknowledgements so far: the wait for the rest is not stuck.
  uint64_t progress() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    return progress_;
  }

 private:
  struct Piece {
    size_t target = 0;
    BulkItem item;
    std::shared_ptr<const StagedGradient> gradient;
  };

  std::optional<grpc::ByteBuffer> NextMessage() override;
  bool AwaitsMessage() const override;
  absl::Status Take(const BulkMessage& message) override;
  // What the next message takes off the queue; empty: wait.
  std::vector<Piece> NextPieces() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  absl::Status Acknowledge(const BulkHeader& header);

  const ServerAddress server_;
  PassState& state_;
  PassIdentity identity_ ABSL_GUARDED_BY(state_.mutex);
  bool greeted_ ABSL_GUARDED_BY(state_.mutex) = false;
  uint64_t credit_ ABSL_GUARDED_BY(state_.mutex) = 0;
  uint64_t next_sequence_ ABSL_GUARDED_BY(state_.mutex) = 1;
  std::deque<Piece> queue_ ABSL_GUARDED_BY(state_.mutex);
  // By the sequence of their message.
  std::map<uint64_t, std::vector<Piece>> unacknowledged_
      ABSL_GUARDED_BY(state_.mutex);
  // By target: pushed and not acknowledged.
  std::vector<uint64_t> open_ ABSL_GUARDED_BY(state_.mutex);
  uint64_t pushed_bytes_ ABSL_GUARDED_BY(state_.mutex) = 0;
  uint64_t progress_ ABSL_GUARDED_BY(state_.mutex) = 0;
  StreamLink link_;
};

}  // namespace ballast
