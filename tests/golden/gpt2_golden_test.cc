// SPDX-License-Identifier: Apache-2.0
// GPT-2 against what PyTorch computes in double precision: make_golden.py made
// gpt2_golden.json from the same weights, text and sample order.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/initial_value.h"
#include "kernels/cpu_kernels.h"
#include "kernels/update.h"
#include "ps/membership/schedule.h"
#include "tests/golden/golden_text.h"
#include "worker/data/loader.h"
#include "worker/model/family.h"
#include "worker/step/local_run.h"

namespace ballast::testing {
namespace {

using Json = nlohmann::json;
// By tensor name.
using Tensors = std::map<std::string, std::vector<float>>;

Json Golden() {
  std::ifstream file(BALLAST_GOLDEN_JSON);
  return Json::parse(file);
}

Job ModelJob(const Json& golden) {
  const Json& model = golden.at("model");
  Job job;
  job.model.layers = model.at("layers");
  job.model.heads = model.at("heads");
  job.model.width = model.at("width");
  job.model.context = model.at("context");
  job.model.vocabulary = model.at("vocabulary");
  job.model.tied = model.at("tied");
  job.worker.memory = uint64_t{32} << 20;
  job.worker.host_memory = uint64_t{32} << 20;
  job.worker.threads = 2;
  return job;
}

Job TrainingJob(const Json& golden) {
  const Json& from = golden.at("job");
  Job job = ModelJob(golden);
  job.run.seed = from.at("seed");
  job.run.steps = from.at("steps");
  job.batch.micro_batches = from.at("micro_batches");
  job.batch.micro_batch_size = from.at("micro_batch_size");
  job.data.validation_fraction = from.at("validation_fraction");
  job.eval.micro_batches = from.at("eval_micro_batches");
  job.optimizer.lr = from.at("lr");
  job.optimizer.beta1 = from.at("beta1");
  job.optimizer.beta2 = from.at("beta2");
  job.optimizer.epsilon = from.at("epsilon");
  job.optimizer.weight_decay = from.at("weight_decay");
  job.optimizer.clip_norm = from.at("clip_norm");
  job.schedule.warmup_steps = from.at("warmup_steps");
  job.schedule.min_lr_ratio = from.at("min_lr_ratio");
  return job;
}

MicroBatch BatchAt(const std::string& text,
                   const std::vector<uint64_t>& offsets, uint64_t context) {
  MicroBatch batch;
  for (const uint64_t offset : offsets) {
    for (uint64_t t = 0; t < context; ++t) {
      batch.ids.push_back(static_cast<uint8_t>(text.at(offset + t)));
      batch.targets.push_back(static_cast<uint8_t>(text.at(offset + t + 1)));
    }
  }
  return batch;
}

// Loss and gradients of a step, by the worker's executor.
absl::StatusOr<LocalResult> RunStep(const Job& job,
                                    const std::vector<MicroBatch>& batches,
                                    const Tensors& params) {
  return RunLocalStep(
      job, [] { return MakeCpuKernels(2); }, batches,
      [&params](const TensorSpec& tensor, absl::Span<float> out) {
        const std::vector<float>& values = params.at(tensor.name);
        std::copy(values.begin(), values.end(), out.begin());
      });
}

std::vector<TensorSpec> TensorsOf(const Job& job) {
  const auto family = MakeModelFamily(job);
  EXPECT_TRUE(family.ok()) << family.status();
  return (*family)->layout().tensors;
}

double Norm(const std::vector<float>& values) {
  double squares = 0;
  for (const float value : values) {
    squares += static_cast<double>(value) * value;
  }
  return std::sqrt(squares);
}

// As fixed_vector of make_golden.py.
double ProductWithFixedVector(const std::vector<float>& values) {
  double product = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto spread = static_cast<uint32_t>(i * 2654435761u);
    product += values[i] * (spread * 0x1p-32 - 0.5);
  }
  return product;
}

// The parameter of every test: whether the head is the token embedding.
class GradientsTest : public ::testing::TestWithParam<bool> {};

TEST_P(GradientsTest, LossAndEveryGradientAgreeWithPyTorchInDouble) {
  const Json golden = Golden().at("gradients").at(GetParam() ? 0 : 1);
  Job job = ModelJob(golden);
  job.batch.micro_batches = 1;
  job.batch.micro_batch_size = golden.at("sequences");
  Tensors params;
  // Every tensor is random here, so that no gradient is trivial.
  for (TensorSpec tensor : TensorsOf(job)) {
    const float mean = tensor.init == Init::kOnes ? 1.0f : 0.0f;
    tensor.init = Init::kNormal;
    tensor.init_std = 0.1;
    std::vector<float>& values = params[tensor.name];
    values.resize(tensor.elem_count());
    FillInitial(tensor, golden.at("seed"), 0, absl::MakeSpan(values));
    for (float& value : values) {
      value += mean;
    }
  }
  ASSERT_EQ(params.size(), golden.at("tensors").size());
  std::vector<uint64_t> offsets;
  for (uint64_t i = 0; i < job.batch.micro_batch_size; ++i) {
    offsets.push_back(i * job.model.context);
  }
  const auto result = RunStep(
      job, {BatchAt(GoldenText(1000), offsets, job.model.context)}, params);
  ASSERT_TRUE(result.ok()) << result.status();
  const double loss = golden.at("loss_sum");
  EXPECT_NEAR(result->loss_sum, loss, 1e-5 * loss);
  for (const auto& [name, wanted] : golden.at("tensors").items()) {
    SCOPED_TRACE(name);
    const std::vector<float>& got = result->gradients.at(name);
    const double norm = wanted.at("norm");
    EXPECT_NEAR(Norm(got), norm, 1e-5 * norm);
    // With numbers of about 0.3: an error of 1e-5 norms at most.
    EXPECT_NEAR(ProductWithFixedVector(got), wanted.at("product"), 1e-5 * norm);
    for (size_t i = 0; i < wanted.at("at").size(); ++i) {
      const double value = wanted.at("values").at(i);
      EXPECT_NEAR(got.at(wanted.at("at").at(i)), value, 1e-5 * norm);
    }
  }
}

std::string HeadName(const ::testing::TestParamInfo<bool>& test) {
  return test.param ? "Tied" : "Untied";
}

INSTANTIATE_TEST_SUITE_P(Heads, GradientsTest, ::testing::Bool(), HeadName);

// One run of the golden job: the worker's executor, the server's update and
// the coordinator's scalars.
class Trainer {
 public:
  Trainer(const Job& job, const Sampler& sampler, std::string text)
      : job_(job),
        sampler_(sampler),
        text_(std::move(text)),
        tensors_(TensorsOf(job)) {
    for (const TensorSpec& tensor : tensors_) {
      const uint64_t elems = tensor.elem_count();
      params_[tensor.name].resize(elems);
      exp_avg_[tensor.name].resize(elems);
      exp_avg_sq_[tensor.name].resize(elems);
      FillInitial(tensor, job.run.seed, 0,
                  absl::MakeSpan(params_[tensor.name]));
    }
  }

