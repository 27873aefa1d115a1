// SPDX-License-Identifier: Apache-2.0
// What every state store promises, whichever it is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <functional>
#include <thread>

#include "common/clock.h"
#include "common/mutex.h"
#include "storage/etcd_store.h"
#include "storage/state_store.h"
#include "tests/storage/private_etcd.h"
#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;
using testing::PrivateEtcd;
using testing::Says;

constexpr auto kAborted = absl::StatusCode::kAborted;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr absl::Duration kPatience = absl::Seconds(20);

// Changes that a watch has told, waited for one by one.
class Told {
 public:
  SharedStateStore::OnChange Taker() {
    return [this](const StateChange& change) {
      MutexLock lock(&mutex_);
      changes_.push_back(change);
      changed_.NotifyAll();
    };
  }
  // "key=value" or "key gone"; "nothing" after `patience`.
  std::string Next(absl::Duration patience = kPatience) {
    const absl::Time give_up = MonotonicNow() + patience;
    MutexLock lock(&mutex_);
    while (changes_.empty()) {
      const absl::Duration left = give_up - MonotonicNow();
      if (left <= absl::ZeroDuration()) {
        return "nothing";
      }
      changed_.WaitFor(&mutex_, left);
    }
    const StateChange change = changes_.front();
    changes_.pop_front();
    return change.value ? absl::StrCat(change.key, "=", *change.value)
                        : absl::StrCat(change.key, " gone");
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<StateChange> changes_ ABSL_GUARDED_BY(mutex_);
};

class StateStoreConformance : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "etcd") {
      if (!PrivateEtcd::Installed()) {
        GTEST_SKIP() << "etcd is not installed (deploy/install-deps.sh): the "
                        "etcd store is NOT tested";
      }
      auto etcd = PrivateEtcd::Start();
      ASSERT_EQ(etcd.status(), absl::OkStatus());
      etcd_ = *std::move(etcd);
    }
    Reopen();
  }
  void Reopen() {
    store_.reset();
    auto store = etcd_ == nullptr
                     ? OpenEmbeddedStateStore(dir_.path("state"))
                     : OpenEtcdStateStore({{etcd_->address()}, "ballast/run/"});
    ASSERT_EQ(store.status(), absl::OkStatus());
    store_ = *std::move(store);
  }

  testing::TempDir dir_;
  std::unique_ptr<PrivateEtcd> etcd_;
  std::unique_ptr<SharedStateStore> store_;
};

TEST_P(StateStoreConformance, ReturnsWhatWasAppliedAlsoAfterAReopen) {
  const std::string bytes("\0\xff\n=", 4);
  ASSERT_EQ(store_->Apply({{"a", "1"}, {"b", bytes}}), absl::OkStatus());
  ASSERT_EQ(store_->Apply({{"a", std::nullopt}, {"c", ""}}), absl::OkStatus());
  Reopen();
  EXPECT_EQ(store_->Get("a").status().code(), kNotFound);
  EXPECT_EQ(*store_->Get("b"), bytes);
  EXPECT_EQ(*store_->Get("c"), "");
}

TEST_P(StateStoreConformance, TheLastChangeOfAKeyInABatchCounts) {
  ASSERT_EQ(store_->Apply({{"a", "1"}, {"b", "1"}, {"a", "2"}}),
            absl::OkStatus());
  EXPECT_EQ(*store_->Get("a"), "2");
  ASSERT_EQ(store_->Apply({{"a", "3"}, {"a", std::nullopt}}), absl::OkStatus());
  EXPECT_EQ(store_->Get("a").status().code(), kNotFound);
  EXPECT_EQ(store_->Apply({}), absl::OkStatus());
  EXPECT_EQ(store_->Apply({{"never", std::nullopt}}), absl::OkStatus());
}

TEST_P(StateStoreConformance, SwapsOnlyWhenTheKeyHoldsWhatIsExpected) {
  EXPECT_TRUE(Says(store_->CompareAndSwap("k", "old", {{"k", "new"}}), kAborted,
                   "'k' does not exist"));
  EXPECT_EQ(store_->CompareAndSwap("k", std::nullopt, {{"k", "1"}, {"x", "y"}}),
            absl::OkStatus());
  EXPECT_TRUE(Says(store_->CompareAndSwap("k", std::nullopt, {{"k", "2"}}),
                   kAborted, "'k' holds another value"));
  EXPECT_EQ(store_->CompareAndSwap("k", "2", {{"x", "z"}, {"v", "w"}}).code(),
            kAborted);
  EXPECT_EQ(*store_->Get("x"), "y");
  EXPECT_EQ(store_->Get("v").status().code(), kNotFound);
  EXPECT_EQ(store_->CompareAndSwap("k", "1", {}), absl::OkStatus());
  EXPECT_EQ(store_->CompareAndSwap("k", "1", {{"k", std::nullopt}}),
            absl::OkStatus());
  EXPECT_EQ(store_->CompareAndSwap("k", std::nullopt, {}), absl::OkStatus());
}

