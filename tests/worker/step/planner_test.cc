// SPDX-License-Identifier: Apache-2.0
#include "worker/step/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/worker/step/small_job.h"
#include "worker/step/executor.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::OneThread;
using testing::SmallBatches;
using testing::SmallJob;
using testing::SmallValues;

class Quiet : public PassObserver {
 public:
  absl::Status OnUnit(PassPhase, uint32_t) override { return absl::OkStatus(); }
};

absl::StatusOr<StepPlan> Plan(const Job& job, int threads = 1) {
  const auto family = MakeModelFamily(job).value();
  const auto kernels = MakeCpuKernels(threads);
  return PlanStep(job, family.get(), kernels.get());
}

// The number that follows `words` in `text`.
uint64_t NumberAfter(const std::string& text, const std::string& words) {
  const size_t at = text.find(words);
  EXPECT_NE(at, std::string::npos) << text;
  uint64_t number = 0;
  const size_t begin = at + words.size();
  const size_t end = text.find_first_not_of("0123456789", begin);
  EXPECT_TRUE(absl::SimpleAtoi(text.substr(begin, end - begin), &number));
  return number;
}

// Peaks of real steps and evaluations in memory of exactly what was planned.
void ExpectRunsWithinItsPlan(const Job& job) {
  const auto plan = Plan(job);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto family = MakeModelFamily(job).value();
  const auto device =
      CpuDevice::Create(plan->device_bytes, OneThread()).value();
  const auto host =
      Arena::Create({.name = "host", .bytes = plan->host_step_bytes}).value();
  StepExecutor executor(family.get(), device.get(), host.get(), plan->policy);
  const std::vector<MicroBatch> batches = SmallBatches(job);
  LocalWeights weights(&family->layout(), device.get(), SmallValues);
  const uint32_t total = job.batch.micro_batches;
  LocalGradients gradients(&family->layout(), device.get(), total);
  Quiet quiet;
  for (const Span& range : DealSpans(total, job.worker.count)) {
    const auto span =
        absl::MakeConstSpan(batches).subspan(range.first, range.count);
    const auto result =
        executor.Train({.total = total, .nodes = Cover(range, total)}, span,
                       &weights, &gradients, &quiet);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_TRUE(executor.Evaluate(0, span, &weights, &quiet).ok());
  }
  EXPECT_EQ(device->peak_bytes(), plan->device_bytes);
  EXPECT_EQ(host->peak_bytes(), plan->host_step_bytes);
  EXPECT_LE(plan->device_bytes, job.worker.memory);
  EXPECT_LE(plan->report.host_peak_bytes(), job.worker.host_memory);
}

TEST(PlannerTest, AmpleBudgetRecomputesNothingAndFetchesNothingTwice) {
  const auto plan = Plan(SmallJob());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->policy.kept_units, 6u);
  EXPECT_EQ(plan->policy.resident_units, 6u);
  EXPECT_EQ(plan->policy.device_inputs, 6u);
  EXPECT_EQ(plan->policy.prefetch, 1u);
  EXPECT_EQ(plan->host_step_bytes, 0u);
  EXPECT_EQ(plan->report.recomputed_units(), 0u);
}

TEST(PlannerTest, PeaksOfRealStepsAreThePlannedOnes) {
  Job job = SmallJob();
  ExpectRunsWithinItsPlan(job);
  for (const uint32_t workers : {1u, 3u}) {
    job.worker.count = workers;
    for (uint64_t kib = 1024; kib >= 128; kib = kib * 3 / 4) {
      job.worker.memory = kib << 10;
      if (Plan(job).ok()) {
        ExpectRunsWithinItsPlan(job);
      }
    }
  }
}

TEST(PlannerTest, SmallestBudgetItNamesFitsAndOneAlignmentLessDoesNot) {
  Job job = SmallJob();
  job.worker.memory = 1 << 10;
  const auto refused = Plan(job);
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string text(refused.status().message());
  EXPECT_THAT(text, HasSubstr("unit embedding"));
  const uint64_t smallest =
      NumberAfter(text, "the smallest worker.memory that would do is ");
  job.worker.memory = smallest;
  ExpectRunsWithinItsPlan(job);
  job.worker.memory = smallest - 1;
  const auto short_by_one = Plan(job);
  ASSERT_FALSE(short_by_one.ok());
  EXPECT_THAT(std::string(short_by_one.status().message()),
              HasSubstr(absl::StrCat(smallest)));
  EXPECT_THAT(std::string(short_by_one.status().message()),
              HasSubstr("worker.memory is"));
}

