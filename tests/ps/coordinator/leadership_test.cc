// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/leadership.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "ps/coordinator/prober.h"
#include "ps/coordinator/standby.h"
#include "ps/membership/run_state.h"
#include "rpc/endpoint.h"
#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using testing::Says;
constexpr auto kAborted = absl::StatusCode::kAborted;

class LeadershipTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Leadership>> Take(const std::string& address) {
    return Leadership::Take(store_.get(), address, absl::Seconds(2));
  }
  StandbyOptions Options() {
    StandbyOptions options;
    options.address = "b:2";
    options.give_up_after = absl::Seconds(20);
    options.on_wait = [this](const std::string& why) {
      EXPECT_EQ(why, "standby; leader is a:1");
      waits_ = true;
    };
    options.stop = [this] { return stop_.load(); };
    return options;
  }
  testing::TempDir dir_;
  std::unique_ptr<SharedStateStore> store_ =
      *OpenEmbeddedStateStore(dir_.path("s"));
  std::atomic<bool> waits_ = false;
  std::atomic<bool> stop_ = false;
};

TEST_F(LeadershipTest, OneLeadsAndTheOtherIsToldWho) {
  auto first = Take("a:1");
  ASSERT_EQ(first.status(), absl::OkStatus());
  EXPECT_EQ((*first)->record().term, 1u);
  EXPECT_TRUE((*first)->sure());
  EXPECT_TRUE(Says(Take("b:2").status(), kAborted, "leader is a:1"));
  RunIdentity identity;
  identity.run_id = std::string(32, 'a');
  identity.term = 7;
  ASSERT_EQ((*first)->Apply({PutIdentity(identity)}), absl::OkStatus());
  first->reset();
  const auto second = Take("b:2");
  ASSERT_EQ(second.status(), absl::OkStatus());
  EXPECT_EQ((*second)->record().term, 8u);
}

TEST_F(LeadershipTest, AnOldLeaderWritesNothing) {
  const auto old = Take("a:1");
  ASSERT_EQ(old.status(), absl::OkStatus());
  ASSERT_EQ((*old)->Apply({{"x", "1"}}), absl::OkStatus());
  // What the end of a lease does.
  ASSERT_EQ(store_->Apply({{kLeaderKey, std::nullopt}}), absl::OkStatus());
  EXPECT_EQ((*old)->Apply({{"x", "2"}}).code(), kAborted);
  const auto next = Take("b:2");
  ASSERT_EQ(next.status(), absl::OkStatus());
  EXPECT_EQ((*old)->Apply({{"x", "2"}}).code(), kAborted);
  EXPECT_EQ((*old)->Apply({{"x", std::nullopt}}).code(), kAborted);
  EXPECT_EQ((*old)->Apply({}).code(), kAborted);
  EXPECT_EQ(*store_->Get("x"), "1");
  EXPECT_EQ((*next)->Apply({{"x", "3"}}), absl::OkStatus());
  EXPECT_EQ((*next)->Apply({}), absl::OkStatus());
}

// As a store with a small batch_max, whatever it does otherwise.
class SmallBatches final : public SharedStateStore {
 public:
  explicit SmallBatches(SharedStateStore* store) : store_(store) {}
  absl::StatusOr<std::string> Get(absl::string_view key) override {
    return store_->Get(key);
  }
  absl::Status CompareAndSwap(
      absl::string_view key, const std::optional<std::string>& expected,
      const std::vector<StateChange>& changes) override {
    EXPECT_LE(changes.size(), batch_max());
    ++batches_;
    return store_->CompareAndSwap(key, expected, changes);
  }
  absl::Status Apply(const std::vector<StateChange>& changes) override {
    return store_->Apply(changes);
  }
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Range(
      absl::string_view begin, absl::string_view end, uint64_t limit) override {
    return store_->Range(begin, end, limit);
  }
  absl::StatusOr<std::unique_ptr<StoreWatch>> Watch(absl::string_view begin,
                                                    absl::string_view end,
                                                    OnChange tell) override {
    return store_->Watch(begin, end, std::move(tell));
  }
  absl::StatusOr<std::unique_ptr<StoreLease>> Lease(
      absl::string_view key, absl::string_view value,
      absl::Duration ttl) override {
    return store_->Lease(key, value, ttl);
  }
  uint64_t batch_max() const override { return 10; }
  int batches() const { return batches_; }

 private:
  SharedStateStore* const store_;
  int batches_ = 0;
};

