// SPDX-License-Identifier: Apache-2.0
// The real worker between a scripted coordinator and servers without state.
#include "worker/worker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "proto/ballast.grpc.pb.h"
#include "rpc/endpoint.h"
#include "tests/worker/client/fake_shard.h"
#include "tests/worker/step/small_job.h"

namespace ballast {
namespace {

using testing::FakeShard;
using ::testing::HasSubstr;
using testing::SmallJob;
using testing::SmallValues;

constexpr uint64_t kChunkElems = 1024;
constexpr absl::Duration kLong =
    absl::Seconds(20);  // Bounds a test that hangs.

// Says what the test sets, and keeps what it is told.
class ScriptedCoordinator final : public v1::Coordinator::Service {
 public:
  grpc::Status Join(grpc::ServerContext*, const v1::JoinRequest* request,
                    v1::JoinReply* reply) override {
    MutexLock lock(&mutex_);
    reply->set_incarnation(++incarnation_);
    reply->set_timeline(1);
    reply->set_lease_ms(2000);
    reply->set_life_id(request->life_id());
    return grpc::Status::OK;
  }
  grpc::Status Poll(grpc::ServerContext*, const v1::PollRequest* request,
                    v1::PollReply* reply) override {
    MutexLock lock(&mutex_);
    if (request->incarnation() <= fenced_) {
      return {grpc::StatusCode::ABORTED, "fenced"};
    }
    stats_ = request->stats();
    const absl::Time end =
        MonotonicNow() + absl::Milliseconds(request->wait_ms());
    while (request->seen_number() >= directive_.number() &&
           MonotonicNow() < end) {
      changed_.WaitFor(&mutex_, end - MonotonicNow());
    }
    *reply = directive_;
    return grpc::Status::OK;
  }
  grpc::Status Report(grpc::ServerContext*, const v1::ReportRequest* request,
                      v1::ReportReply*) override {
    MutexLock lock(&mutex_);
    reports_.push_back(*request);
    changed_.NotifyAll();
    return grpc::Status::OK;
  }
  grpc::Status GetPlacement(grpc::ServerContext*,
                            const v1::GetPlacementRequest*,
                            v1::Placement* placement) override {
    MutexLock lock(&mutex_);
    *placement = placement_;
    return grpc::Status::OK;
  }

  void Tell(v1::WorkerTask task, uint64_t step, const std::vector<Span>& spans,
            const std::vector<uint64_t>& voted = {}) {
    MutexLock lock(&mutex_);
    directive_.set_number(directive_.number() + 1);
    v1::WorkerDirective* const worker = directive_.mutable_worker();
    worker->Clear();
    worker->set_task(task);
    worker->set_timeline(1);
    worker->set_step(step);
    worker->set_placement_version(placement_.placement_version());
    worker->set_address_version(placement_.address_version());
    for (const Span& span : spans) {
      v1::MicroBatchSpan* const entry = worker->add_spans();
      entry->set_first(span.first);
      entry->set_count(span.count);
    }
    for (const uint64_t life : voted) {
      worker->add_voted(life);
    }
    changed_.NotifyAll();
  }
  void SetPlacement(const v1::Placement& placement) {
    MutexLock lock(&mutex_);
    placement_ = placement;
  }
  // No life so far is a member any more.
  void Fence() {
    MutexLock lock(&mutex_);
    fenced_ = incarnation_;
    changed_.NotifyAll();
  }
  // The next report that `is` accepts, from the first not looked at; false:
  // none came.
  template <typename Is>
  bool Await(const Is& is, v1::ReportRequest* found = nullptr) {
    const absl::Time deadline = MonotonicNow() + kLong;
    MutexLock lock(&mutex_);
    while (MonotonicNow() < deadline) {
      while (looked_ < reports_.size()) {
        const v1::ReportRequest& report = reports_[looked_++];
        if (is(report)) {
          if (found != nullptr) {
            *found = report;
          }
          return true;
        }
      }
      changed_.WaitFor(&mutex_, absl::Milliseconds(100));
    }
    return false;
  }
  bool AwaitDone(uint64_t step, v1::ReportRequest* found = nullptr) {
    return Await(
        [step](const v1::ReportRequest& report) {
          return report.has_worker_done() &&
                 report.worker_done().step() == step;
        },
        found);
  }
  uint64_t number() {
    MutexLock lock(&mutex_);
    return directive_.number();
  }
  v1::MemberStats stats() {
    MutexLock lock(&mutex_);
    return stats_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  uint64_t incarnation_ ABSL_GUARDED_BY(mutex_) = 4;
  uint64_t fenced_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::PollReply directive_ ABSL_GUARDED_BY(mutex_);
  v1::Placement placement_ ABSL_GUARDED_BY(mutex_);
  v1::MemberStats stats_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::ReportRequest> reports_ ABSL_GUARDED_BY(mutex_);
  size_t looked_ ABSL_GUARDED_BY(mutex_) = 0;
};

class WorkerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "/worker_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    job_ = SmallJob();
    job_.data.path = folder_ + "/text";
    job_.eval.micro_batches = 2;
    std::ofstream text(job_.data.path, std::ios::binary);
    for (int i = 0; i < 20000; ++i) {
      text << static_cast<char>(i * 7 % 61);
    }
    text.close();
    layout_ = MakeModelFamily(job_).value()->layout();
    table_ = ChunkTable::Build(layout_, kChunkElems).value();
    placement_.set_placement_version(1);
    placement_.set_address_version(1);
    placement_.set_layout(layout_.Encode());
    placement_.set_chunk_elems(kChunkElems);
    for (size_t chunk = 0; chunk < table_.chunks().size(); ++chunk) {
      placement_.add_owner(static_cast<uint32_t>(chunk % 2));
    }
    for (uint64_t i = 0; i < 2; ++i) {
      placement_.add_servers()->set_name(absl::StrCat("server-", i));
      shards_.emplace_back();
      shard_endpoints_.emplace_back();
      StartServer(i, 11 + i);
    }
  }
  void TearDown() override {
    if (thread_.joinable()) {
      coordinator_.Tell(v1::WORKER_EXIT, 0, {});
      thread_.join();
    }
    worker_.reset();
    endpoint_.reset();
    shard_endpoints_.clear();
    std::filesystem::remove_all(folder_);
  }

