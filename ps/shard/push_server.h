// SPDX-License-Identifier: Apache-2.0
// The Push streams: checks each gradient against what the run expects, hands it
// to the step's sums straight from the received slices, and acknowledges it
// when it is taken.
//
// What a worker has pushed and not yet got acknowledged stays within its
// credit, which is what the memory budget counts. A gradient for which there is
// no room waits in its message until others went to the log; its stream waits
// with it, other streams do not. Runs on the engine's thread.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "ps/shard/bulk_stream.h"
#include "ps/shard/gradient_store.h"
#include "ps/shard/shard_view.h"

namespace ballast {

class PushServer final : public BulkStreamHandler {
 public:
  explicit PushServer(const ShardView* view) : view_(view) {}
  // Chunk id to place in the shapes; -1: not ours. Set when loaded.
  void set_positions(std::vector<int64_t> positions);

  // The step's sums are going: ends every stream.
  void Reset(const absl::Status& why);

  void OnOpen(uint64_t id, std::shared_ptr<BulkStream> stream) override;
  void OnMessage(uint64_t id, absl::StatusOr<BulkMessage> message) override;
  void OnHalfClose(uint64_t id) override;
  void OnWritten(uint64_t id) override;
  void OnGone(uint64_t id) override;

  // Takes what can be taken into `gradients` (null: no step collects).
  void Pump(StepGradients* gradients, absl::Time now);

  uint64_t taken_bytes() const { return taken_bytes_; }

 private:
  struct Stream {
    std::shared_ptr<BulkStream> link;
    std::deque<BulkMessage> messages;
    size_t next_item = 0;                   // Of the front message.
    bool checked = false;                   // The front message is.
    std::optional<absl::Time> early_since;  // The front came before its step.
    std::deque<grpc::ByteBuffer> replies;
    uint64_t credit = 0;  // Granted; 0: not yet.
    uint64_t held = 0;    // Payload bytes of `messages`.
    uint64_t held_items = 0;
    bool writing = false;
    bool half_closed = false;
    bool finished = false;
  };
  enum class Verdict {
    kTake,
    kKnown,  // Acknowledge without taking: its step is over.
    kEarly,  // The coordinator has not told us yet.
    kRefuse,
  };

  void Grant(Stream* stream);
  void PumpStream(Stream* stream, StepGradients* gradients, absl::Time now);
  // True when the front message is dealt with.
  bool Process(Stream* stream, StepGradients* gradients, absl::Time now);
  bool TakeItems(Stream* stream, StepGradients* gradients);
  Verdict Judge(const BulkHeader& header, absl::Status* why) const;
  absl::Status CheckItem(const BulkItem& item) const;
  void Refuse(Stream* stream, const absl::Status& why);
  void Acknowledge(Stream* stream, bool with_names);

  const ShardView* const view_;
  std::vector<int64_t> positions_;
  uint64_t largest_ = 0;  // Bytes of the largest gradient of ours.
  std::map<uint64_t, Stream> streams_;
  uint64_t granted_ = 0;
  uint64_t taken_bytes_ = 0;
};

}  // namespace ballast
