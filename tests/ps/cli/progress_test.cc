// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr uint64_t kMiB = 1 << 20;

Job ATwoByTwoJob() {
  Job job;
  job.run.name = "tiny";
  job.model = {.layers = 8, .heads = 4, .width = 128, .context = 128};
  job.batch = {.micro_batches = 4, .micro_batch_size = 4};
  job.worker.count = 2;
  job.worker.memory = 4 * kMiB;
  job.server.count = 2;
  job.server.memory = 4 * kMiB;
  return job;
}

v1::StatusReply AfterStep(uint64_t step) {
  v1::StatusReply status;
  status.set_phase("training");
  status.set_step(step);
  status.set_steps(100);
  status.set_parameters(kMiB);
  status.set_weights_bytes(4 * kMiB + 1);
  status.set_state_bytes(12 * kMiB);
  status.set_tokens_per_s(2048);
  status.set_validation_loss(NAN);
  status.mutable_last()->set_loss(2.5);
  for (const char* name : {"server-0", "server-1", "worker-0", "worker-1"}) {
    v1::MemberStatus* member = status.add_members();
    member->set_name(name);
    member->set_state("active");
    member->mutable_stats()->set_memory_budget_bytes(4 * kMiB);
    member->mutable_stats()->set_memory_peak_bytes(3 * kMiB);
    if (name[0] == 'w') {
      member->set_role(v1::ROLE_WORKER);
      member->mutable_plan()->set_budget_bytes(4 * kMiB);
      member->mutable_plan()->set_activation_bytes(8 * kMiB);
    } else {
      member->set_role(v1::ROLE_SERVER);
      member->mutable_stats()->set_spilled_bytes_written(5 * kMiB);
    }
  }
  return status;
}

// What `show` prints.
template <typename Show>
std::string Printed(bool terminal, Show show) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* file = open_memstream(&text, &size);
  ProgressPrinter printer(ATwoByTwoJob(), terminal, file);
  show(&printer);
  std::fclose(file);
  std::string out(text, size);
  free(text);
  return out;
}

TEST(ProgressTest, WaitsForThePlansOfAllWorkers) {
  const Job job = ATwoByTwoJob();
  v1::StatusReply status = AfterStep(0);
  EXPECT_TRUE(KnowsPlans(job, status));
  status.mutable_members(3)->clear_plan();
  EXPECT_FALSE(KnowsPlans(job, status));
  status = AfterStep(0);
  status.set_parameters(0);
  EXPECT_FALSE(KnowsPlans(job, status));
}

TEST(ProgressTest, TheStartTableStatesTheThreeRatios) {
  const std::string table = StartTable(ATwoByTwoJob(), AfterStep(0));
  EXPECT_THAT(table, HasSubstr("tiny: 1,048,576 parameters, 8 blocks of width "
                               "128, context 128, 2,048 tokens a step"));
  EXPECT_THAT(table, HasSubstr("durability step"));
  EXPECT_THAT(table, HasSubstr("do not fit: units stream through"));
  // 16 bytes x 1 Mi + 8 MiB of activations = 24 MiB over 4 MiB.
  EXPECT_THAT(table, HasSubstr("6.00x"));
  // 12 MiB over 2 x 4 MiB.
  EXPECT_THAT(table, HasSubstr("1.50x"));
  EXPECT_THAT(table, HasSubstr("chunks stream through the disk"));
}

TEST(ProgressTest, TheStartTableSaysWhenEverythingFits) {
  v1::StatusReply status = AfterStep(0);
  status.set_weights_bytes(4 * kMiB);
  status.set_state_bytes(8 * kMiB);
  const std::string table = StartTable(ATwoByTwoJob(), status);
  EXPECT_THAT(table, Not(HasSubstr("do not fit")));
  EXPECT_THAT(table, Not(HasSubstr("through the disk")));
}

