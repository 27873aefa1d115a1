// SPDX-License-Identifier: Apache-2.0
// The Fetch stream to one server: requests go out from the step's thread,
// replies come in on a thread of the link's own, which copies each payload
// once, straight to where the tensor lies on the device.

#pragma once

#include <grpcpp/channel.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "offload/device.h"
#include "rpc/bulk_message.h"
#include "rpc/raw_stream.h"
#include "worker/client/pass_state.h"
#include "worker/client/placement_map.h"

namespace ballast {

// One thread calls Open, Request, Close and Break; the rest is thread-safe.
class FetchLink {
 public:
  // A chunk and where it goes.
  struct Wanted {
    uint32_t chunk = 0;
    uint64_t bytes = 0;
    std::byte* destination = nullptr;  // Device memory.
  };

  // `device` and `state` outlive the link.
  FetchLink(const ServerAddress& server,
            const std::shared_ptr<grpc::Channel>& channel, Device* device,
            PassState* state);
  ~FetchLink();

  // Opens a stream that lasts at most `timeout`. The link must be idle.
  void Open(const PassIdentity& identity, absl::Duration timeout);
  // Asks for chunks at `version`; a reply that goes wrong fails the state.
  absl::Status Request(uint32_t unit, uint64_t version, StreamMark after,
                       const std::vector<Wanted>& wanted);
  // Ends the stream, whose requests must all be answered.
  absl::Status Close();
  // Breaks the stream off and blocks until nothing is written any more.
  void Break();
  // Tells clang's analysis that the caller holds the pass's mutex, which it
  // knows by another name.
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK(state_.mutex) {}
  // For breaking it off from another thread; null when there is none.
  std::shared_ptr<RawStream> stream() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    return stream_;
  }
  bool Pending(uint32_t unit) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  const std::string& name() const { return server_.name; }
  // Payload bytes so far.
  uint64_t fetched_bytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    return fetched_bytes_;
  }

 private:
  struct Outstanding {
    uint32_t unit = 0;
    uint64_t version = 0;
    uint64_t sequence = 0;
    StreamMark after;
    std::unordered_map<uint32_t, Wanted> wanted;
  };

  void Run();
  absl::Status Take(const grpc::ByteBuffer& buffer);
  // Copies item `index` of a reply to where `wanted` says.
  void Copy(const BulkMessage& message, size_t index, const Wanted& wanted,
            StreamMark after);

  const ServerAddress server_;
  const std::shared_ptr<grpc::Channel> channel_;
  Device& device_;
  PassState& state_;
  CondVar work_;
  PassIdentity identity_;
  uint64_t next_sequence_ = 1;
  // shared: the reading thread and the step's thread use it at once, and
  // whoever lets go last ends it.
  std::shared_ptr<RawStream> stream_ ABSL_GUARDED_BY(state_.mutex);
  // In the order of their requests, which is the order of the answers.
  std::deque<Outstanding> outstanding_ ABSL_GUARDED_BY(state_.mutex);
  bool reading_ ABSL_GUARDED_BY(state_.mutex) = false;
  bool stopping_ ABSL_GUARDED_BY(state_.mutex) = false;
  uint64_t fetched_bytes_ ABSL_GUARDED_BY(state_.mutex) = 0;
  std::thread thread_;
};

}  // namespace ballast
