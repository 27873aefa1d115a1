// SPDX-License-Identifier: Apache-2.0
// The Fetch streams: answers each chunk as soon as it is there at the version
// asked for, straight from the memory it lives in, and reads ahead what the
// requests will want next.
//
// A stream has one reply on its way at a time, so a slow reader holds one
// reply's memory and nobody else waits for it. Tools (incarnation 0) get
// copies. Runs on the engine's thread.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "absl/time/time.h"
#include "ps/shard/bulk_stream.h"
#include "ps/shard/chunk_store.h"
#include "ps/shard/mailbox.h"
#include "ps/shard/shard_view.h"

namespace ballast {

class FetchServer final : public BulkStreamHandler {
 public:
  // `view` outlives this.
  FetchServer(const ShardView* view, std::shared_ptr<Mailbox> mailbox)
      : view_(view), mailbox_(std::move(mailbox)) {}
  // From now on chunks can be asked for; before that requests wait.
  void set_chunks(ChunkStore* chunks) { chunks_ = chunks; }
  // The chunks are going: ends every stream, replies on their way too.
  void Reset(const absl::Status& why);

  void OnOpen(uint64_t id, std::shared_ptr<BulkStream> stream) override;
  void OnMessage(uint64_t id, absl::StatusOr<BulkMessage> message) override;
  void OnHalfClose(uint64_t id) override;
  void OnWritten(uint64_t id) override;
  void OnGone(uint64_t id) override;

  // Answers what can be answered and reads ahead.
  void Pump(absl::Time now);
  // The update to `version` needs memory that replies on their way hold: breaks
  // off streams that are slow to take one. No worker of the step still reads an
  // older version, so those get little patience.
  void CancelSlow(uint64_t version, absl::Time now);

  uint64_t sent_bytes() const { return sent_bytes_; }

 private:
  struct Request {
    BulkHeader header;
    size_t next = 0;   // Items before it are answered.
    absl::Time since;  // When it came, about.
  };
  struct Stream {
    std::shared_ptr<BulkStream> link;
    std::deque<Request> requests;
    size_t items = 0;  // Of `requests`.
    std::deque<grpc::ByteBuffer> errors;
    std::optional<absl::Time> writing_since;
    uint64_t writing_version = 0;  // Of the reply on its way.
    bool half_closed = false;
    bool finished = false;
    // Images that later items name. weak: memory may be needed elsewhere.
    std::map<uint32_t, std::weak_ptr<Image>> ahead;
  };
  // One item, resolved against what is there.
  struct Answer {
    absl::Status status;
    bool ready = false;
    BulkItem item;
    BulkPayload payload;
    uint64_t version = 0;
    bool from_window = false;
  };

  void PumpStream(Stream* stream, absl::Time now);
  bool WriteReply(Stream* stream, absl::Time now);
  void PopRequest(Stream* stream);
  void Fail(Stream* stream, const absl::Status& status);
  // `first`: nothing goes before it, so it may take any memory it needs.
  Answer Resolve(const BulkHeader& header, const BulkItem& item, bool first);
  // It names a timeline or a placement that the coordinator has not told us.
  bool IsEarly(const BulkHeader& header) const;
  absl::Status CheckRequest(const BulkHeader& header) const;
  absl::Status CheckItem(const BulkItem& item, const ChunkState& chunk) const;
  BulkPayload Alias(const ChunkState& chunk,
                    const std::shared_ptr<Image>& image, uint64_t offset,
                    uint64_t bytes);
  std::optional<BulkPayload> Copy(const Image& image, uint64_t offset,
                                  uint64_t bytes);
  void ReadAhead(Stream* stream);
  void Await(Stream* stream, ChunkState* chunk);
  void Unawait(Stream* stream, uint32_t chunk);

  const ShardView* const view_;
  const std::shared_ptr<Mailbox> mailbox_;
  ChunkStore* chunks_ = nullptr;
  std::map<uint64_t, Stream> streams_;
  uint64_t sent_bytes_ = 0;
  absl::Time now_ = absl::InfinitePast();  // Of the last Pump.
};

}  // namespace ballast