  // Mean loss before the update, and the gradient's norm before clipping.
  std::pair<double, double> Step(uint64_t step) {
    std::vector<MicroBatch> batches;
    for (uint32_t m = 0; m < job_.batch.micro_batches; ++m) {
      std::vector<uint64_t> offsets;
      for (uint32_t i = 0; i < job_.batch.micro_batch_size; ++i) {
        offsets.push_back(sampler_.TrainOffset(step, m, i));
      }
      batches.push_back(BatchAt(text_, offsets, job_.model.context));
    }
    const LocalResult result = Run(batches);
    const auto tokens = static_cast<double>(job_.tokens_per_step());
    double squares = 0;
    for (const auto& [name, gradient] : result.gradients) {
      squares += std::pow(Norm(gradient), 2);
    }
    const double norm = std::sqrt(squares) / tokens;
    Update(step, ClipFactor(job_.optimizer.clip_norm, norm) / tokens,
           result.gradients);
    return {result.loss_sum / tokens, norm};
  }

  // An evaluation has as many micro-batches here as a step.
  double HeldOutLoss() {
    std::vector<MicroBatch> batches;
    for (uint32_t m = 0; m < job_.eval.micro_batches; ++m) {
      std::vector<uint64_t> offsets;
      for (uint32_t i = 0; i < job_.batch.micro_batch_size; ++i) {
        offsets.push_back(sampler_.EvalOffset(m, i));
      }
      batches.push_back(BatchAt(text_, offsets, job_.model.context));
    }
    return Run(batches).loss_sum / static_cast<double>(job_.tokens_per_step());
  }

 private:
  LocalResult Run(const std::vector<MicroBatch>& batches) {
    auto result = RunStep(job_, batches, params_);
    EXPECT_TRUE(result.ok()) << result.status();
    return *std::move(result);
  }

