// SPDX-License-Identifier: Apache-2.0
#include "worker/step/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "tests/worker/step/small_job.h"
#include "worker/step/local_run.h"
#include "worker/step/planner.h"

namespace ballast {
namespace {

using testing::OneThread;
using testing::SmallBatches;
using testing::SmallJob;
using testing::SmallValues;

// What a step under one policy came to.
struct Outcome {
  double loss = 0;
  std::map<std::string, std::vector<float>> gradients;
  uint64_t pushed_bytes = 0;
  uint64_t fetched_bytes = 0;
  uint64_t device_peak = 0;
};

class CountingObserver : public PassObserver {
 public:
  explicit CountingObserver(int end = -1) : left_(end) {}
  absl::Status OnUnit(PassPhase, uint32_t) override {
    return left_-- == 0 ? absl::CancelledError("another directive")
                        : absl::OkStatus();
  }

 private:
  int left_;
};

class ExecutorTest : public ::testing::Test {
 protected:
  void Make(const Job& job) {
    job_ = job;
    family_ = MakeModelFamily(job).value();
    device_ = CpuDevice::Create(uint64_t{64} << 20, OneThread()).value();
    host_ =
        Arena::Create({.name = "host", .bytes = uint64_t{64} << 20}).value();
    batches_ = SmallBatches(job);
  }

  Outcome Run(const StepPolicy& policy, uint32_t workers = 1) {
    StepExecutor executor(family_.get(), device_.get(), host_.get(), policy);
    const uint32_t total = job_.batch.micro_batches;
    LocalWeights weights(&family_->layout(), device_.get(), SmallValues);
    LocalGradients gradients(&family_->layout(), device_.get(), total);
    CountingObserver observer;
    for (const Span& range : DealSpans(total, workers)) {
      const auto result = executor.Train(
          {.version = 0, .total = total, .nodes = Cover(range, total)},
          absl::MakeConstSpan(batches_).subspan(range.first, range.count),
          &weights, &gradients, &observer);
      EXPECT_TRUE(result.ok()) << result.status();
    }
    EXPECT_EQ(device_->used_bytes(), 0u);
    EXPECT_EQ(host_->used_bytes(), 0u);
    return {gradients.ReduceLoss().value(), gradients.Reduce().value(),
            gradients.pushed_bytes(), weights.fetched_bytes(),
            device_->peak_bytes()};
  }

  StepPolicy Ample() const {
    const auto middle =
        static_cast<uint32_t>(family_->layout().units.size() - 2);
    return {.prefetch = 1,
            .resident_units = middle,
            .kept_units = middle,
            .device_inputs = middle,
            .flow_on_device = true,
            .host_sums_from = 64};
  }

  static void ExpectSameBits(const Outcome& a, const Outcome& b) {
    EXPECT_EQ(std::memcmp(&a.loss, &b.loss, sizeof(double)), 0);
    for (const auto& [name, values] : a.gradients) {
      const std::vector<float>& other = b.gradients.at(name);
      ASSERT_EQ(values.size(), other.size());
      EXPECT_EQ(std::memcmp(values.data(), other.data(),
                            values.size() * sizeof(float)),
                0)
          << name;
    }
  }

