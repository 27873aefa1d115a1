// SPDX-License-Identifier: Apache-2.0
// The coordinator over loopback, with members that the test plays by hand.
#include <gmock/gmock.h>
#include <grpcpp/client_context.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/exact_sum.h"
#include "proto/ballast.grpc.pb.h"
#include "ps/coordinator/coordinator_loop.h"
#include "ps/coordinator/coordinator_service.h"
#include "ps/coordinator/startup.h"
#include "rpc/endpoint.h"
#include "tests/ps/membership/core_harness.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr absl::Duration kCall = absl::Seconds(20);

class TempDir {
 public:
  TempDir() {
    std::string name = ::testing::TempDir() + "/coordinator_XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::vector<std::string> Lines(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    lines.push_back(line);
  }
  return lines;
}

// A coordinator process in miniature: store, folder, loop, service, endpoint.
class RunningCoordinator {
 public:
  RunningCoordinator(const Job& job, const CoordinatorFlags& flags) {
    JobFile file;
    file.job = job;
    absl::StatusOr<OpenedRun> run = OpenRun(file, flags, MonotonicNow());
    EXPECT_TRUE(run.ok()) << run.status();
    run_ = *std::move(run);
    loop_ = std::make_unique<CoordinatorLoop>(job, std::move(run_.core),
                                              run_.store.get(),
                                              run_.folder.get(), MonotonicNow);
    service_ = std::make_unique<CoordinatorService>(loop_.get());
    endpoint_ = *Endpoint::Start("127.0.0.1", 0, {service_.get()});
    loop_->Start();
    stub_ = v1::Coordinator::NewStub(MakeChannel(endpoint_->address()));
  }
  ~RunningCoordinator() {
    loop_.reset();
    endpoint_->Stop(absl::Seconds(1));
  }
  v1::Coordinator::Stub* stub() { return stub_.get(); }
  CoordinatorLoop* loop() { return loop_.get(); }

 private:
  OpenedRun run_;
  std::unique_ptr<CoordinatorLoop> loop_;
  std::unique_ptr<CoordinatorService> service_;
  std::unique_ptr<Endpoint> endpoint_;
  std::unique_ptr<v1::Coordinator::Stub> stub_;
};

// One member; every call blocks the test.
class FakeMember {
 public:
  FakeMember(RunningCoordinator* coordinator, const Job& job, v1::Role role)
      : stub_(coordinator->stub()) {
    request_.set_role(role);
    request_.set_name(role == v1::ROLE_SERVER ? "server-0" : "worker-0");
    request_.set_life_id(role == v1::ROLE_SERVER ? 1 : 2);
    request_.set_address("127.0.0.1:1");
    request_.set_layout(testing::SmallLayout().Encode());
    for (const auto& [key, value] : NumericsFields(job)) {
      v1::ConfigField* field = request_.add_numerics();
      field->set_key(key);
      field->set_value(value);
    }
  }
  v1::JoinRequest* join() { return &request_; }