TEST_P(StateStoreConformance, OneOfManySwappersWinsEachRound) {
  ASSERT_EQ(store_->Apply({{"n", "0"}}), absl::OkStatus());
  std::atomic<int> wins = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i) {
        const std::string seen = *store_->Get("n");
        const std::string next = absl::StrCat(std::stoi(seen) + 1);
        wins += store_->CompareAndSwap("n", seen, {{"n", next}}).ok() ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(*store_->Get("n"), absl::StrCat(wins.load()));
  EXPECT_GE(wins, 10);
}

TEST_P(StateStoreConformance, RangesAreHalfOpenOrderedAndLimited) {
  ASSERT_EQ(store_->Apply({{"b", "2"}, {"a", "1"}, {"d", "4"}, {"c", "3"}}),
            absl::OkStatus());
  EXPECT_THAT(*store_->Range("b", "d", 10),
              ElementsAre(Pair("b", "2"), Pair("c", "3")));
  EXPECT_THAT(*store_->Range("a", "z", 2),
              ElementsAre(Pair("a", "1"), Pair("b", "2")));
  EXPECT_TRUE(store_->Range("b", "b", 10)->empty());
  EXPECT_TRUE(store_->Range("c", "b", 10)->empty());
  EXPECT_TRUE(store_->Range("a", "z", 0)->empty());
  EXPECT_EQ(store_->Range("", "\xff", 10)->size(), 4u);
}

TEST_P(StateStoreConformance, ARangeOfManyPagesIsWhole) {
  constexpr int kKeys = 2345;
  std::vector<StateChange> batch;
  for (int i = 0; i < kKeys; ++i) {
    batch.push_back({absl::StrCat("key", 10000 + i), absl::StrCat(i)});
    if (batch.size() == 100 || i + 1 == kKeys) {
      ASSERT_EQ(store_->Apply(batch), absl::OkStatus());
      batch.clear();
    }
  }
  const auto all = store_->Range("key", "kez", UINT64_MAX);
  ASSERT_EQ(all.status(), absl::OkStatus());
  ASSERT_EQ(all->size(), kKeys);
  for (int i = 0; i < kKeys; ++i) {
    ASSERT_EQ((*all)[i].second, absl::StrCat(i));
  }
  EXPECT_EQ(store_->Range("key", "kez", 1001)->size(), 1001u);
}

TEST_P(StateStoreConformance, ABatchAboveTheLimitIsRefusedWhole) {
  const uint64_t most = std::min<uint64_t>(store_->batch_max(), 1000);
  std::vector<StateChange> batch;
  for (uint64_t i = 0; i < most; ++i) {
    batch.push_back({absl::StrCat("k", i), "v"});
  }
  EXPECT_EQ(store_->Apply(batch), absl::OkStatus());
  if (most < store_->batch_max()) {
    return;  // There is no limit to go beyond.
  }
  batch.push_back({"one more", "v"});
  EXPECT_EQ(store_->Apply(batch).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->Get("one more").status().code(), kNotFound);
}

TEST_P(StateStoreConformance, AWatchTellsWhatChangesInItsRangeFromNowOn) {
  ASSERT_EQ(store_->Apply({{"w/old", "0"}}), absl::OkStatus());
  Told told;
  auto watch = store_->Watch("w/", "w0", told.Taker());
  ASSERT_EQ(watch.status(), absl::OkStatus());
  ASSERT_EQ(store_->Apply({{"v", "not in range"}, {"w/a", "1"}}),
            absl::OkStatus());
  EXPECT_EQ(told.Next(), "w/a=1");
  ASSERT_EQ(store_->CompareAndSwap("w/a", "1", {{"w/a", "2"}}),
            absl::OkStatus());
  EXPECT_EQ(told.Next(), "w/a=2");
  ASSERT_EQ(store_->CompareAndSwap("w/a", "1", {{"w/a", "3"}}).code(),
            kAborted);
  ASSERT_EQ(store_->Apply({{"w/old", std::nullopt}}), absl::OkStatus());
  EXPECT_EQ(told.Next(), "w/old gone");
  watch->reset();
  ASSERT_EQ(store_->Apply({{"w/a", "4"}}), absl::OkStatus());
  EXPECT_EQ(told.Next(absl::Milliseconds(200)), "nothing");
}