  // A new life of a server, at a new address.
  void StartServer(size_t index, uint64_t life, bool deaf = false) {
    KillServer(index);
    shards_[index] = std::make_unique<FakeShard>(
        FakeShard::Options{.table = &table_,
                           .values = SmallValues,
                           .credit_bytes = uint64_t{16} << 20,
                           .deaf = deaf,
                           .incarnation = life,
                           .ack_incarnation = life});
    shard_endpoints_[index] =
        Endpoint::Start("127.0.0.1", 0, {shards_[index].get()}).value();
    v1::ServerEntry* const entry =
        placement_.mutable_servers(static_cast<int>(index));
    entry->set_address(shard_endpoints_[index]->address());
    entry->set_incarnation(life);
    placement_.set_address_version(placement_.address_version() + 1);
    coordinator_.SetPlacement(placement_);
  }
  void KillServer(size_t index) {
    shard_endpoints_[index].reset();
    placement_.mutable_servers(static_cast<int>(index))->set_incarnation(0);
    placement_.set_address_version(placement_.address_version() + 1);
    coordinator_.SetPlacement(placement_);
  }
  void StartWorker() {
    endpoint_ = Endpoint::Start("127.0.0.1", 0, {&coordinator_}).value();
    worker_ = Worker::Create(job_, endpoint_->address(), "worker-0").value();
    thread_ = std::thread([this] { ended_ = worker_->Run(); });
  }
  // Of what server `index` got of a step.
  std::vector<Span> SpansAt(size_t index, uint64_t step) {
    std::set<Span> spans;
    for (const FakeShard::Gradient& gradient : shards_[index]->gradients()) {
      if (gradient.step == step) {
        spans.insert(gradient.item.span);
      }
    }
    return {spans.begin(), spans.end()};
  }