  Job job_;
  std::unique_ptr<ModelFamily> family_;
  std::unique_ptr<CpuDevice> device_;
  std::unique_ptr<Arena> host_;
  std::vector<MicroBatch> batches_;
};

TEST_F(ExecutorTest, NoChoiceOfThePolicyChangesABit) {
  Make(SmallJob());
  const Outcome ample = Run(Ample());
  ASSERT_GT(ample.loss, 0);
  std::vector<StepPolicy> policies = {StepPolicy{}};
  for (uint32_t prefetch = 0; prefetch <= 4; ++prefetch) {
    policies.push_back({.prefetch = prefetch});
  }
  policies.push_back({.resident_units = 2});
  policies.push_back({.kept_units = 3});
  policies.push_back({.device_inputs = 1});
  policies.push_back({.flow_on_device = true});
  for (const uint32_t from : {2u, 4u, 8u}) {
    policies.push_back({.host_sums_from = from});
  }
  for (const StepPolicy& policy : policies) {
    ExpectSameBits(ample, Run(policy));
  }
}

TEST_F(ExecutorTest, NumberOfWorkersChangesNoBit) {
  for (const uint32_t total : {5u, 8u}) {
    Job job = SmallJob();
    job.batch.micro_batches = total;
    Make(job);
    const Outcome one = Run(Ample());
    for (const uint32_t workers : {2u, 3u, total}) {
      ExpectSameBits(one, Run(Ample(), workers));
      ExpectSameBits(one, Run(StepPolicy{}, workers));
    }
  }
}

TEST_F(ExecutorTest, BF16ProductsKeepThePromiseToo) {
  if (!CpuHasBF16Products()) {
    GTEST_SKIP() << "this processor has no bf16 products";
  }
  Job job = SmallJob();
  job.precision.compute_dtype = DType::kBF16;
  Make(job);
  ExpectSameBits(Run(Ample()), Run(StepPolicy{}, 3));
}

TEST_F(ExecutorTest, OneWorkerPushesEachUseOnce) {
  Make(SmallJob());
  uint64_t bytes = 0;
  for (const TensorSpec& tensor : family_->layout().tensors) {
    bytes += tensor.elem_count() * tensor.use_count * sizeof(float);
  }
  EXPECT_EQ(Run(StepPolicy{}).pushed_bytes, bytes);
}

TEST_F(ExecutorTest, ResidentUnitsAreFetchedOnce) {
  Make(SmallJob());
  const ModelLayout& layout = family_->layout();
  uint64_t once = 0;
  uint64_t again = 0;
  for (size_t unit = 0; unit < layout.units.size(); ++unit) {
    for (const TensorUse& use : layout.units[unit].tensors) {
      const TensorSpec& tensor = layout.tensors[use.tensor];
      const uint64_t bytes = tensor.elem_count() * DTypeBytes(tensor.served);
      once += bytes;
      again += unit > 0 && unit + 1 < layout.units.size() ? bytes : 0;
    }
  }
  EXPECT_EQ(Run(Ample()).fetched_bytes, once);
  EXPECT_EQ(Run(StepPolicy{}).fetched_bytes, once + again);
}

TEST_F(ExecutorTest, EvaluationSumsTheSameLosses) {
  Make(SmallJob());
  LocalWeights weights(&family_->layout(), device_.get(), SmallValues);
  CountingObserver observer;
  for (const StepPolicy& policy : {StepPolicy{}, Ample()}) {
    StepExecutor executor(family_.get(), device_.get(), host_.get(), policy);
    const auto losses = executor.Evaluate(0, batches_, &weights, &observer);
    ASSERT_TRUE(losses.ok()) << losses.status();
    ASSERT_EQ(losses->size(), batches_.size());
    double sum = 0;
    for (const double loss : *losses) {
      sum += loss;
    }
    EXPECT_NEAR(sum, Run(Ample()).loss, 1e-9 * sum);
  }
}

TEST_F(ExecutorTest, GivesEverythingBackWhenCalledOffAtAnyPoint) {
  Make(SmallJob());
  StepExecutor executor(family_.get(), device_.get(), host_.get(),
                        {.prefetch = 2, .kept_units = 2, .device_inputs = 2});
  const uint32_t total = job_.batch.micro_batches;
  const int calls =
      static_cast<int>((2 * family_->layout().units.size() - 1) * total);
  for (int end = 0; end <= calls; end += 5) {
    LocalWeights weights(&family_->layout(), device_.get(), SmallValues);
    LocalGradients gradients(&family_->layout(), device_.get(), total);
    CountingObserver observer(end);
    const auto result =
        executor.Train({.total = total, .nodes = {{0, total}}}, batches_,
                       &weights, &gradients, &observer);
    EXPECT_EQ(result.ok(), end >= calls) << end;
    EXPECT_EQ(device_->used_bytes(), 0u);
    EXPECT_EQ(host_->used_bytes(), 0u);
  }
}

}  // namespace
}  // namespace ballast
