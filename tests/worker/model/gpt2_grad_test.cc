// SPDX-License-Identifier: Apache-2.0
// The whole model's loss and gradients against a forward pass in fp64, written
// here from the formulas alone, and its central differences.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/worker/step/small_job.h"
#include "worker/model/family.h"
#include "worker/step/local_run.h"

namespace ballast {
namespace {

using Vector = std::vector<double>;

class ReferenceGpt2 {
 public:
  ReferenceGpt2(const ModelOptions& model, std::map<std::string, Vector> values)
      : model_(model), values_(std::move(values)) {}

  std::map<std::string, Vector>& values() { return values_; }

  // Sum of losses over one sequence.
  double Loss(const uint32_t* ids, const uint32_t* targets) const {
    const size_t tokens = model_.context;
    const size_t width = model_.width;
    const Vector& wte = values_.at("wte.weight");
    const Vector& wpe = values_.at("wpe.weight");
    Vector x(tokens * width);
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t c = 0; c < width; ++c) {
        x[t * width + c] = wte[ids[t] * width + c] + wpe[t * width + c];
      }
    }
    for (uint32_t layer = 0; layer < model_.layers; ++layer) {
      const std::string block = absl::StrCat("h.", layer, ".");
      const Vector qkv =
          Linear(Norm(x, block + "ln_1"), block + "attn.c_attn", 3 * width);
      AddTo(Linear(Attend(qkv), block + "attn.c_proj", width), &x);
      Vector inner =
          Linear(Norm(x, block + "ln_2"), block + "mlp.c_fc", 4 * width);
      for (double& v : inner) {
        v = 0.5 * v *
            (1 + std::tanh(std::sqrt(2 / std::numbers::pi) *
                           (v + 0.044715 * v * v * v)));
      }
      AddTo(Linear(inner, block + "mlp.c_proj", width), &x);
    }
    const Vector y = Norm(x, "ln_f");
    const Vector& head = model_.tied ? wte : values_.at("lm_head.weight");
    double loss = 0;
    for (size_t t = 0; t < tokens; ++t) {
      double total = 0;
      double wanted = 0;
      for (size_t v = 0; v < model_.vocabulary; ++v) {
        double logit = 0;
        for (size_t c = 0; c < width; ++c) {
          logit += y[t * width + c] * head[v * width + c];
        }
        total += std::exp(logit);
        wanted = v == targets[t] ? logit : wanted;
      }
      loss += std::log(total) - wanted;
    }
    return loss;
  }

 private:
  static void AddTo(const Vector& term, Vector* total) {
    for (size_t i = 0; i < term.size(); ++i) {
      (*total)[i] += term[i];
    }
  }

  Vector Norm(const Vector& x, const std::string& name) const {
    const size_t width = model_.width;
    const Vector& gamma = values_.at(name + ".weight");
    const Vector& beta = values_.at(name + ".bias");
    Vector y(x.size());
    for (size_t row = 0; row < x.size(); row += width) {
      double mean = 0;
      double variance = 0;
      for (size_t c = 0; c < width; ++c) {
        mean += x[row + c] / static_cast<double>(width);
      }
      for (size_t c = 0; c < width; ++c) {
        variance += (x[row + c] - mean) * (x[row + c] - mean) /
                    static_cast<double>(width);
      }
      for (size_t c = 0; c < width; ++c) {
        y[row + c] =
            (x[row + c] - mean) / std::sqrt(variance + 1e-5) * gamma[c] +
            beta[c];
      }
    }
    return y;
  }

  Vector Linear(const Vector& x, const std::string& name, size_t out) const {
    const Vector& weight = values_.at(name + ".weight");
    const Vector& bias = values_.at(name + ".bias");
    const size_t in = weight.size() / out;
    const size_t rows = x.size() / in;
    Vector y(rows * out);
    for (size_t row = 0; row < rows; ++row) {
      for (size_t o = 0; o < out; ++o) {
        double sum = bias[o];
        for (size_t i = 0; i < in; ++i) {
          sum += x[row * in + i] * weight[i * out + o];
        }
        y[row * out + o] = sum;
      }
    }
    return y;
  }