  Job job_;
  std::string folder_;
  ModelLayout layout_;
  ChunkTable table_;
  v1::Placement placement_;
  ScriptedCoordinator coordinator_;
  std::unique_ptr<Endpoint> endpoint_;
  std::vector<std::unique_ptr<FakeShard>> shards_;
  std::vector<std::unique_ptr<Endpoint>> shard_endpoints_;
  std::unique_ptr<Worker> worker_;
  std::thread thread_;
  absl::Status ended_ = absl::UnknownError("it runs");
};

TEST_F(WorkerTest, TrainsEvaluatesAndExitsAsItIsTold) {
  coordinator_.Tell(v1::WORKER_TRAIN, 1, {{0, 4}, {4, 1}});
  StartWorker();
  v1::ReportRequest report;
  ASSERT_TRUE(coordinator_.AwaitDone(1, &report));
  EXPECT_EQ(report.incarnation(), 5u);
  EXPECT_EQ(report.worker_done().number(), coordinator_.number());
  EXPECT_GT(report.worker_done().pushed_bytes(), 0u);
  for (const size_t server : {0u, 1u}) {
    EXPECT_EQ(SpansAt(server, 1), (std::vector<Span>{{0, 4}, {4, 1}}));
  }
  coordinator_.Tell(v1::WORKER_EVALUATE, 1, {{0, 2}});
  ASSERT_TRUE(coordinator_.Await(
      [](const v1::ReportRequest& r) { return r.has_eval_result(); }, &report));
  EXPECT_EQ(report.eval_result().losses_size(), 2);
  coordinator_.Tell(v1::WORKER_EXIT, 0, {});
  thread_.join();
  EXPECT_TRUE(ended_.ok()) << ended_;
  EXPECT_TRUE(coordinator_.Await(
      [](const v1::ReportRequest& r) { return r.has_leaving(); }));
}

TEST_F(WorkerTest, AServersNextLifeGetsWhatItMissesAndOnlyIt) {
  StartWorker();
  coordinator_.Tell(v1::WORKER_TRAIN, 1, {{0, 2}});
  ASSERT_TRUE(coordinator_.AwaitDone(1));
  const size_t before = shards_[0]->gradients().size();
  KillServer(1);
  coordinator_.Tell(v1::WORKER_TRAIN, 1, {{0, 2}});
  while (coordinator_.stats().waits_for() !=
         "server-1: its return, for step 1") {
    std::this_thread::yield();
  }
  StartServer(1, 21);
  coordinator_.Tell(v1::WORKER_TRAIN, 1, {{0, 2}});
  ASSERT_TRUE(coordinator_.AwaitDone(1));
  EXPECT_EQ(SpansAt(1, 1), (std::vector<Span>{{0, 2}}));
  EXPECT_EQ(shards_[0]->gradients().size(), before);
  // One that came back with its vote gets nothing at all.
  StartServer(1, 22);
  coordinator_.Tell(v1::WORKER_TRAIN, 1, {{0, 2}}, {22});
  ASSERT_TRUE(coordinator_.AwaitDone(1));
  EXPECT_TRUE(shards_[1]->gradients().empty());
}

TEST_F(WorkerTest, AServerThatDiesInThePassEndsItAtOnce) {
  // It never answers, so the pass waits for it.
  StartServer(1, 21, /*deaf=*/true);
  StartWorker();
  coordinator_.Tell(v1::WORKER_TRAIN, 1, {{0, 2}});
  while (!absl::StartsWith(coordinator_.stats().waits_for(),
                           "server-1: acknowledgement of chunk")) {
    std::this_thread::yield();
  }
  StartServer(1, 22);
  coordinator_.Tell(v1::WORKER_TRAIN, 1, {{0, 2}});
  ASSERT_TRUE(coordinator_.AwaitDone(1));
  EXPECT_EQ(SpansAt(1, 1), (std::vector<Span>{{0, 2}}));
}

TEST_F(WorkerTest, AFencedWorkerWorksOnUnderItsNextLife) {
  StartWorker();
  coordinator_.Tell(v1::WORKER_TRAIN, 1, {{0, 2}});
  ASSERT_TRUE(coordinator_.AwaitDone(1));
  coordinator_.Fence();
  coordinator_.Tell(v1::WORKER_TRAIN, 2, {{0, 2}});
  v1::ReportRequest report;
  do {
    ASSERT_TRUE(coordinator_.AwaitDone(2, &report));
  } while (report.incarnation() == 5);
  EXPECT_EQ(report.incarnation(), 6u);
}

TEST_F(WorkerTest, TermFinishesTheAssignmentThenLeaves) {
  StartServer(1, 21, /*deaf=*/true);
  StartWorker();
  coordinator_.Tell(v1::WORKER_TRAIN, 1, {{0, 2}});
  while (coordinator_.stats().waits_for().empty()) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(worker_->Term());
  ASSERT_TRUE(coordinator_.Await(
      [](const v1::ReportRequest& r) { return r.has_draining(); }));
  StartServer(1, 22);
  coordinator_.Tell(v1::WORKER_TRAIN, 1, {{0, 2}});
  ASSERT_TRUE(coordinator_.AwaitDone(1));
  coordinator_.Tell(v1::WORKER_EXIT, 0, {});
  thread_.join();
  EXPECT_TRUE(ended_.ok()) << ended_;
}

TEST_F(WorkerTest, ACoordinatorThatIsAwayForLongEndsTheWorkerByName) {
  job_.cluster.give_up_after = absl::Milliseconds(500);
  StartWorker();
  coordinator_.Tell(v1::WORKER_TRAIN, 1, {{0, 2}});
  ASSERT_TRUE(coordinator_.AwaitDone(1));
  const std::string address = endpoint_->address();
  endpoint_.reset();
  thread_.join();
  EXPECT_EQ(ended_.code(), absl::StatusCode::kUnavailable) << ended_;
  EXPECT_THAT(std::string(ended_.message()), HasSubstr(address));
}

TEST_F(WorkerTest, ItIsNoMemberBeforeItHasJoined) {
  worker_ = Worker::Create(job_, "127.0.0.1:1", "worker-0").value();
  EXPECT_FALSE(worker_->Term());
}

}  // namespace
}  // namespace ballast
