// SPDX-License-Identifier: Apache-2.0
// The coordinator over loopback, with members that the test plays by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/exact_sum.h"
#include "tests/ps/coordinator/running_coordinator.h"
#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

using testing::FakeMember;
using testing::kCall;
using testing::Led;
using testing::Lines;
using testing::RunningCoordinator;

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
  static void Save(FakeMember* server, uint64_t step, const ChunkTable& table);
  static void Finish(FakeMember* server, FakeMember* worker, uint64_t step,
                     const ChunkTable& table);
  // Everything from the joins to the last exit.
  void RunAll();

  testing::TempDir dir_;
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

void CoordinatorTest::Save(FakeMember* server, uint64_t step,
                           const ChunkTable& table) {
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
}

void CoordinatorTest::Finish(FakeMember* server, FakeMember* worker,
                             uint64_t step, const ChunkTable& table) {
  Save(server, step, table);
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
  const ChunkTable table =
      *ChunkTable::Build(testing::SmallLayout(), job_.server.chunk_elems);
  for (uint64_t step = 1; step <= job_.run.steps; ++step) {
    Step(&server, &worker, step);
    if (step < job_.run.steps && job_.checkpoint.every > 0 &&
        step % job_.checkpoint.every == 0) {
      Save(&server, step, table);
    }
  }
  Finish(&server, &worker, job_.run.steps, table);
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
  CoordinatorFlags flags;
  flags.resume = true;
  const Led led(job_, flags);
  const absl::StatusOr<OpenedRun>& run = led.run;
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
  const absl::Status status = Led(job_, {}).run.status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--resume"));
  EXPECT_EQ(Lines(InRun("metrics.jsonl")).size(), 2u);
}

