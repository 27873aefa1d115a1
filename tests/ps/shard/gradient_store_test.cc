// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/gradient_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "kernels/update.h"

namespace ballast {
namespace {

// A log in memory whose completions wait until they are asked for, in any
// order.
class FakeLog final : public GradientLog {
 public:
  absl::StatusOr<LogPosition> Append(const GradientName& name,
                                     const std::byte* payload, uint64_t bytes,
                                     Done done) override {
    const LogPosition position = {0, records_.size(), bytes};
    records_.push_back({name, {payload, payload + bytes}});
    pending_.push_back([done] { done(absl::OkStatus()); });
    return position;
  }
  void Read(const GradientName& name, const LogPosition& position,
            std::byte* payload, Done done) override {
    const auto& [stored, bytes] = records_[position.offset];
    EXPECT_EQ(stored, name);
    pending_.push_back([payload, done, data = bytes] {
      std::memcpy(payload, data.data(), data.size());
      done(absl::OkStatus());
    });
  }
  const LogContents& contents() const override { return contents_; }
  absl::Status AppendMark(const VoteMark&, Done done) override {
    pending_.push_back([done] { done(absl::OkStatus()); });
    return absl::OkStatus();
  }
  void Sync(Done done) override {
    pending_.push_back([done] { done(absl::OkStatus()); });
  }
  void DropThrough(uint64_t) override {}
  uint64_t bytes() const override { return 0; }
  GradientLogStats stats() const override { return {}; }

  bool CompleteOne(std::mt19937_64* random) {
    if (pending_.empty()) {
      return false;
    }
    std::swap(pending_[(*random)() % pending_.size()], pending_.back());
    const auto complete = pending_.back();
    pending_.pop_back();
    complete();
    return true;
  }
  size_t appended() const { return records_.size(); }

 private:
  std::vector<std::pair<GradientName, std::vector<std::byte>>> records_;
  std::vector<std::function<void()>> pending_;
  LogContents contents_;
};

class VectorSource final : public GradientSource {
 public:
  explicit VectorSource(const std::vector<float>& values) : values_(values) {}
  void CopyTo(absl::Span<float> out) const override {
    std::copy(values_.begin(), values_.end(), out.begin());
  }
  void AddTo(absl::Span<float> total) const override {
    AccumulateCpu(values_, total);
  }

 private:
  const std::vector<float>& values_;
};

constexpr uint64_t kElems = 300;

class GradientStoreTest : public ::testing::Test {
 protected:
  // `gradients`: how many of the arena's largest fit.
  void Make(uint64_t gradients, size_t chunks, uint32_t uses) {
    Arena::Options options;
    options.name = "test";
    options.bytes = gradients * (kElems * 4 + 16) / 64 * 64;
    arena_ = *Arena::Create(options);
    scratch_.resize(kElems);
    pool_.arena = arena_.get();
    pool_.scratch = reinterpret_cast<std::byte*>(scratch_.data());
    pool_.log = pool_.spill = &log_;
    pool_.mailbox = mailbox_;
    pool_.fail = [](const absl::Status& status) { ADD_FAILURE() << status; };
    for (size_t i = 0; i < chunks; ++i) {
      shapes_.push_back({static_cast<uint32_t>(i), 7, uses, kElems, 128});
    }
    step_ = std::make_unique<StepGradients>(&pool_, shapes_, 1, 5, micro_);
  }

  // Sum of a node, computed as a worker would.
  std::vector<float> Node(size_t position, uint32_t use, const Span& span) {
    std::vector<float> values(kElems);
    if (span.count == 1) {
      std::mt19937_64 random(position * 1000 + use * 100 + span.first);
      std::normal_distribution<float> normal;
      for (float& value : values) {
        value = normal(random);
      }
      return values;
    }
    values = Node(position, use, LeftChild(span));
    AccumulateCpu(Node(position, use, RightChild(span)),
                  absl::MakeSpan(values));
    return values;
  }

  std::vector<float> Whole(size_t position, uint32_t uses) {
    std::vector<float> total = Node(position, 0, {0, micro_});
    for (uint32_t use = 1; use < uses; ++use) {
      AccumulateCpu(Node(position, use, {0, micro_}), absl::MakeSpan(total));
    }
    return total;
  }

  void Turn() {
    while (step_->Work()) {
    }
    log_.CompleteOne(&random_);
    mailbox_->Run(absl::ZeroDuration());
  }