TEST(ProgressTest, ALineTellsStepLossSpeedTimeLeftAndMemory) {
  v1::StatusReply status = AfterStep(40);
  EXPECT_EQ(ProgressLine(ATwoByTwoJob(), status),
            "step 40/100  loss 2.5000  lr 0  2,048 tokens/s  1m00s left  "
            "device 3.00 MiB  server 3.00 MiB  to disk 10.0 MiB\n");
  status.set_validation_loss(1.75);
  status.set_validation_step(20);
  EXPECT_THAT(ProgressLine(ATwoByTwoJob(), status),
              HasSubstr("validation 1.750 (step 20)"));
}

TEST(ProgressTest, ALineBeforeTheFirstStepSaysWhatIsWaitedFor) {
  v1::StatusReply status = AfterStep(0);
  status.set_phase("forming");
  status.set_waits_for("worker-1 has not joined");
  EXPECT_EQ(ProgressLine(ATwoByTwoJob(), status),
            "step 0/100  forming  waits: worker-1 has not joined\n");
}

TEST(ProgressTest, TheBlockHasABarAndARowForEachMember) {
  v1::StatusReply status = AfterStep(50);
  v1::MemberStats* stats = status.mutable_members(0)->mutable_stats();
  stats->set_phase("update");
  stats->set_waits_for("worker-1");
  stats->set_waits_ms(999);
  EXPECT_THAT(ProgressBlock(ATwoByTwoJob(), status), HasSubstr("update"));
  stats->set_waits_ms(1000);
  const std::string block = ProgressBlock(ATwoByTwoJob(), status);
  EXPECT_THAT(block, StartsWith("tiny  step 50/100  "
                                "[############............]  50%  50s left\n"));
  EXPECT_THAT(block, HasSubstr("server-0"));
  EXPECT_THAT(block, HasSubstr("waits for worker-1"));
  EXPECT_THAT(block, HasSubstr("worker-1"));
  status.mutable_members(3)->set_state("gone");
  EXPECT_THAT(ProgressBlock(ATwoByTwoJob(), status),
              Not(HasSubstr("  worker-1  device")));
}

TEST(ProgressTest, TheBlockListsServersFirstAndEndsBeforeItIsTooTall) {
  v1::StatusReply status = AfterStep(50);
  status.mutable_members()->SwapElements(0, 3);
  std::string block = ProgressBlock(ATwoByTwoJob(), status);
  EXPECT_LT(block.find("server-0"), block.find("server-1"));
  EXPECT_LT(block.find("server-1"), block.find("worker-0"));
  for (int i = 2; i < 12; ++i) {
    v1::MemberStatus* member = status.add_members();
    *member = status.members(1);
    member->set_name("server-" + std::to_string(i));
  }
  block = ProgressBlock(ATwoByTwoJob(), status);
  EXPECT_LT(block.find("server-9 "), block.find("server-10 "));
  EXPECT_THAT(block, HasSubstr("and 2 more"));
  EXPECT_THAT(block, Not(HasSubstr("worker-0")));
}

