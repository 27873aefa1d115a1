// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "proto/ballast.grpc.pb.h"
#include "rpc/bulk_message.h"
#include "rpc/endpoint.h"
#include "rpc/raw_stream.h"

namespace ballast {
namespace {

using RawShard = v1::Shard::WithRawCallbackMethod_Fetch<v1::Shard::Service>;

// Sends every message back as it came.
class EchoReactor
    : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  EchoReactor() { StartRead(&message_); }
  void OnReadDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::OK);
      return;
    }
    StartWrite(&message_);
  }
  void OnWriteDone(bool ok) override {
    if (ok) {
      StartRead(&message_);
    }
  }
  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer message_;
};

class EchoShard : public RawShard {
 public:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Fetch(
      grpc::CallbackServerContext* /*context*/) override {
    return new EchoReactor();
  }
};

class BulkStreamTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto endpoint = Endpoint::Start("127.0.0.1", 0, {&shard_});
    ASSERT_TRUE(endpoint.ok()) << endpoint.status();
    endpoint_ = std::move(endpoint).value();
  }

  EchoShard shard_;
  std::unique_ptr<Endpoint> endpoint_;
};

TEST_F(BulkStreamTest, CarriesPayloadsThatAliasOurMemoryAndLetsGoOfThem) {
  auto numbers = std::make_shared<std::vector<uint32_t>>(1 << 20);
  std::iota(numbers->begin(), numbers->end(), 0u);
  const auto* bytes = reinterpret_cast<const std::byte*>(numbers->data());
  BulkHeader header;
  header.kind = BulkKind::kPush;
  header.items.resize(2);
  header.items[0].payload_bytes = 12;
  header.items[1].payload_bytes = numbers->size() * 4 - 12;
  const auto stream = RawStream::Open(MakeChannel(endpoint_->address()),
                                      kFetchMethod, absl::Seconds(20));

  ASSERT_TRUE(
      stream
          ->Write(MakeBulkMessage(
              header, {{bytes, 12, numbers},
                       {bytes + 12, header.items[1].payload_bytes, numbers}}))
          .ok());
  const auto reply = stream->Read();
  ASSERT_TRUE(reply.ok()) << reply.status();
  const auto message = BulkMessage::Parse(*reply);
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->header(), header);
  std::vector<uint32_t> copy(numbers->size());
  auto* out = reinterpret_cast<std::byte*>(copy.data());
  message->CopyPayload(0, out);
  message->CopyPayload(1, out + 12);
  EXPECT_EQ(copy, *numbers);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(numbers.use_count(), 1);
}

TEST_F(BulkStreamTest, ErrorsKeepTheirCodeTextAndSequence) {
  const auto stream = RawStream::Open(MakeChannel(endpoint_->address()),
                                      kFetchMethod, absl::Seconds(20));
  ASSERT_TRUE(
      stream->Write(MakeBulkError(7, absl::NotFoundError("no chunk 9"))).ok());
  const auto message = BulkMessage::Parse(stream->Read().value());
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->header().sequence, 7u);
  EXPECT_EQ(message->error(), absl::NotFoundError("no chunk 9"));
}

TEST_F(BulkStreamTest, AReadEndsAtTheDeadline) {
  const auto stream = RawStream::Open(MakeChannel(endpoint_->address()),
                                      kFetchMethod, absl::Milliseconds(200));
  const absl::Time begin = absl::Now();
  const auto reply = stream->Read();
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

TEST_F(BulkStreamTest, CancelEndsABlockedRead) {
  const auto stream = RawStream::Open(MakeChannel(endpoint_->address()),
                                      kFetchMethod, absl::Seconds(30));
  std::thread canceller([&stream] { stream->Cancel(); });
  EXPECT_EQ(stream->Read().status().code(), absl::StatusCode::kCancelled);
  canceller.join();
}

TEST_F(BulkStreamTest, AServerThatIsGoneIsUnavailable) {
  const std::string address = endpoint_->address();
  endpoint_.reset();
  const auto stream =
      RawStream::Open(MakeChannel(address), kFetchMethod, absl::Seconds(20));
  EXPECT_EQ(stream->Read().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(BulkStreamTest, ASecondServerOnThePortIsRefusedNamingIt) {
  const std::string address = endpoint_->address();
  const auto port =
      static_cast<uint32_t>(std::stoi(address.substr(address.find(':') + 1)));
  const auto second = Endpoint::Start("127.0.0.1", port, {});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()),
              ::testing::HasSubstr(address));
}

}  // namespace
}  // namespace ballast
