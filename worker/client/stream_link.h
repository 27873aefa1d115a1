// SPDX-License-Identifier: Apache-2.0
// One stream to one server: a thread that writes what its user has ready, and
// one that reads what its user waits for, so that nobody else ever blocks on
// the network. A stream lasts one pass; when it breaks, the whole pass fails.

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "rpc/bulk_message.h"
#include "rpc/raw_stream.h"
#include "worker/client/pass_state.h"

namespace ballast {

// What a stream is for. The first two are called under the pass's lock.
class StreamUser {
 public:
  virtual ~StreamUser() = default;
  // The next message to send, if there is one now.
  virtual std::optional<grpc::ByteBuffer> NextMessage() = 0;
  // Whether the server owes a message.
  virtual bool AwaitsMessage() const = 0;
  // On the reading thread, without the lock. An error breaks the stream.
  virtual absl::Status Take(const BulkMessage& message) = 0;
};

// One thread calls Open and Break; the rest is thread-safe. Ends before its
// user, whose last member it should be.
class StreamLink {
 public:
  // `state` and `user` outlive the link.
  StreamLink(const std::string& server, const std::string& address,
             const char* method, PassState* state, StreamUser* user);
  ~StreamLink();

  // The link must be idle. Blocks for nothing; a server that cannot be reached
  // fails the state.
  void Open();
  // Ends the stream at once: nothing is written or read any more when it
  // returns.
  void Break();

  // Tells clang's analysis that the caller holds the pass's mutex, which it
  // knows by another name.
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK(state_.mutex) {}
  // The user has something to send or to await.
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) { work_.NotifyAll(); }
  // Whether a stream was opened and has not failed.
  bool IsOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    return stream_ != nullptr && !broken_;
  }
  // For cancelling from another thread; null when there is none.
  std::shared_ptr<RawStream> stream() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex) {
    return stream_;
  }

 private:
  void RunWriter();
  void RunReader();

  const std::string server_;
  const std::string address_;
  std::shared_ptr<grpc::Channel> channel_;  // Of the thread that calls Open.
  const char* const method_;
  PassState& state_;
  StreamUser& user_;
  CondVar work_;
  // shared: both threads and the owner's use it at once, and whoever lets go
  // last ends it.
  std::shared_ptr<RawStream> stream_ ABSL_GUARDED_BY(state_.mutex);
  bool broken_ ABSL_GUARDED_BY(state_.mutex) = false;
  bool writing_ ABSL_GUARDED_BY(state_.mutex) = false;
  bool reading_ ABSL_GUARDED_BY(state_.mutex) = false;
  bool stopping_ ABSL_GUARDED_BY(state_.mutex) = false;
  std::thread writer_;
  std::thread reader_;
};

}  // namespace ballast