TEST_F(CoordinatorTest, CheckpointsWithoutAStateAreNotTakenForANewRun) {
  RunAll();
  std::filesystem::remove_all(InRun("coordinator"));
  EXPECT_EQ(Led(job_, {}).run.status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(HoldsCheckpoints(InRun("checkpoints")));
}

TEST_F(CoordinatorTest, OneCoordinatorPerRunFolder) {
  RunningCoordinator coordinator(job_, {});
  EXPECT_EQ(Led(job_, {}).run.status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(CoordinatorTest, MembersStayInWhenACoordinatorGoesOnWithTheRun) {
  const ChunkTable table =
      *ChunkTable::Build(testing::SmallLayout(), job_.server.chunk_elems);
  auto first = std::make_unique<RunningCoordinator>(job_, CoordinatorFlags());
  FakeMember server(first.get(), job_, v1::ROLE_SERVER);
  FakeMember worker(first.get(), job_, v1::ROLE_WORKER);
  ASSERT_TRUE(server.Join().ok());
  ASSERT_TRUE(worker.Join().ok());
  ASSERT_TRUE(server.Await(v1::SERVER_LOAD));
  const auto loaded = [&server](uint64_t step) {
    return server.Report([step](v1::ReportRequest* report) {
      report->mutable_loaded()->set_step(step);
    });
  };
  ASSERT_TRUE(loaded(0).ok());
  Step(&server, &worker, 1);
  first.reset();  // As kill -9 does.
  CoordinatorFlags flags;
  flags.continue_run = true;
  RunningCoordinator second(job_, flags);
  server.TurnTo(&second);
  worker.TurnTo(&second);
  const v1::StatusReply status = second.Status();
  EXPECT_EQ(status.step(), 1u);
  EXPECT_EQ(status.timeline(), 1u);
  EXPECT_EQ(status.members_size(), 2);
  ASSERT_TRUE(server.Await(v1::SERVER_LOAD));  // It is asked what it has.
  ASSERT_TRUE(loaded(1).ok());
  Step(&server, &worker, 2);
  Finish(&server, &worker, 2, table);
  ASSERT_TRUE(second.loop()->WaitEnded(kCall));
  EXPECT_TRUE(second.loop()->outcome().ok()) << second.loop()->outcome();
  const std::vector<std::string> lines = Lines(InRun("metrics.jsonl"));
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(Json::parse(lines[0])["step"], 1);
  EXPECT_EQ(Json::parse(lines[1])["timeline"], 1);
  std::ifstream file(InRun("summary.json"));
  EXPECT_EQ(Json::parse(file)["outcome"], "done");
}

TEST_F(CoordinatorTest, TwoStandingCheckpointsAndTheNewestIsDamaged) {
  job_.run.steps = 4;
  job_.checkpoint.every = 2;
  RunAll();
  // Only the manifest can be read here: the servers are played by the test.
  const std::string newest = InRun("checkpoints/step-00000004");
  std::string text;
  std::getline(std::ifstream(newest + "/manifest.json"), text, '\0');
  text[text.size() / 2] ^= 1;
  std::ofstream(newest + "/manifest.json") << text;
  CoordinatorFlags flags;
  flags.resume = true;
  {
    const Led led(job_, flags);
    ASSERT_TRUE(led.run.ok()) << led.run.status();
    EXPECT_EQ(led.run->core->committed(), 2u);
    EXPECT_EQ(led.run->core->checkpoints().standing().size(), 1u);
    EXPECT_EQ(Lines(InRun("metrics.jsonl")).size(), 2u);
  }
  EXPECT_FALSE(std::filesystem::exists(newest));
  EXPECT_TRUE(std::filesystem::exists(
      InRun("checkpoints/damaged-step-00000004/manifest.json")));
}

TEST_F(CoordinatorTest, AnOnlyCheckpointThatIsDamagedIsNotPutAside) {
  RunAll();
  const std::string path = InRun("checkpoints/step-00000002/manifest.json");
  std::ofstream(path) << "{";
  CoordinatorFlags flags;
  flags.resume = true;
  EXPECT_EQ(Led(job_, flags).run.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST_F(CoordinatorTest, AnEndedRunIsNotContinuedButSaidToHaveEnded) {
  RunAll();
  CoordinatorFlags flags;
  flags.continue_run = true;
  const Led led(job_, flags);
  ASSERT_TRUE(led.run.ok()) << led.run.status();
  EXPECT_EQ(led.run->core, nullptr);
  EXPECT_THAT(led.run->ended, HasSubstr("has ended at step 2"));
}

TEST_F(CoordinatorTest, AServerWhosePollBreaksAndWhosePortRefusesIsGoneAtOnce) {
  RunningCoordinator coordinator(job_, {});
  FakeMember server(&coordinator, job_, v1::ROLE_SERVER);
  ASSERT_TRUE(server.Join().ok());  // Nobody listens on its port, 1.
  ASSERT_TRUE(server.Poll(absl::ZeroDuration()).ok());
  // Held, and then broken off as a death does it.
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(1)));
  v1::PollRequest request;
  request.set_incarnation(server.admission().incarnation());
  request.set_seen_number(UINT64_MAX);
  request.set_wait_ms(15000);
  v1::PollReply reply;
  EXPECT_FALSE(coordinator.stub()->Poll(&context, request, &reply).ok());
  // The lease of a minute is far from over.
  const absl::Time start = MonotonicNow();
  std::string state;
  while (state != "gone" && MonotonicNow() - start < kCall) {
    const v1::StatusReply status = coordinator.Status();
    state = status.members_size() > 0 ? status.members(0).state() : "gone";
  }
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(5));
}

TEST_F(CoordinatorTest, AnExitReportIsActedOnAtOnce) {
  RunningCoordinator coordinator(job_, {});
  FakeMember worker(&coordinator, job_, v1::ROLE_WORKER);
  worker.join()->set_pid(4711);
  ASSERT_TRUE(worker.Join().ok());
  v1::ExitReport report;
  report.set_name("worker-0");
  const auto tell = [&](int64_t pid) {
    report.set_pid(pid);
    v1::ExitReply reply;
    return CallOnce(
        [&](auto* context, const auto& in, auto* out) {
          return coordinator.stub()->ReportExit(context, in, out);
        },
        report, &reply, kCall);
  };
  ASSERT_TRUE(tell(4712).ok());  // An earlier life.
  EXPECT_TRUE(worker.Poll(absl::ZeroDuration()).ok());
  ASSERT_TRUE(tell(4711).ok());
  EXPECT_EQ(worker.Poll(absl::ZeroDuration()).status().code(),
            absl::StatusCode::kAborted);
}

TEST_F(CoordinatorTest, AFullDiskHoldsAnAnswerBackUntilThereIsSpace) {
  const testing::SmallDisk disk(32 << 20);
  if (!disk.ok()) {
    GTEST_SKIP() << "a small tmpfs cannot be mounted here (not root?): the "
                    "full disk is NOT tested";
  }
  job_.run.dir = disk.path("run");
  RunningCoordinator coordinator(job_, {});
  {
    std::ofstream ballast(disk.path("ballast"));
    const std::string block(64 << 10, 'x');
    while (ballast.write(block.data(), 64 << 10).flush()) {
    }
  }
  FakeMember worker(&coordinator, job_, v1::ROLE_WORKER);
  // A record longer than what the log has allocated ahead.
  v1::ConfigField* field = worker.join()->add_operations();
  field->set_key("note");
  field->set_value(std::string(4 << 20, 'x'));
  std::future<absl::Status> joined =
      std::async(std::launch::async, [&worker] { return worker.Join(); });
  EXPECT_EQ(joined.wait_for(std::chrono::milliseconds(500)),
            std::future_status::timeout);
  std::filesystem::remove(disk.path("ballast"));
  EXPECT_EQ(joined.get(), absl::OkStatus());
  EXPECT_EQ(coordinator.Status().phase(), "forming");
}

TEST_F(CoordinatorTest, ALeaderThatLostItsKeyTellsNobodyAndEnds) {
  RunningCoordinator coordinator(job_, {});
  FakeMember server(&coordinator, job_, v1::ROLE_SERVER);
  FakeMember worker(&coordinator, job_, v1::ROLE_WORKER);
  ASSERT_TRUE(server.Join().ok());
  ASSERT_EQ(coordinator.store()->Apply({{kLeaderKey, "somebody else"}}),
            absl::OkStatus());
  const auto before = *coordinator.store()->Range("", "\xff", 1000);
  // A join is a write, so it is where an old leader learns that it is one.
  EXPECT_EQ(worker.Join().code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(coordinator.loop()->WaitEnded(kCall));
  EXPECT_EQ(coordinator.loop()->outcome().code(), absl::StatusCode::kAborted);
  const absl::StatusOr<v1::PollReply> reply = server.Poll(absl::ZeroDuration());
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(*coordinator.store()->Range("", "\xff", 1000), before);
  EXPECT_FALSE(std::filesystem::exists(InRun("summary.json")));
}

TEST_F(CoordinatorTest, AScaleThatCannotBeIsRefusedInWords) {
  RunningCoordinator coordinator(job_, {});
  v1::ScaleRequest request;
  request.set_role(v1::ROLE_WORKER);
  request.set_drain("worker-7");
  v1::ScaleReply reply;
  const absl::Status refused = CallOnce(
      [&](auto* context, const auto& in, auto* out) {
        return coordinator.stub()->Scale(context, in, out);
      },
      request, &reply, kCall);
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.message()), HasSubstr("worker-7"));
}

TEST_F(CoordinatorTest, AStandbySaysWhoLeads) {
  RunningCoordinator coordinator(job_, {});
  EXPECT_EQ(coordinator.Status().leader(), "here:1");
  coordinator.service()->StandBy("standby; leader is 10.0.0.9:7400");
  FakeMember server(&coordinator, job_, v1::ROLE_SERVER);
  const absl::Status refused = server.Join();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(refused.message(), "standby; leader is 10.0.0.9:7400");
  EXPECT_EQ(server.Poll(absl::ZeroDuration()).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ballast