  absl::Status Join() {
    return Call(&v1::Coordinator::Stub::Join, request_, &admission_);
  }
  absl::StatusOr<v1::PollReply> Poll(absl::Duration wait) {
    v1::PollRequest request;
    request.set_incarnation(admission_.incarnation());
    request.set_seen_number(seen_);
    request.set_wait_ms(absl::ToInt64Milliseconds(wait));
    request.mutable_stats()->set_memory_budget_bytes(1000);
    request.mutable_stats()->set_memory_peak_bytes(900);
    v1::PollReply reply;
    const absl::Status status =
        Call(&v1::Coordinator::Stub::Poll, request, &reply);
    if (!status.ok()) {
      return status;
    }
    seen_ = std::max(seen_, reply.number());
    if (reply.has_worker() || reply.has_server()) {
      newest_ = reply;
    }
    return reply;
  }
  // Polls until the newest directive is as wanted; false after `kCall`.
  bool Await(const std::function<bool(const v1::PollReply&)>& wanted) {
    const absl::Time give_up = MonotonicNow() + kCall;
    while (!wanted(newest_) && MonotonicNow() < give_up) {
      if (!Poll(absl::Seconds(1)).ok()) {
        return false;
      }
    }
    return wanted(newest_);
  }
  bool Await(v1::ServerTask task) {
    return Await([task](const v1::PollReply& reply) {
      return reply.has_server() && reply.server().task() == task;
    });
  }
  bool Await(v1::WorkerTask task, uint64_t step) {
    return Await([task, step](const v1::PollReply& reply) {
      return reply.has_worker() && reply.worker().task() == task &&
             (task == v1::WORKER_EXIT || reply.worker().step() == step);
    });
  }
  bool AwaitDecision(uint64_t step) {
    return Await([step](const v1::PollReply& reply) {
      return reply.server().decisions_size() > 0 &&
             reply.server().decisions(0).step() == step;
    });
  }
  absl::Status Report(const std::function<void(v1::ReportRequest*)>& fill) {
    v1::ReportRequest request;
    request.set_incarnation(admission_.incarnation());
    request.set_timeline(admission_.timeline());
    fill(&request);
    v1::ReportReply reply;
    return Call(&v1::Coordinator::Stub::Report, request, &reply);
  }
  const v1::JoinReply& admission() const { return admission_; }
  uint64_t seen() const { return seen_; }

 private:
  template <typename Method, typename Request, typename Reply>
  absl::Status Call(Method method, const Request& request, Reply* reply) {
    return CallOnce(
        [this, method](auto* context, const auto& in, auto* out) {
          return (stub_->*method)(context, in, out);
        },
        request, reply, kCall);
  }
  v1::Coordinator::Stub* const stub_;
  v1::JoinRequest request_;
  v1::JoinReply admission_;
  v1::PollReply newest_;
  uint64_t seen_ = 0;
};

class CoordinatorTest : public ::testing::Test {
 protected:
  CoordinatorTest() {
    job_ = testing::SmallJob();
    job_.run.dir = dir_.path() + "/run";
    job_.run.steps = 2;
    job_.server.count = 1;
    job_.worker.count = 1;
    job_.eval.every = 0;
    job_.eval.micro_batches = 1;
    job_.checkpoint.every = 0;
    job_.cluster.lease = absl::Seconds(60);
  }
  std::string InRun(const std::string& name) const {
    return job_.run.dir + "/" + name;
  }
  static void Step(FakeMember* server, FakeMember* worker, uint64_t step);
  static void Finish(FakeMember* server, FakeMember* worker, uint64_t step,
                     const ChunkTable& table);
  // Everything from the joins to the last exit.
  void RunAll();

  TempDir dir_;
  Job job_;
};

void CoordinatorTest::Step(FakeMember* server, FakeMember* worker,
                           uint64_t step) {
  ASSERT_TRUE(worker->Await(v1::WORKER_TRAIN, step));
  ASSERT_TRUE(worker
                  ->Report([step](v1::ReportRequest* report) {
                    v1::WorkerDone* done = report->mutable_worker_done();
                    done->set_timeline(report->timeline());
                    done->set_step(step);
                    done->set_pushed_bytes(500);
                  })
                  .ok());
  ASSERT_TRUE(server
                  ->Report([step](v1::ReportRequest* report) {
                    ExactSum squares;
                    squares.Add(4.0);
                    report->mutable_vote()->set_step(step);
                    report->mutable_vote()->set_sum_squares(squares.Encode());
                    report->mutable_vote()->set_has_loss(true);
                    report->mutable_vote()->set_loss_sum(512.0);
                  })
                  .ok());
  ASSERT_TRUE(server->AwaitDecision(step));
  ASSERT_TRUE(server
                  ->Report([step](v1::ReportRequest* report) {
                    report->mutable_confirm()->set_step(step);
                  })
                  .ok());
}