  const uint32_t micro_ = 6;
  std::mt19937_64 random_{20260101};
  std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>();
  std::unique_ptr<Arena> arena_;
  std::vector<float> scratch_;
  FakeLog log_;
  GradientPool pool_;
  std::vector<GradientShape> shapes_;
  std::unique_ptr<StepGradients> step_;
};

// Any spans in any order, with room for any number of gradients down to one:
// everything is taken and every sum has the bits of the tree.
TEST_F(GradientStoreTest, RoomChangesWhereGradientsWaitAndNoBit) {
  for (const uint64_t room : {1u, 2u, 5u, 100u}) {
    SCOPED_TRACE(room);
    shapes_.clear();
    log_ = FakeLog();
    Make(room, 4, 2);
    struct Push {
      size_t position;
      uint32_t use;
      Span span;
    };
    std::vector<Push> pushes;
    for (size_t position = 0; position < 4; ++position) {
      for (uint32_t use = 0; use < 2; ++use) {
        for (const Span& span : {Span{0, 1}, Span{1, 1}, Span{2, 2}, Span{0, 2},
                                 Span{4, 2}, Span{5, 1}, Span{4, 1}}) {
          pushes.push_back({position, use, span});
        }
      }
    }
    std::shuffle(pushes.begin(), pushes.end(), random_);
    for (const Push& push : pushes) {
      const std::vector<float> values =
          Node(push.position, push.use, push.span);
      int turns = 0;
      while (step_->Offer(push.position, {push.use, push.span}, std::nullopt,
                          VectorSource(values)) ==
             StepGradients::Taken::kNoRoom) {
        ASSERT_LT(++turns, 1000);
        Turn();
      }
    }
    for (int turns = 0; !step_->IsComplete(); ++turns) {
      ASSERT_LT(turns, 1000);
      Turn();
    }
    ExactSum squares;
    for (size_t position = 0; position < 4; ++position) {
      for (int turns = 0; step_->Ready(position).empty(); ++turns) {
        ASSERT_LT(turns, 1000);
        step_->Bring(position, /*now=*/true);
        Turn();
      }
      const std::vector<float> want = Whole(position, 2);
      const absl::Span<const float> is = step_->Ready(position);
      ASSERT_EQ(is.size(), want.size());
      EXPECT_EQ(std::memcmp(is.data(), want.data(), kElems * 4), 0);
      for (size_t begin = 0; begin < kElems; begin += 128) {
        squares.Add(BlockStatsCpu(absl::MakeConstSpan(want).subspan(begin, 128))
                        .sum_squares);
      }
      step_->Forget(position);
    }
    EXPECT_EQ(step_->sum_squares().Encode(), squares.Encode());
    EXPECT_EQ(log_.appended() > 0, room < 100);
    while (log_.CompleteOne(&random_)) {
    }
    mailbox_->Run(absl::ZeroDuration());
    step_.reset();
    EXPECT_EQ(arena_->used_bytes(), 0u);
    EXPECT_EQ(pool_.in_flight, 0u);
  }
}

TEST_F(GradientStoreTest, ARepeatedSpanIsKnownAndCountsOnce) {
  Make(10, 1, 1);
  const std::vector<float> left = Node(0, 0, {0, 4});
  const std::vector<float> right = Node(0, 0, {4, 2});
  const SpanKey left_key = {0, {0, 4}};
  using Taken = StepGradients::Taken;
  EXPECT_EQ(step_->Offer(0, left_key, 1.5, VectorSource(left)), Taken::kTaken);
  EXPECT_EQ(step_->Offer(0, left_key, 1.5, VectorSource(left)), Taken::kKnown);
  EXPECT_EQ(step_->Offer(0, {0, {4, 2}}, 2.0, VectorSource(right)),
            Taken::kTaken);
  EXPECT_EQ(step_->Offer(0, left_key, 1.5, VectorSource(left)), Taken::kKnown);
  EXPECT_EQ(step_->Loss(0), 3.5);
}

TEST_F(GradientStoreTest, NonFiniteElementsAreCountedByTensor) {
  Make(10, 1, 1);
  std::vector<float> values(kElems, 1.0f);
  values[3] = std::numeric_limits<float>::infinity();
  values[299] = std::numeric_limits<float>::quiet_NaN();
  step_->Offer(0, {0, {0, micro_}}, std::nullopt, VectorSource(values));
  ASSERT_TRUE(step_->IsComplete());
  EXPECT_THAT(step_->non_finite(),
              ::testing::ElementsAre(::testing::Pair(7, 2)));
}

// The arrival is backward, the update forward: what stays is what is first.
TEST_F(GradientStoreTest, WhatTheUpdateNeedsLastIsWrittenFirst) {
  Make(2, 3, 1);
  for (const size_t position : {2u, 1u, 0u}) {
    const std::vector<float> values = Node(position, 0, {0, micro_});
    while (step_->Offer(position, {0, {0, micro_}}, std::nullopt,
                        VectorSource(values)) ==
           StepGradients::Taken::kNoRoom) {
      Turn();
    }
  }
  EXPECT_FALSE(step_->Ready(0).empty());
  EXPECT_TRUE(step_->Ready(2).empty());
}

}  // namespace
}  // namespace ballast