  void Update(uint64_t step, double grad_scale, const Tensors& gradients) {
    const OptimizerOptions& optimizer = job_.optimizer;
    AdamWScalars scalars;
    scalars.grad_scale = static_cast<float>(grad_scale);
    scalars.learning_rate = static_cast<float>(
        LearningRate(optimizer, job_.schedule, job_.run.steps, step));
    scalars.beta1 = static_cast<float>(optimizer.beta1);
    scalars.beta2 = static_cast<float>(optimizer.beta2);
    scalars.epsilon = static_cast<float>(optimizer.epsilon);
    scalars.bias1 = static_cast<float>(BiasCorrection(optimizer.beta1, step));
    scalars.bias2 = static_cast<float>(BiasCorrection(optimizer.beta2, step));
    for (const TensorSpec& tensor : tensors_) {
      scalars.weight_decay =
          tensor.decay ? static_cast<float>(optimizer.weight_decay) : 0.0f;
      AdamWCpu(scalars, gradients.at(tensor.name),
               absl::MakeSpan(params_[tensor.name]),
               absl::MakeSpan(exp_avg_[tensor.name]),
               absl::MakeSpan(exp_avg_sq_[tensor.name]), {});
    }
  }

  const Job job_;
  const Sampler sampler_;
  const std::string text_;
  const std::vector<TensorSpec> tensors_;
  Tensors params_;
  Tensors exp_avg_;
  Tensors exp_avg_sq_;
};

class TrainingTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    golden_ = Golden().at("training").at(GetParam() ? 0 : 1);
    job_ = TrainingJob(golden_);
    text_ = GoldenText(golden_.at("job").at("text_bytes"));
    auto sampler = Sampler::Create(job_, text_.size());
    ASSERT_TRUE(sampler.ok()) << sampler.status();
    sampler_ = std::make_unique<Sampler>(*std::move(sampler));
  }

  // Each loss, norm and the held-out loss to relative errors.
  void ExpectFollows(double loss_error, double norm_error) {
    Trainer trainer(job_, *sampler_, text_);
    double loss_worst = 0;
    double norm_worst = 0;
    for (uint64_t step = 1; step <= job_.run.steps; ++step) {
      const Json& wanted = golden_.at("steps").at(step - 1);
      const double loss_wanted = wanted.at(0);
      const double norm_wanted = wanted.at(1);
      const auto [loss, norm] = trainer.Step(step);
      loss_worst = std::max(loss_worst, std::abs(loss / loss_wanted - 1));
      norm_worst = std::max(norm_worst, std::abs(norm / norm_wanted - 1));
    }
    EXPECT_LT(loss_worst, loss_error);
    EXPECT_LT(norm_worst, norm_error);
    const double held_out = golden_.at("validation_loss");
    EXPECT_NEAR(trainer.HeldOutLoss(), held_out, loss_error * held_out);
    RecordProperty("loss_worst", absl::StrCat(loss_worst));
    RecordProperty("norm_worst", absl::StrCat(norm_worst));
  }

  Json golden_;
  Job job_;
  std::string text_;
  std::unique_ptr<Sampler> sampler_;
};

TEST_P(TrainingTest, TextAndSampleOrderAreTheScripts) {
  EXPECT_EQ(text_.substr(0, 32), golden_.at("text_begin"));
  const std::vector<uint64_t> wanted = golden_.at("first_offsets");
  std::vector<uint64_t> offsets;
  for (uint32_t m = 0; m < job_.batch.micro_batches; ++m) {
    for (uint32_t i = 0; i < job_.batch.micro_batch_size; ++i) {
      offsets.push_back(sampler_->TrainOffset(1, m, i));
    }
  }
  EXPECT_EQ(offsets, wanted);
}

TEST_P(TrainingTest, FiftyStepsInFp32FollowPyTorchInDouble) {
  ExpectFollows(1e-5, 1e-4);
}

// bf16 keeps 8 bits: one product is off by some 2^-9, which the sums average.
TEST_P(TrainingTest, FiftyStepsInBf16StayWithinTwoPerMille) {
  job_.precision.compute_dtype = DType::kBF16;
  ExpectFollows(2e-3, 5e-2);
}

INSTANTIATE_TEST_SUITE_P(Heads, TrainingTest, ::testing::Bool(), HeadName);

}  // namespace
}  // namespace ballast::testing