TEST(ProgressTest, WithoutATerminalOnlyNewsMakeALineAtOnce) {
  const absl::Time start = absl::UnixEpoch();
  const std::string out = Printed(false, [&](ProgressPrinter* printer) {
    printer->Show(AfterStep(1), start);
    printer->Show(AfterStep(2), start + absl::Seconds(1));
    v1::StatusReply validated = AfterStep(3);
    validated.set_validation_loss(2.0);
    validated.set_validation_step(3);
    printer->Show(validated, start + absl::Seconds(2));
    printer->Show(validated, start + absl::Seconds(60));
    validated.set_step(4);
    printer->Show(validated, start + absl::Seconds(61));
  });
  EXPECT_THAT(out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(out, HasSubstr("\nstep 1/100"));
  EXPECT_THAT(out, Not(HasSubstr("step 2/100")));
  EXPECT_THAT(out, HasSubstr("\nstep 3/100"));
  EXPECT_THAT(out, HasSubstr("\nstep 4/100"));
  EXPECT_EQ(out.find("step 3/100"), out.rfind("step 3/100"));
}

TEST(ProgressTest, ATerminalsBlockIsDrawnOverItself) {
  const std::string out = Printed(true, [](ProgressPrinter* printer) {
    printer->Show(AfterStep(1), absl::UnixEpoch());
    printer->Show(AfterStep(2), absl::UnixEpoch());
    printer->Say("done\n");
  });
  // Two lines of the run, four of its members.
  const std::string up = "\x1b[6A\x1b[J";
  const size_t first = out.find(up);
  ASSERT_NE(first, std::string::npos);
  EXPECT_NE(out.find(up + "done\n", first + 1), std::string::npos);
}

TEST(ProgressTest, TheSummaryIsReadFromTheRunFolder) {
  std::string name =
      (std::filesystem::temp_directory_path() / "summary.XXXXXX").string();
  ASSERT_NE(mkdtemp(name.data()), nullptr);
  EXPECT_EQ(SummaryText(name), "");
  std::ofstream(name + "/summary.json")
      << R"({"steps": 1234, "final_validation_loss": 1.6543,
             "tokens_per_s": 7000.4, "worker_peak_bytes": "odd",
             "state_hash": "abc", "checkpoint": "x/step-00001234",
             "faults": [{"member": "worker-1", "recovered_seconds": 0.5},
                        {"member": "worker-0", "recovered_seconds": null},
                        {"odd": 1}]})";
  const std::string text = SummaryText(name);
  std::filesystem::remove_all(name);
  EXPECT_THAT(text, HasSubstr("1,234"));
  EXPECT_THAT(text, HasSubstr("1.6543 nats a byte"));
  EXPECT_THAT(text, HasSubstr("7000 tokens/s"));
  EXPECT_THAT(text, HasSubstr("x/step-00001234"));
  EXPECT_THAT(text, HasSubstr(name));
  EXPECT_THAT(text, HasSubstr("worker      2   0.50      0.50   0.50  1 "
                              "without a step since"));
}

TEST(ProgressTest, StatusShowsWhoIsMissingOwesAndWentWrong) {
  v1::StatusReply status = AfterStep(7);
  status.set_generation(4);
  for (const char* name : {"server-0", "server-1", "worker-1", "worker-2"}) {
    status.add_wanted(name);
  }
  status.mutable_members(3)->set_state("gone");
  status.mutable_members(2)->set_owes("gradients of step 8");
  v1::MemberStatus* server = status.mutable_members(0);
  server->set_state("loading");
  server->mutable_stats()->set_loaded_chunks(12);
  server->mutable_stats()->set_log_bytes(3 * kMiB);
  server->mutable_stats()->set_log_limit_bytes(64 * kMiB);
  v1::Fault* fault = status.add_faults();
  fault->set_member("worker-1");
  fault->set_kind("killed");
  fault->set_recovered_seconds(-1);
  const std::string text = StatusText(status);
  EXPECT_THAT(text, HasSubstr("generation  4, timeline 0"));
  EXPECT_THAT(text, HasSubstr("missing     worker-1, worker-2"));
  EXPECT_THAT(text, HasSubstr("gradients of step 8"));
  EXPECT_THAT(text, HasSubstr("loading, 12 chunks"));
  EXPECT_THAT(text, HasSubstr("log 3.00 MiB of 64.0 MiB"));
  EXPECT_THAT(text, HasSubstr("not yet"));
}

TEST(ProgressTest, StatusNamesMembersWaitsAndFailure) {
  v1::StatusReply status = AfterStep(7);
  status.set_failure("server-1 is gone");
  status.mutable_members(2)->set_silent_ms(3500);
  const std::string text = StatusText(status);
  EXPECT_THAT(text, HasSubstr("server-1 is gone"));
  EXPECT_THAT(text, HasSubstr("silent 3s"));
  EXPECT_THAT(text, HasSubstr("7 of 100, skipped 0"));
}

}  // namespace
}  // namespace ballast