  Vector Attend(const Vector& qkv) const {
    const size_t tokens = model_.context;
    const size_t width = model_.width;
    const size_t size = width / model_.heads;
    Vector out(tokens * width, 0.0);
    for (size_t head = 0; head < model_.heads; ++head) {
      for (size_t t = 0; t < tokens; ++t) {
        Vector score(t + 1);
        double total = 0;
        for (size_t s = 0; s <= t; ++s) {
          for (size_t c = head * size; c < (head + 1) * size; ++c) {
            score[s] += qkv[t * 3 * width + c] * qkv[s * 3 * width + width + c];
          }
          score[s] = std::exp(score[s] / std::sqrt(static_cast<double>(size)));
          total += score[s];
        }
        for (size_t s = 0; s <= t; ++s) {
          for (size_t c = head * size; c < (head + 1) * size; ++c) {
            out[t * width + c] +=
                score[s] / total * qkv[s * 3 * width + 2 * width + c];
          }
        }
      }
    }
    return out;
  }

  const ModelOptions model_;
  std::map<std::string, Vector> values_;
};

Job TinyJob(bool tied) {
  Job job = testing::SmallJob();
  job.model = {.family = "gpt2",
               .layers = 2,
               .heads = 2,
               .width = 8,
               .context = 6,
               .vocabulary = 11,
               .tied = tied};
  job.batch = {.micro_batches = 2, .micro_batch_size = 2};
  return job;
}

class Gpt2GradTest : public ::testing::TestWithParam<bool> {};

TEST_P(Gpt2GradTest, LossAndGradientsAgreeWithCentralDifferences) {
  const Job job = TinyJob(GetParam());
  const auto family = MakeModelFamily(job);
  ASSERT_TRUE(family.ok());
  std::map<std::string, Vector> values;
  for (const TensorSpec& tensor : (*family)->layout().tensors) {
    std::vector<float> filled(tensor.elem_count());
    testing::SmallValues(tensor, absl::MakeSpan(filled));
    values[tensor.name] = Vector(filled.begin(), filled.end());
  }
  ReferenceGpt2 reference(job.model, std::move(values));
  const std::vector<MicroBatch> batches = testing::SmallBatches(job);
  const auto loss = [&] {
    double sum = 0;
    for (const MicroBatch& batch : batches) {
      for (size_t first = 0; first < batch.ids.size();
           first += job.model.context) {
        sum += reference.Loss(&batch.ids[first], &batch.targets[first]);
      }
    }
    return sum;
  };
  const auto result =
      RunLocalStep(job, testing::OneThread, batches, testing::SmallValues);
  ASSERT_TRUE(result.ok()) << result.status();
  // fp32 rounds each of some hundred terms by 6e-8.
  EXPECT_NEAR(result->loss_sum, loss(), 1e-5 * result->loss_sum);
  for (const auto& [name, gradient] : result->gradients) {
    Vector& value = reference.values().at(name);
    double scale = 0;
    for (const float g : gradient) {
      scale = std::max(scale, std::abs(static_cast<double>(g)));
    }
    EXPECT_GT(scale, 1e-4) << name;
    // Every element of a vector, every 7th of a matrix: seconds, not minutes.
    const size_t step = gradient.size() > 40 ? 7 : 1;
    for (size_t i = 0; i < gradient.size(); i += step) {
      constexpr double kEps = 1e-5;
      const double kept = value[i];
      value[i] = kept + kEps;
      const double above = loss();
      value[i] = kept - kEps;
      const double below = loss();
      value[i] = kept;
      EXPECT_NEAR(static_cast<double>(gradient[i]),
                  (above - below) / (2 * kEps), 1e-5 * scale)
          << name << " " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(TiedAndUntied, Gpt2GradTest, ::testing::Bool());

}  // namespace
}  // namespace ballast
