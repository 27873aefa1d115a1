// SPDX-License-Identifier: Apache-2.0
// The Push stream to one server. Gradients wait in host memory until the server
// has granted credit, go out with as many as are ready in one message, and are
// kept until they are acknowledged.

#pragma once

#include <grpcpp/channel.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "offload/arena.h"
#include "proto/bulk.h"
#include "rpc/raw_stream.h"
#include "worker/client/pass_state.h"
#include "worker/client/placement_map.h"

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

// One thread calls Open, Push, Close and Break; the rest is thread-safe.
class PushLink {
 public:
  // `state` outlives the link.
  PushLink(const ServerAddress& server,
           const std::shared_ptr<grpc::Channel>& channel, PassState* state);
  ~PushLink();

  // Opens a stream that lasts at most `timeout`. The link must be idle.
  void Open(const PassIdentity& identity, absl::Duration timeout);
  // Queues a gradient; what goes wrong fails the state.
  // shared: the link holds it until the acknowledgement, gRPC until it is sent.
  void Push(const BulkItem& item,
            std::shared_ptr<const StagedGradient> gradient);
  // Ends the stream, which must be Idle.
  absl::Status Close();
  // Breaks the stream off; nothing is held any more when it returns.
  void Break();
  // Tells clang's analysis that the caller holds the pass's mutex, which it
  // knows by another name.
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK(state_.mutex) {}
  // For breaking it off from another thread; null when there is none.
  std::shared_ptr<RawStream> stream() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    return stream_;
  }
  // Greeted, and everything acknowledged.
  bool Idle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // The oldest gradient not acknowledged: chunk id; -1 for none.
  int64_t OldestChunk() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  const std::string& name() const { return server_.name; }
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
    BulkItem item;
    std::shared_ptr<const StagedGradient> gradient;
  };

  void RunWriter();
  void RunReader();
  // What the next message takes off the queue; empty: wait.
  std::vector<Piece> NextPieces() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  absl::Status Take(const grpc::ByteBuffer& buffer);
  absl::Status Acknowledge(const BulkHeader& header);

  const ServerAddress server_;
  const std::shared_ptr<grpc::Channel> channel_;
  PassState& state_;
  CondVar writer_work_;
  CondVar reader_work_;
  PassIdentity identity_ ABSL_GUARDED_BY(state_.mutex);
  // shared: two threads of the link and the step's use it at once, and whoever
  // lets go last ends it.
  std::shared_ptr<RawStream> stream_ ABSL_GUARDED_BY(state_.mutex);
  bool greeted_ ABSL_GUARDED_BY(state_.mutex) = false;
  bool writing_ ABSL_GUARDED_BY(state_.mutex) = false;
  bool reading_ ABSL_GUARDED_BY(state_.mutex) = false;
  bool broken_ ABSL_GUARDED_BY(state_.mutex) = false;
  bool stopping_ ABSL_GUARDED_BY(state_.mutex) = false;
  uint64_t credit_ ABSL_GUARDED_BY(state_.mutex) = 0;
  uint64_t next_sequence_ ABSL_GUARDED_BY(state_.mutex) = 1;
  std::deque<Piece> queue_ ABSL_GUARDED_BY(state_.mutex);
  // By the sequence of their message.
  std::map<uint64_t, std::vector<Piece>> unacknowledged_
      ABSL_GUARDED_BY(state_.mutex);
  uint64_t pushed_bytes_ ABSL_GUARDED_BY(state_.mutex) = 0;
  uint64_t progress_ ABSL_GUARDED_BY(state_.mutex) = 0;
  std::thread writer_;
  std::thread reader_;
};

}  // namespace ballast