TEST_F(LeadershipTest, ManyDeletionsGoInBatchesTheStoreTakes) {
  SmallBatches small(store_.get());
  const auto leader = Leadership::Take(&small, "a:1", absl::Seconds(2));
  ASSERT_EQ(leader.status(), absl::OkStatus());
  std::vector<StateChange> puts;
  std::vector<StateChange> prune = {{"new", "1"}, {"k3", "stale"}};
  for (int i = 0; i < 35; ++i) {
    puts.push_back({absl::StrCat("k", i), "v"});
    prune.push_back({absl::StrCat("k", i), std::nullopt});
  }
  ASSERT_EQ(store_->Apply(puts), absl::OkStatus());
  ASSERT_EQ((*leader)->Apply(prune), absl::OkStatus());
  EXPECT_EQ(small.batches(), 5);  // The values, then 10, 10, 10 and 5.
  EXPECT_EQ(store_->Range("k", "l", 99)->size(), 0u);
  EXPECT_EQ(*store_->Get("new"), "1");
}

TEST_F(LeadershipTest, AForeignLeaderKeyIsNamed) {
  ASSERT_EQ(store_->Apply({{kLeaderKey, "10.0.0.1"}}), absl::OkStatus());
  EXPECT_TRUE(Says(Take("a:1").status(), absl::StatusCode::kDataLoss,
                   "'leader' holds '10.0.0.1'"));
}

TEST_F(LeadershipTest, AStandbyTakesOverWhenTheLeaderIsGone) {
  auto leader = Take("a:1");
  ASSERT_EQ(leader.status(), absl::OkStatus());
  std::thread standby([this] {
    const absl::StatusOr<Accession> accession =
        WaitToLead(store_.get(), Options());
    ASSERT_EQ(accession.status(), absl::OkStatus());
    EXPECT_TRUE(accession->stood_by);
    EXPECT_EQ(accession->leadership->record().address, "b:2");
  });
  while (!waits_) {
    std::this_thread::yield();
  }
  leader->reset();
  standby.join();
}

TEST_F(LeadershipTest, AStandbyStopsWhenAsked) {
  const auto leader = Take("a:1");
  ASSERT_EQ(leader.status(), absl::OkStatus());
  stop_ = true;
  EXPECT_EQ(WaitToLead(store_.get(), Options()).status().code(),
            absl::StatusCode::kCancelled);
}

TEST_F(LeadershipTest, TheFirstOneLeadsWithoutStandingBy) {
  const absl::StatusOr<Accession> accession =
      WaitToLead(store_.get(), Options());
  ASSERT_EQ(accession.status(), absl::OkStatus());
  EXPECT_FALSE(accession->stood_by);
}

TEST(ProberTest, TellsAListenerFromAClosedPort) {
  absl::StatusOr<std::unique_ptr<Endpoint>> endpoint =
      Endpoint::Start("127.0.0.1", 0, {});
  ASSERT_EQ(endpoint.status(), absl::OkStatus());
  const std::string address = (*endpoint)->address();
  EXPECT_EQ(ProbeAddress(address, absl::Seconds(5)), ProbeAnswer::kAccepted);
  endpoint->reset();
  EXPECT_EQ(ProbeAddress(address, absl::Seconds(5)), ProbeAnswer::kRefused);
  EXPECT_EQ(ProbeAddress("nowhere", absl::Seconds(5)), ProbeAnswer::kUnclear);
  // A test network that is never routed: no answer, or no way there.
  EXPECT_NE(ProbeAddress("192.0.2.1:9", absl::Milliseconds(50)),
            ProbeAnswer::kAccepted);
}

TEST(ProberTest, AnswersWithTheLifeThatWasAskedAbout) {
  Mutex mutex;
  CondVar changed;
  std::vector<std::pair<uint64_t, bool>> answers;
  Prober prober([&](uint64_t incarnation, bool alive) {
    MutexLock lock(&mutex);
    answers.emplace_back(incarnation, alive);
    changed.NotifyAll();
  });
  prober.Start({8, "nowhere"});
  prober.Start({9, "127.0.0.1:1"});
  MutexLock lock(&mutex);
  const absl::Time give_up = MonotonicNow() + absl::Seconds(20);
  while (answers.empty() && MonotonicNow() < give_up) {
    changed.WaitFor(&mutex, absl::Seconds(1));
  }
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0], (std::pair<uint64_t, bool>{9, false}));
}

}  // namespace
}  // namespace ballast
