// SPDX-License-Identifier: Apache-2.0
// The Fetch stream to one server: what is asked for goes out in order, and each
// payload that comes in is copied once, straight to where the tensor lies on
// the device.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "offload/device.h"
#include "rpc/bulk_message.h"
#include "worker/client/pass_state.h"
#include "worker/client/placement_map.h"
#include "worker/client/stream_link.h"

namespace ballast {

// One thread calls Open, Request and Break; the rest is thread-safe.
class FetchLink : private StreamUser {
 public:
  // A chunk and where it goes.
  struct Wanted {
    uint32_t chunk = 0;
    uint64_t bytes = 0;
    std::byte* destination = nullptr;  // Device memory.
  };

  // `device` and `state` outlive the link.
  FetchLink(const ServerAddress& server, Device* device, PassState* state);

  void Open(const PassIdentity& identity);
  // Asks for chunks at `version`; a reply that goes wrong fails the state.
  absl::Status Request(uint32_t unit, uint64_t version, StreamMark after,
                       const std::vector<Wanted>& wanted);
  // Breaks the stream off and blocks until nothing is written any more.
  void Break();

  // As StreamLink::AssertHeld.
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK(state_.mutex) {}
  std::shared_ptr<RawStream> stream() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    link_.AssertHeld();
    return link_.stream();
  }
  // The first chunk of a unit that has not come; nullopt: all are here.
  std::optional<uint32_t> Missing(uint32_t unit) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  const ServerAddress& server() const { return server_; }
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
    std::map<uint32_t, Wanted> wanted;  // By chunk.
  };

  std::optional<grpc::ByteBuffer> NextMessage() override;
  bool AwaitsMessage() const override;
  absl::Status Take(const BulkMessage& message) override;
  // Copies item `index` of a reply to where `wanted` says.
  void Copy(const BulkMessage& message, size_t index, const Wanted& wanted,
            StreamMark after);

  const ServerAddress server_;
  Device& device_;
  PassState& state_;
  PassIdentity identity_;
  uint64_t next_sequence_ = 1;
  std::deque<grpc::ByteBuffer> requests_ ABSL_GUARDED_BY(state_.mutex);
  // In the order of their requests, which is the order of the answers.
  std::deque<Outstanding> outstanding_ ABSL_GUARDED_BY(state_.mutex);
  uint64_t fetched_bytes_ ABSL_GUARDED_BY(state_.mutex) = 0;
  StreamLink link_;
};

}  // namespace ballast
