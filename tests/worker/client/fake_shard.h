// SPDX-License-Identifier: Apache-2.0
// A shard server without state: weights from a callback, gradients into
// memory. Speaks the real streams, so that the client is tested over gRPC.

#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "common/mutex.h"
#include "proto/ballast.grpc.pb.h"
#include "rpc/bulk_message.h"
#include "rpc/endpoint.h"
#include "worker/step/local_run.h"

namespace ballast::testing {

// Answers each message with the messages that `answer` makes of it.
class AnsweringReactor
    : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  using Answer =
      std::function<std::vector<grpc::ByteBuffer>(const BulkMessage&)>;

  // `held_ends` (may be null): counts the streams that the client has ended,
  // which then stay open until the client breaks them off.
  AnsweringReactor(std::vector<grpc::ByteBuffer> greeting, Answer answer,
                   std::atomic<int>* held_ends = nullptr)
      : answer_(std::move(answer)),
        held_ends_(held_ends),
        reasons_to_end_(held_ends == nullptr ? 1 : 2),
        out_(greeting.begin(), greeting.end()) {
    Next();
  }
  void OnReadDone(bool ok) override {
    if (!ok) {
      if (held_ends_ != nullptr) {
        ++*held_ends_;
      }
      MayEnd();
      return;
    }
    for (grpc::ByteBuffer& reply : answer_(BulkMessage::Parse(in_).value())) {
      out_.push_back(std::move(reply));
    }
    Next();
  }
  void OnWriteDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::CANCELLED);
      return;
    }
    out_.pop_front();
    Next();
  }
  void OnCancel() override {
    if (held_ends_ != nullptr) {
      MayEnd();
    }
  }
  void OnDone() override { delete this; }

 private:
  void MayEnd() {
    if (--reasons_to_end_ == 0) {
      Finish(grpc::Status::OK);
    }
  }
  void Next() {
    if (out_.empty()) {
      StartRead(&in_);
    } else {
      StartWrite(&out_.front());
    }
  }

  const Answer answer_;
  std::atomic<int>* const held_ends_;
  std::atomic<int> reasons_to_end_;  // No more reads, cancelled.
  std::deque<grpc::ByteBuffer> out_;
  grpc::ByteBuffer in_;
};

class FakeShard
    : public v1::Shard::WithRawCallbackMethod_Fetch<
          v1::Shard::WithRawCallbackMethod_Push<v1::Shard::Service>> {
 public:
  static constexpr uint64_t kLife = 9;
  struct Options {
    const ChunkTable* table = nullptr;
    TensorValues values = {};
    uint64_t credit_bytes = 1 << 20;
    bool silent = false;           // Never answers a fetch.
    bool hold_end = false;         // Never ends a Fetch stream.
    bool deaf = false;             // Never acknowledges a push.
    uint64_t incarnation = kLife;  // In answers to fetches.
    uint64_t ack_incarnation = kLife;
    absl::Status fetch_error = {};  // Answers every fetch with it.
  };
  explicit FakeShard(Options options) : options_(std::move(options)) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Fetch(
      grpc::CallbackServerContext*) override {
    ++streams_;
    return new AnsweringReactor(
        {}, [this](const BulkMessage& request) { return Serve(request); },
        options_.hold_end ? &held_ends_ : nullptr);
  }
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Push(
      grpc::CallbackServerContext*) override {
    ++streams_;
    BulkHeader hello;
    hello.kind = BulkKind::kHello;
    hello.credit_bytes = options_.credit_bytes;
    return new AnsweringReactor(
        {MakeBulkMessage(hello)},
        [this](const BulkMessage& push) { return Take(push); });
  }

  // Opened so far.
  int streams() const { return streams_; }

  struct Gradient {
    BulkItem item;
    uint64_t step = 0;
    std::vector<float> values;
  };
  std::vector<Gradient> gradients() {
    MutexLock lock(&mutex_);
    return gradients_;
  }

 private:
  std::vector<grpc::ByteBuffer> Serve(const BulkMessage& request) {
    std::vector<grpc::ByteBuffer> replies;
    if (options_.silent) {
      return replies;
    }
    if (!options_.fetch_error.ok()) {
      return {MakeBulkError(request.header().sequence, options_.fetch_error)};
    }
    for (const BulkItem& item : request.header().items) {
      const Chunk& chunk = options_.table->chunk(item.chunk);
      const TensorSpec& tensor = options_.table->tensor_of(item.chunk);
      auto whole = std::make_shared<std::vector<float>>(tensor.elem_count());
      options_.values(tensor, absl::MakeSpan(*whole));
      BulkHeader header;
      header.kind = BulkKind::kFetchReply;
      header.incarnation = options_.incarnation;
      header.step = request.header().step;
      header.sequence = request.header().sequence;
      header.items.push_back(item);
      header.items[0].elem_count = chunk.elem_count();
      header.items[0].payload_bytes = chunk.elem_count() * sizeof(float);
      replies.push_back(MakeBulkMessage(
          header,
          {{reinterpret_cast<const std::byte*>(whole->data() + chunk.begin),
            header.items[0].payload_bytes, whole}}));
    }
    return replies;
  }

  std::vector<grpc::ByteBuffer> Take(const BulkMessage& push) {
    if (options_.deaf) {
      return {};
    }
    BulkHeader ack = push.header();
    ack.kind = BulkKind::kPushAck;
    ack.incarnation = options_.ack_incarnation;
    ack.credit_bytes = push.header().payload_bytes();
    EXPECT_LE(ack.credit_bytes, options_.credit_bytes);
    MutexLock lock(&mutex_);
    for (size_t i = 0; i < ack.items.size(); ++i) {
      Gradient& gradient = gradients_.emplace_back();
      gradient.item = ack.items[i];
      gradient.step = push.header().step;
      gradient.values.resize(ack.items[i].elem_count);
      push.CopyPayload(i, reinterpret_cast<std::byte*>(gradient.values.data()));
      ack.items[i].payload_bytes = 0;
    }
    return {MakeBulkMessage(ack)};
  }

  const Options options_;
  std::atomic<int> held_ends_ = 0;
  std::atomic<int> streams_ = 0;
  Mutex mutex_;
  std::vector<Gradient> gradients_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::testing