void CoordinatorTest::Finish(FakeMember* server, FakeMember* worker,
                             uint64_t step, const ChunkTable& table) {
  ASSERT_TRUE(server
                  ->Report([&](v1::ReportRequest* report) {
                    v1::CheckpointSaved* saved =
                        report->mutable_checkpoint_saved();
                    saved->set_timeline(report->timeline());
                    saved->set_step(step);
                    saved->set_data_dir("/data/server-0");
                    for (const Chunk& chunk : table.chunks()) {
                      v1::SavedRecord* record = saved->add_records();
                      record->set_chunk(chunk.id);
                      record->set_timeline(report->timeline());
                      record->set_version(step);
                      record->set_extent_offset(uint64_t{chunk.id} << 24);
                      record->set_extent_bytes(
                          RecordLayout::For(table.tensor_of(chunk.id), chunk,
                                            OptimizerKind::kAdamW)
                              .total_bytes);
                    }
                  })
                  .ok());
  ASSERT_TRUE(worker->Await(v1::WORKER_EVALUATE, step));
  ASSERT_TRUE(worker
                  ->Report([step](v1::ReportRequest* report) {
                    v1::EvalResult* result = report->mutable_eval_result();
                    result->set_timeline(report->timeline());
                    result->set_step(step);
                    result->add_losses()->set_loss_sum(64.0);
                  })
                  .ok());
  ASSERT_TRUE(server
                  ->Report([&](v1::ReportRequest* report) {
                    report->mutable_state_digests()->set_step(step);
                    for (const Chunk& chunk : table.chunks()) {
                      const uint64_t block =
                          table.tensor_of(chunk.id).block_elems();
                      const uint64_t blocks =
                          (chunk.elem_count() + block - 1) / block;
                      v1::ChunkDigests* digests =
                          report->mutable_state_digests()->add_chunks();
                      digests->set_chunk(chunk.id);
                      digests->set_digests(std::string(blocks * 3 * 16, 'd'));
                    }
                  })
                  .ok());
  for (FakeMember* member : {worker, server}) {
    ASSERT_TRUE(member == worker ? member->Await(v1::WORKER_EXIT, 0)
                                 : member->Await(v1::SERVER_EXIT));
    ASSERT_TRUE(member
                    ->Report([](v1::ReportRequest* report) {
                      report->mutable_leaving();
                    })
                    .ok());
  }
}

void CoordinatorTest::RunAll() {
  RunningCoordinator coordinator(job_, {});
  FakeMember server(&coordinator, job_, v1::ROLE_SERVER);
  FakeMember worker(&coordinator, job_, v1::ROLE_WORKER);
  ASSERT_TRUE(server.Join().ok());
  ASSERT_TRUE(worker.Join().ok());
  ASSERT_TRUE(server.Await(v1::SERVER_LOAD));
  ASSERT_TRUE(server
                  .Report([](v1::ReportRequest* report) {
                    report->mutable_loaded()->set_step(0);
                  })
                  .ok());
  Step(&server, &worker, 1);
  Step(&server, &worker, 2);
  Finish(&server, &worker, 2,
         *ChunkTable::Build(testing::SmallLayout(), job_.server.chunk_elems));
  ASSERT_TRUE(coordinator.loop()->WaitEnded(kCall));
  EXPECT_TRUE(coordinator.loop()->outcome().ok())
      << coordinator.loop()->outcome();
}