TEST(PlannerTest, SmallestHostBudgetItNamesFitsAndLessDoesNot) {
  Job job = SmallJob();
  job.worker.memory = 1 << 10;
  const std::string text(Plan(job).status().message());
  job.worker.memory =
      NumberAfter(text, "the smallest worker.memory that would do is ");
  job.worker.host_memory = NumberAfter(text, "worker.host_memory ");
  ExpectRunsWithinItsPlan(job);
  job.worker.host_memory -= 1;
  const auto refused = Plan(job);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("worker.host_memory"));
}

TEST(PlannerTest, TheDeviceTakesWhatAScarceHostCannot) {
  Job job = SmallJob();
  const auto ample = Plan(job);
  ASSERT_TRUE(ample.ok());
  job.worker.memory = ample->device_bytes / 3;
  const auto usual = Plan(job);
  ASSERT_TRUE(usual.ok()) << usual.status();
  ASSERT_GT(usual->host_step_bytes, 0u);
  job.worker.host_memory =
      usual->report.host_peak_bytes() - usual->host_step_bytes / 4;
  const auto lean = Plan(job);
  ASSERT_TRUE(lean.ok()) << lean.status();
  EXPECT_LT(lean->report.host_peak_bytes(), usual->report.host_peak_bytes());
  ExpectRunsWithinItsPlan(job);
}

TEST(PlannerTest, HostMemoryCoversTheDataThatIsReadAhead) {
  const Job job = SmallJob();
  const auto plan = Plan(job);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const uint64_t rows =
      uint64_t{job.batch.micro_batch_size} * job.model.context;
  const uint64_t held = job.batch.micro_batches + Loader::kAheadMax;
  EXPECT_GE(plan->batch_bytes, held * rows * 2 * sizeof(uint32_t));
  EXPECT_EQ(plan->report.host_peak_bytes(), plan->host_bytes());
  EXPECT_GE(plan->host_bytes(), plan->staging_bytes + plan->batch_bytes);
}

TEST(PlannerTest, LongerAssignmentsAreCutIntoPlannedPasses) {
  Job job = SmallJob();
  job.worker.count = 3;  // Shares of 2, 3 and 3.
  const auto plan = Plan(job);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->micro_batches_max, 3u);
  const auto kept = CutAssignment({.total = 8, .nodes = {{0, 2}}}, *plan);
  ASSERT_EQ(kept.size(), 1u);
  const auto cut = CutAssignment(
      {.version = 4, .total = 8, .nodes = {{0, 4}, {4, 1}}}, *plan);
  ASSERT_EQ(cut.size(), 3u);
  EXPECT_THAT(cut[0].nodes, ElementsAre(Span{0, 2}));
  EXPECT_THAT(cut[1].nodes, ElementsAre(Span{2, 2}));
  EXPECT_THAT(cut[2].nodes, ElementsAre(Span{4, 1}));
  EXPECT_EQ(cut[2].version, 4u);
}

Job ExampleJob(uint32_t layers, uint32_t heads, uint32_t width,
               uint32_t context) {
  Job job = SmallJob();
  job.model = {.family = "gpt2",
               .layers = layers,
               .heads = heads,
               .width = width,
               .context = context,
               .vocabulary = 256,
               .tied = true};
  job.batch = {.micro_batches = 8, .micro_batch_size = 256 / context};
  return job;
}

// The examples' models: 2,048 tokens a step, prefetch of the next unit.
TEST(PlannerTest, TheExamplesFitWhereTheirWeightsDoNot) {
  Job job = ExampleJob(8, 4, 128, 128);
  job.worker.memory = 4404019;  // 4.2 MiB; the weights are 6.4 MB.
  job.worker.host_memory = uint64_t{32} << 20;
  const auto small = Plan(job, 2);
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_GT(small->report.weights_bytes(), job.worker.memory);
  EXPECT_EQ(small->policy.prefetch, 1u);

  job = ExampleJob(32, 7, 448, 256);
  job.worker.memory = uint64_t{72} << 20;
  job.worker.host_memory = uint64_t{256} << 20;
  const auto deep = Plan(job, 2);
  ASSERT_TRUE(deep.ok()) << deep.status();
  EXPECT_GT(deep->report.weights_bytes(), 4 * job.worker.memory);
  EXPECT_EQ(deep->policy.prefetch, 1u);
  EXPECT_TRUE(deep->policy.flow_on_device);
}

}  // namespace
}  // namespace ballast