TEST_P(StateStoreConformance, ALeasedKeyStandsUntilItsHolderGivesItUp) {
  Told told;
  auto watch = store_->Watch("leader", "leader\xff", told.Taker());
  ASSERT_EQ(watch.status(), absl::OkStatus());
  auto lease = store_->Lease("leader", "me", absl::Seconds(2));
  ASSERT_EQ(lease.status(), absl::OkStatus());
  EXPECT_EQ(told.Next(), "leader=me");
  EXPECT_TRUE((*lease)->held());
  EXPECT_EQ(*store_->Get("leader"), "me");
  EXPECT_THAT(*store_->Range("a", "z", 9), ElementsAre(Pair("leader", "me")));
  EXPECT_TRUE(Says(store_->Lease("leader", "you", absl::Seconds(2)).status(),
                   kAborted, "leader' exists"));
  // A write that is fenced by the key, as every write of a leader is.
  EXPECT_EQ(store_->CompareAndSwap("leader", "me", {{"x", "1"}}),
            absl::OkStatus());
  lease->reset();
  EXPECT_EQ(told.Next(), "leader gone");
  EXPECT_TRUE(Says(store_->CompareAndSwap("leader", "me", {{"x", "2"}}),
                   kAborted, "does not exist"));
  EXPECT_EQ(*store_->Get("x"), "1");
  lease = store_->Lease("leader", "you", absl::Seconds(2));
  ASSERT_EQ(lease.status(), absl::OkStatus());
  EXPECT_EQ(*store_->Get("leader"), "you");
}

TEST_P(StateStoreConformance, ALeaseIsRenewedForAsLongAsItLives) {
  Told told;
  auto lease = store_->Lease("leader", "me", absl::Seconds(2));
  ASSERT_EQ(lease.status(), absl::OkStatus());
  auto watch = store_->Watch("leader", "leader\xff", told.Taker());
  ASSERT_EQ(watch.status(), absl::OkStatus());
  EXPECT_EQ(told.Next(absl::Seconds(4)), "nothing");  // Twice its time.
  EXPECT_TRUE((*lease)->held());
  EXPECT_EQ(*store_->Get("leader"), "me");
}

TEST_P(StateStoreConformance, ADeletedLeasedKeyFencesItsHolder) {
  auto lease = store_->Lease("leader", "me", absl::Seconds(2));
  ASSERT_EQ(lease.status(), absl::OkStatus());
  ASSERT_EQ(store_->Apply({{"leader", std::nullopt}}), absl::OkStatus());
  EXPECT_EQ(store_->CompareAndSwap("leader", "me", {{"x", "1"}}).code(),
            kAborted);
  const auto next = store_->Lease("leader", "you", absl::Seconds(2));
  ASSERT_EQ(next.status(), absl::OkStatus());
  lease->reset();  // Takes nothing from the new holder.
  EXPECT_EQ(*store_->Get("leader"), "you");
}

INSTANTIATE_TEST_SUITE_P(All, StateStoreConformance,
                         ::testing::Values("embedded", "etcd"),
                         [](const auto& param) { return param.param; });

// --- What only etcd does. ---

class EtcdStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!PrivateEtcd::Installed()) {
      GTEST_SKIP() << "etcd is not installed (deploy/install-deps.sh): the "
                      "etcd store is NOT tested";
    }
    auto etcd = PrivateEtcd::Start();
    ASSERT_EQ(etcd.status(), absl::OkStatus());
    etcd_ = *std::move(etcd);
  }
  std::unique_ptr<SharedStateStore> Open(EtcdOptions options = {}) {
    if (options.endpoints.empty()) {
      options.endpoints = {etcd_->address()};
    }
    options.prefix = "ballast/run/";
    auto store = OpenEtcdStateStore(std::move(options));
    EXPECT_EQ(store.status(), absl::OkStatus());
    return *std::move(store);
  }
  // Calls until it is not UNAVAILABLE, for a while.
  static absl::Status Patiently(const std::function<absl::Status()>& call) {
    const absl::Time give_up = MonotonicNow() + kPatience;
    absl::Status status = call();
    while (absl::IsUnavailable(status) && MonotonicNow() < give_up) {
      status = call();
    }
    return status;
  }
  std::unique_ptr<PrivateEtcd> etcd_;
};

