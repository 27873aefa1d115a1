// SPDX-License-Identifier: Apache-2.0
// Every kernel on every vector width of this processor, not only its widest:
// updates must give the same bits, layers the same numbers but for rounding.
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kernels/cpu_kernels.h"
#include "kernels/update.h"
#include "tests/kernels/kernel_test_util.h"

namespace ballast {
namespace {

using ::ballast::testing::Near;
using ::ballast::testing::SameBits;
using ::ballast::testing::Scratch;
using ::ballast::testing::Values;

// Runs with one target alone while it lives.
class OnTarget {
 public:
  explicit OnTarget(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(target);
  }
  ~OnTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  OnTarget(const OnTarget&) = delete;
  OnTarget& operator=(const OnTarget&) = delete;
};

class VectorWidthTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if ((hwy::SupportedTargets() & HWY_AVX2) == 0 ||
        (hwy::SupportedTargets() & HWY_AVX3) == 0) {
      GTEST_SKIP() << "this processor has one vector width alone";
    }
  }
};

struct Updated {
  std::vector<float> param, exp_avg, exp_avg_sq, momentum, total;
  std::vector<uint16_t> served, cast;
  BlockStats stats;
};

Updated Update(int64_t target) {
  const OnTarget only(target);
  const size_t n = 1003;
  const auto grad = Values(n, 1);
  Updated u{Values(n, 2),
            Values(n, 3),
            std::vector<float>(n, 0.25f),
            Values(n, 4),
            Values(n, 5),
            std::vector<uint16_t>(n),
            std::vector<uint16_t>(n),
            BlockStatsCpu(grad)};
  AdamWCpu({0.5f, 1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.19f, 0.0975f}, grad,
           absl::MakeSpan(u.param), absl::MakeSpan(u.exp_avg),
           absl::MakeSpan(u.exp_avg_sq), absl::MakeSpan(u.served));
  SgdCpu({0.25f, 0.1f, 0.9f, 0.01f}, grad, absl::MakeSpan(u.param),
         absl::MakeSpan(u.momentum), {});
  AccumulateCpu(grad, absl::MakeSpan(u.total));
  CastToBF16Cpu(grad, absl::MakeSpan(u.cast));
  return u;
}

TEST_F(VectorWidthTest, UpdatesGiveTheSameBits) {
  const Updated wide = Update(HWY_AVX3);
  const Updated narrow = Update(HWY_AVX2);
  EXPECT_TRUE(SameBits(wide.param, narrow.param));
  EXPECT_TRUE(SameBits(wide.exp_avg, narrow.exp_avg));
  EXPECT_TRUE(SameBits(wide.exp_avg_sq, narrow.exp_avg_sq));
  EXPECT_TRUE(SameBits(wide.momentum, narrow.momentum));
  EXPECT_TRUE(SameBits(wide.total, narrow.total));
  EXPECT_EQ(wide.served, narrow.served);
  EXPECT_EQ(wide.cast, narrow.cast);
  EXPECT_EQ(wide.stats.sum_squares, narrow.stats.sum_squares);
}

TEST_F(VectorWidthTest, KernelsOfAnotherWidthSayThatTheyAreOthers) {
  const auto identity = [](int64_t target, int threads) {
    const OnTarget only(target);
    return MakeCpuKernels(threads)->Identity();
  };
  EXPECT_NE(identity(HWY_AVX3, 1), identity(HWY_AVX2, 1));
  EXPECT_EQ(identity(HWY_AVX2, 1), identity(HWY_AVX2, 2));
}

struct Layers {
  std::vector<float> norm, dx, gelu, dgelu, out, dq, dk, dv, logits;
  double loss = 0;
};

Layers RunLayers(int64_t target) {
  const OnTarget only(target);
  const auto kernels = MakeCpuKernels(2);
  const uint64_t rows = 150, width = 51;
  const uint64_t n = rows * width;
  const auto x = Values(n, 1), dy = Values(n, 2), v = Values(n, 3);
  const std::vector<float> gamma(width, 1.5f);
  std::vector<float> mean(rows), rstd(rows), dgamma(width), dbeta(width);
  std::vector<float> lse(3 * rows);
  Layers r;
  for (auto* out :
       {&r.norm, &r.dx, &r.gelu, &r.dgelu, &r.out, &r.dq, &r.dk, &r.dv}) {
    out->resize(n);
  }
  kernels->LayerNorm(rows, width, 1e-5f, x.data(), gamma.data(), gamma.data(),
                     r.norm.data(), mean.data(), rstd.data());
  kernels->LayerNormGrad(
      rows, width, x.data(), gamma.data(), mean.data(), rstd.data(), dy.data(),
      nullptr, r.dx.data(), dgamma.data(), dbeta.data(),
      Scratch(kernels->LayerNormGradScratchBytes(rows, width)).get());
  kernels->Gelu(n, x.data(), r.gelu.data());
  kernels->GeluGrad(n, x.data(), dy.data(), r.dgelu.data());
  const AttentionShape s = {1, rows, 3, 3, 17, width, width, width};
  kernels->Attention(s, x.data(), dy.data(), v.data(), r.out.data(), lse.data(),
                     Scratch(kernels->AttentionScratchBytes(s)).get());
  kernels->AttentionGrad(s, x.data(), dy.data(), v.data(), r.out.data(),
                         lse.data(), x.data(), r.dq.data(), r.dk.data(),
                         r.dv.data(),
                         Scratch(kernels->AttentionGradScratchBytes(s)).get());
  r.logits = x;
  const std::vector<uint32_t> targets(rows, 7);
  r.loss = kernels->CrossEntropy(
      rows, width, targets.data(), true, r.logits.data(),
      Scratch(kernels->CrossEntropyScratchBytes(rows)).get());
  return r;
}

TEST_F(VectorWidthTest, LayersDifferByRoundingAlone) {
  const Layers wide = RunLayers(HWY_AVX3);
  const Layers narrow = RunLayers(HWY_AVX2);
  // Sums of at most 150 terms of order 1, in another order.
  EXPECT_TRUE(Near(narrow.norm, wide.norm, 5e-6));
  EXPECT_TRUE(Near(narrow.dx, wide.dx, 5e-6));
  EXPECT_TRUE(SameBits(narrow.gelu, wide.gelu));
  EXPECT_TRUE(SameBits(narrow.dgelu, wide.dgelu));
  EXPECT_TRUE(Near(narrow.out, wide.out, 1e-5));
  EXPECT_TRUE(Near(narrow.dq, wide.dq, 5e-5));
  EXPECT_TRUE(Near(narrow.dk, wide.dk, 5e-5));
  EXPECT_TRUE(Near(narrow.dv, wide.dv, 5e-5));
  EXPECT_TRUE(Near(narrow.logits, wide.logits, 1e-6));
  EXPECT_NEAR(narrow.loss, wide.loss, 1e-6 * wide.loss);
}

}  // namespace
}  // namespace ballast