TEST_F(CoordinatorTest, DrivesTwoStepsAndLeavesAWholeRunFolder) {
  RunAll();
  const std::vector<std::string> metrics = Lines(InRun("metrics.jsonl"));
  ASSERT_EQ(metrics.size(), 2u);
  const Json line = Json::parse(metrics[1]);
  EXPECT_EQ(line["step"], 2);
  EXPECT_EQ(line["loss"], 2.0);
  EXPECT_EQ(line["tokens"], 256);
  EXPECT_EQ(line["skipped"], false);
  EXPECT_EQ(line["pushed_bytes"], 500);
  EXPECT_FALSE(line.contains("state_hash"));
  for (const char* key :
       {"lr", "grad_norm", "grad_norm_clipped", "tokens_per_s", "workers",
        "servers", "generation", "minor_faults", "forward_s", "backward_s",
        "fetch_wait_s", "push_wait_s", "update_s", "step_s"}) {
    EXPECT_TRUE(line[key].is_number()) << key;
  }
  const std::vector<std::string> evaluations =
      Lines(InRun("evaluations.jsonl"));
  ASSERT_EQ(evaluations.size(), 1u);
  EXPECT_EQ(Json::parse(evaluations[0])["validation_loss"], 2.0);

  std::ifstream file(InRun("summary.json"));
  const Json summary = Json::parse(file);
  EXPECT_EQ(summary["outcome"], "done");
  EXPECT_EQ(summary["steps"], 2);
  EXPECT_EQ(summary["final_loss"], 2.0);
  EXPECT_EQ(summary["final_validation_loss"], 2.0);
  EXPECT_EQ(summary["parameters"], testing::SmallLayout().parameter_count());
  EXPECT_EQ(summary["state_bytes"],
            12 * testing::SmallLayout().parameter_count());
  EXPECT_EQ(summary["pushed_bytes_per_step"], 500);
  EXPECT_EQ(summary["worker_budget_bytes"], 1000);
  EXPECT_EQ(summary["worker_peak_bytes"], 900);
  EXPECT_EQ(summary["server_ram_budget_bytes"], 1000);
  EXPECT_EQ(summary["server_peak_bytes"], 900);
  EXPECT_EQ(summary["state_hash"].get<std::string>().size(), 32u);
  EXPECT_EQ(summary["skipped_steps"], 0);
  EXPECT_EQ(summary["timeline"], 1);
  EXPECT_TRUE(summary["minor_faults_per_step"].contains("coordinator"));
  const absl::StatusOr<CheckpointManifest> manifest =
      ReadManifest(summary["checkpoint"].get<std::string>());
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->step, 2u);
}

TEST_F(CoordinatorTest, AHeldPollIsAnsweredWhenThereIsNews) {
  RunningCoordinator coordinator(job_, {});
  FakeMember server(&coordinator, job_, v1::ROLE_SERVER);
  FakeMember worker(&coordinator, job_, v1::ROLE_WORKER);
  ASSERT_TRUE(server.Join().ok());
  ASSERT_TRUE(server.Poll(absl::ZeroDuration()).ok());
  const uint64_t seen = server.seen();
  const absl::Time start = MonotonicNow();
  std::future<absl::StatusOr<v1::PollReply>> held = std::async(
      std::launch::async, [&server] { return server.Poll(absl::Seconds(15)); });
  ASSERT_TRUE(worker.Join().ok());  // The group is complete: servers load.
  const absl::StatusOr<v1::PollReply> reply = held.get();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_GT(reply->number(), seen);
  EXPECT_EQ(reply->server().task(), v1::SERVER_LOAD);
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(10));
}

TEST_F(CoordinatorTest, AHeldPollEndsAfterItsWaitWithoutNews) {
  RunningCoordinator coordinator(job_, {});
  FakeMember server(&coordinator, job_, v1::ROLE_SERVER);
  ASSERT_TRUE(server.Join().ok());
  ASSERT_TRUE(server.Poll(absl::ZeroDuration()).ok());
  const absl::StatusOr<v1::PollReply> reply =
      server.Poll(absl::Milliseconds(50));
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(reply->number(), server.seen());
  EXPECT_FALSE(reply->has_server());
}

