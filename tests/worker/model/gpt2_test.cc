// SPDX-License-Identifier: Apache-2.0
#include "worker/model/gpt2.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/worker/step/small_job.h"
#include "worker/model/family.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::SmallJob;

ModelLayout LayoutOf(const Job& job) {
  const auto family = MakeModelFamily(job);
  EXPECT_TRUE(family.ok()) << family.status();
  return (*family)->layout();
}

const TensorSpec& Tensor(const ModelLayout& layout, const std::string& name) {
  for (const TensorSpec& tensor : layout.tensors) {
    if (tensor.name == name) {
      return tensor;
    }
  }
  ADD_FAILURE() << "no tensor " << name;
  return layout.tensors.front();
}

std::vector<std::string> Names(const ModelLayout& layout,
                               const UnitSpec& unit) {
  std::vector<std::string> names;
  for (const TensorUse& use : unit.tensors) {
    names.push_back(layout.tensors[use.tensor].name);
  }
  return names;
}

TEST(Gpt2Test, NamesTensorsAsThePublishedFilesDo) {
  const ModelLayout layout = LayoutOf(SmallJob());
  ASSERT_EQ(layout.units.size(), 2u + 2 * 3);
  EXPECT_EQ(layout.units.front().name, "embedding");
  EXPECT_THAT(Names(layout, layout.units[0]),
              ElementsAre("wte.weight", "wpe.weight"));
  EXPECT_EQ(layout.units[3].name, "h.1.attn");
  EXPECT_THAT(Names(layout, layout.units[3]),
              ElementsAre("h.1.ln_1.weight", "h.1.ln_1.bias",
                          "h.1.attn.c_attn.weight", "h.1.attn.c_attn.bias",
                          "h.1.attn.c_proj.weight", "h.1.attn.c_proj.bias"));
  EXPECT_EQ(layout.units[4].name, "h.1.mlp");
  EXPECT_THAT(Names(layout, layout.units[4]),
              ElementsAre("h.1.ln_2.weight", "h.1.ln_2.bias",
                          "h.1.mlp.c_fc.weight", "h.1.mlp.c_fc.bias",
                          "h.1.mlp.c_proj.weight", "h.1.mlp.c_proj.bias"));
  EXPECT_EQ(layout.units.back().name, "head");
  EXPECT_THAT(Names(layout, layout.units.back()),
              ElementsAre("wte.weight", "ln_f.weight", "ln_f.bias"));
  EXPECT_THAT(Tensor(layout, "h.2.attn.c_attn.weight").shape,
              ElementsAre(32, 96));
  EXPECT_THAT(Tensor(layout, "h.2.mlp.c_proj.weight").shape,
              ElementsAre(128, 32));
}

TEST(Gpt2Test, CountsItsParameters) {
  Job job = SmallJob();
  job.model = {.family = "gpt2",
               .layers = 12,
               .heads = 12,
               .width = 768,
               .context = 1024,
               .vocabulary = 50257,
               .tied = true};
  EXPECT_EQ(LayoutOf(job).parameter_count(), 124439808u);
}

TEST(Gpt2Test, TiedHeadIsASecondUseOfTheEmbedding) {
  Job job = SmallJob();
  const ModelLayout tied = LayoutOf(job);
  EXPECT_EQ(Tensor(tied, "wte.weight").use_count, 2u);
  EXPECT_EQ(tied.units.back().tensors.front().use, 1u);
  job.model.tied = false;
  const ModelLayout untied = LayoutOf(job);
  EXPECT_EQ(Tensor(untied, "wte.weight").use_count, 1u);
  EXPECT_EQ(Names(untied, untied.units.back()).front(), "lm_head.weight");
  EXPECT_EQ(untied.parameter_count(), tied.parameter_count() + 61u * 32);
}

TEST(Gpt2Test, OnlyMatricesDecayAndAreServedInTheComputeType) {
  Job job = SmallJob();
  job.precision.compute_dtype = DType::kBF16;
  for (const TensorSpec& tensor : LayoutOf(job).tensors) {
    const bool matrix = tensor.shape.size() == 2;
    EXPECT_EQ(tensor.decay, matrix) << tensor.name;
    EXPECT_EQ(tensor.served, matrix ? DType::kBF16 : DType::kF32)
        << tensor.name;
  }
}

TEST(Gpt2Test, ResidualProjectionsStartSmallerWithDepth) {
  const ModelLayout layout = LayoutOf(SmallJob());
  EXPECT_DOUBLE_EQ(Tensor(layout, "h.0.mlp.c_fc.weight").init_std, 0.02);
  EXPECT_DOUBLE_EQ(Tensor(layout, "h.0.mlp.c_proj.weight").init_std,
                   0.02 / std::sqrt(6.0));
  EXPECT_EQ(Tensor(layout, "ln_f.weight").init, Init::kOnes);
  EXPECT_EQ(Tensor(layout, "h.0.ln_1.bias").init, Init::kZeros);
}

TEST(RegistryTest, RefusesAnUnknownFamilyAndNamesTheKnownOnes) {
  Job job = SmallJob();
  job.model.family = "gtp2";
  const auto family = MakeModelFamily(job);
  EXPECT_EQ(family.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(family.status().message()),
              HasSubstr("'gtp2'; want one of gpt2"));
}

}  // namespace
}  // namespace ballast