TEST_F(EtcdStoreTest, AKilledEtcdIsUnavailableAndComesBackWithEverything) {
  EtcdOptions options;
  options.call_timeout = absl::Milliseconds(500);
  const auto store = Open(options);
  const auto other = Open();
  Told told;
  const auto watch = store->Watch("", "\xff", told.Taker());
  ASSERT_EQ(watch.status(), absl::OkStatus());
  ASSERT_EQ(store->Apply({{"a", "1"}}), absl::OkStatus());
  EXPECT_EQ(told.Next(), "a=1");
  const auto lease = store->Lease("leader", "me", absl::Seconds(5));
  ASSERT_EQ(lease.status(), absl::OkStatus());
  EXPECT_EQ(told.Next(), "leader=me");

  etcd_->Kill();
  const absl::Time killed = MonotonicNow();
  EXPECT_EQ(store->Apply({{"b", "1"}}).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(store->Get("a").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(MonotonicNow() - killed, absl::Seconds(5));
  ASSERT_EQ(etcd_->Restart(), absl::OkStatus());

  // Leases survive a restart, and time passes for them only while etcd lives.
  EXPECT_EQ(Patiently([&] {
              return store->CompareAndSwap("leader", "me", {{"b", "2"}});
            }),
            absl::OkStatus());
  EXPECT_EQ(*store->Get("a"), "1");
  EXPECT_EQ(told.Next(), "b=2");
  EXPECT_EQ(Patiently([&] {
              return other->Apply({{"c", "3"}});
            }),
            absl::OkStatus());
  EXPECT_EQ(told.Next(), "c=3");
  EXPECT_TRUE((*lease)->held());
}

TEST_F(EtcdStoreTest, AHolderThatCannotRenewKnowsThatItMayHaveLost) {
  EtcdOptions options;
  options.call_timeout = absl::Milliseconds(300);
  const auto store = Open(options);
  const auto lease = store->Lease("leader", "me", absl::Seconds(2));
  ASSERT_EQ(lease.status(), absl::OkStatus());
  EXPECT_TRUE((*lease)->held());
  const absl::Time start = MonotonicNow();
  etcd_->Pause();
  while ((*lease)->held() && MonotonicNow() - start < kPatience) {
    std::this_thread::yield();
  }
  etcd_->Resume();
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(4));
}

TEST_F(EtcdStoreTest, TheNextEndpointAnswersWhenOneDoesNot) {
  EtcdOptions options;
  options.call_timeout = absl::Seconds(1);
  // Nobody listens on port 1.
  options.endpoints = {"127.0.0.1:1", etcd_->address()};
  const auto store = Open(options);
  EXPECT_EQ(store->Get("a").status().code(), kNotFound);
  EXPECT_EQ(store->Apply({{"a", "1"}}), absl::OkStatus());
}

TEST_F(EtcdStoreTest, HistoryIsForgottenAndNothingElse) {
  EtcdOptions options;
  options.history = 5;
  const auto store = Open(options);
  Told told;
  const auto watch = store->Watch("", "\xff", told.Taker());
  ASSERT_EQ(watch.status(), absl::OkStatus());
  for (int i = 1; i <= 60; ++i) {
    ASSERT_EQ(store->Apply({{"n", absl::StrCat(i)}}), absl::OkStatus());
  }
  EXPECT_EQ(*store->Get("n"), "60");
  std::string last;
  while (last != "n=60") {
    last = told.Next();
    ASSERT_NE(last, "nothing");
  }
}

TEST(EtcdUrlTest, ListsHostsWithPortsAndRefusesTheRest) {
  EXPECT_THAT(*ParseEtcdUrl("etcd://a:2379,10.0.0.1:2380"),
              ElementsAre("a:2379", "10.0.0.1:2380"));
  for (const char* wrong :
       {"", "etcd://", "etcd://a", "etcd://a:0", "etcd://a:65536", "a:2379",
        "etcd://a:2379,", "etcd://:2379", "http://a:2379", "etcd://a:2379/x"}) {
    EXPECT_TRUE(Says(ParseEtcdUrl(wrong).status(),
                     absl::StatusCode::kInvalidArgument,
                     "want etcd://host:port[,host:port]"))
        << wrong;
  }
}

}  // namespace
}  // namespace ballast