TEST_F(CoordinatorTest, RefusesAndFencesWithTheCodesOfTheContract) {
  RunningCoordinator coordinator(job_, {});
  FakeMember server(&coordinator, job_, v1::ROLE_SERVER);
  EXPECT_EQ(server.Poll(absl::ZeroDuration()).status().code(),
            absl::StatusCode::kAborted);
  const std::string key = server.join()->numerics(0).key();
  server.join()->mutable_numerics(0)->set_value("something else");
  const absl::Status refused = server.Join();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr(key + " is something else"));
  v1::Placement placement;
  EXPECT_EQ(CallOnce(
                [&coordinator](auto* context, const auto& in, auto* out) {
                  return coordinator.stub()->GetPlacement(context, in, out);
                },
                v1::GetPlacementRequest(), &placement, kCall)
                .code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(CoordinatorTest, StatusAndStopWorkFromTheStart) {
  RunningCoordinator coordinator(job_, {});
  v1::StatusReply status;
  ASSERT_TRUE(CallOnce(
                  [&coordinator](auto* context, const auto& in, auto* out) {
                    return coordinator.stub()->GetStatus(context, in, out);
                  },
                  v1::StatusRequest(), &status, kCall)
                  .ok());
  EXPECT_EQ(status.phase(), "forming");
  EXPECT_THAT(status.waits_for(), HasSubstr("missing worker-0"));
  EXPECT_TRUE(std::filesystem::equivalent(status.run_dir(), job_.run.dir));
  v1::StopReply stopped;
  ASSERT_TRUE(CallOnce(
                  [&coordinator](auto* context, const auto& in, auto* out) {
                    return coordinator.stub()->Stop(context, in, out);
                  },
                  v1::StopRequest(), &stopped, kCall)
                  .ok());
  EXPECT_TRUE(coordinator.loop()->WaitEnded(kCall));
  EXPECT_TRUE(coordinator.loop()->outcome().ok());
}

TEST_F(CoordinatorTest, AResumeRepairsTheMetricsFromTheStepLog) {
  job_.checkpoint.keep = 2;
  RunAll();
  std::vector<std::string> lines = Lines(InRun("metrics.jsonl"));
  {
    // A crash swallowed the last line and left a torn one of a lost step.
    std::ofstream file(InRun("metrics.jsonl"));
    file << lines[0] << "\n"
         << R"({"step":3,"loss":1.0})"
         << "\n{\"ste";
  }
  JobFile file;
  file.job = job_;
  CoordinatorFlags flags;
  flags.resume = true;
  const absl::StatusOr<OpenedRun> run = OpenRun(file, flags, MonotonicNow());
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->core->identity().timeline, 2u);
  EXPECT_EQ(run->core->committed(), 2u);
  lines = Lines(InRun("metrics.jsonl"));
  ASSERT_EQ(lines.size(), 2u);
  const Json repaired = Json::parse(lines[1]);
  EXPECT_EQ(repaired["step"], 2);
  EXPECT_EQ(repaired["loss"], 2.0);
  EXPECT_TRUE(repaired["step_s"].is_null());
}

TEST_F(CoordinatorTest, ARunInTheFolderIsNotOverwritten) {
  RunAll();
  JobFile file;
  file.job = job_;
  const absl::Status status = OpenRun(file, {}, MonotonicNow()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--resume"));
  EXPECT_EQ(Lines(InRun("metrics.jsonl")).size(), 2u);
}

TEST_F(CoordinatorTest, CheckpointsWithoutAStateAreNotTakenForANewRun) {
  RunAll();
  std::filesystem::remove_all(InRun("coordinator"));
  JobFile file;
  file.job = job_;
  EXPECT_EQ(OpenRun(file, {}, MonotonicNow()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(HoldsCheckpoints(InRun("checkpoints")));
}

TEST_F(CoordinatorTest, OneCoordinatorPerRunFolder) {
  RunningCoordinator coordinator(job_, {});
  JobFile file;
  file.job = job_;
  EXPECT_EQ(OpenRun(file, {}, MonotonicNow()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace ballast
