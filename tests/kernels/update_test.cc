// SPDX-License-Identifier: Apache-2.0
#include "kernels/update.h"

#include <cmath>
#include <limits>
#include <vector>

#include "common/dtype.h"
#include "gtest/gtest.h"
#include "kernels/cpu_kernels.h"
#include "tests/kernels/kernel_test_util.h"

namespace ballast {
namespace {

using ::ballast::testing::Near;
using ::ballast::testing::SameBits;
using ::ballast::testing::Values;

constexpr float kInf = std::numeric_limits<float>::infinity();

class UpdateTest : public ::testing::TestWithParam<size_t> {};

INSTANTIATE_TEST_SUITE_P(Lengths, UpdateTest,
                         ::testing::Values(0, 1, 7, 8, 9, 15, 16, 17, 31, 33,
                                           1000));

TEST_P(UpdateTest, AdamWAgreesWithDouble) {
  const size_t n = GetParam();
  const AdamWScalars s = {0.5f,  1e-2f, 0.9f,  0.95f,
                          1e-8f, 0.1f,  0.19f, 0.0975f};
  const auto grad = Values(n, 1);
  const auto param = Values(n, 2);
  const auto exp_avg = Values(n, 3, 0.1);
  std::vector<float> exp_avg_sq = Values(n, 4, 0.1);
  for (float& value : exp_avg_sq) value *= value;
  auto p = param;
  auto m = exp_avg;
  auto v = exp_avg_sq;
  std::vector<uint16_t> served(n);
  AdamWCpu(s, grad, absl::MakeSpan(p), absl::MakeSpan(m), absl::MakeSpan(v),
           absl::MakeSpan(served));
  std::vector<double> want_p(n), want_m(n), want_v(n);
  for (size_t i = 0; i < n; ++i) {
    const double g = double{grad[i]} * s.grad_scale;
    want_m[i] = s.beta1 * double{exp_avg[i]} + (1 - double{s.beta1}) * g;
    want_v[i] = s.beta2 * double{exp_avg_sq[i]} + (1 - double{s.beta2}) * g * g;
    want_p[i] =
        param[i] -
        s.learning_rate * (want_m[i] / s.bias1 /
                               (std::sqrt(want_v[i] / s.bias2) + s.epsilon) +
                           double{s.weight_decay} * param[i]);
    EXPECT_EQ(served[i], ToBF16(p[i]));
  }
  // A dozen roundings; the step itself is at most some 1e-2 * 10.
  EXPECT_TRUE(Near(m, want_m, 2e-7, 4e-7));
  EXPECT_TRUE(Near(v, want_v, 1e-8, 1e-6));
  EXPECT_TRUE(Near(p, want_p, 1e-7, 4e-7));
}

TEST_P(UpdateTest, SgdAgreesWithDouble) {
  const size_t n = GetParam();
  const SgdScalars s = {0.25f, 0.1f, 0.9f, 0.01f};
  const auto grad = Values(n, 1);
  const auto param = Values(n, 2);
  const auto buffer = Values(n, 3);
  auto p = param;
  auto b = buffer;
  SgdCpu(s, grad, absl::MakeSpan(p), absl::MakeSpan(b), {});
  std::vector<double> want_p(n), want_b(n);
  for (size_t i = 0; i < n; ++i) {
    const double g =
        double{grad[i]} * s.grad_scale + double{s.weight_decay} * param[i];
    want_b[i] = double{s.momentum} * buffer[i] + g;
    want_p[i] = param[i] - double{s.learning_rate} * want_b[i];
  }
  EXPECT_TRUE(Near(b, want_b, 5e-7, 5e-7));
  EXPECT_TRUE(Near(p, want_p, 5e-7, 5e-7));
}

TEST_P(UpdateTest, AccumulateIsTheSameSumForAnyAlignment) {
  const size_t n = GetParam();
  const auto term = Values(n + 1, 1);
  auto total = Values(n + 3, 2);
  auto want = total;
  for (size_t i = 0; i < n; ++i) want[i + 3] += term[i + 1];
  AccumulateCpu(absl::MakeConstSpan(term).subspan(1),
                absl::MakeSpan(total).subspan(3));
  EXPECT_TRUE(SameBits(total, want));
}

TEST_P(UpdateTest, CastRoundsAsTheScalarRuleDoes) {
  auto in = Values(GetParam(), 1);
  // Ties, both zeros, overflow to infinity, infinities, a NaN whose payload
  // would vanish, denormals.
  const float special[] = {
      1.00390625f, 1.01171875f, -0.0f,  3.4e38f,
      kInf,        -kInf,       1e-40f, std::bit_cast<float>(0x7f800001u)};
  for (size_t i = 0; i < std::min<size_t>(in.size(), 8); ++i) {
    in[in.size() - 1 - i] = special[i];
  }
  std::vector<uint16_t> out(in.size());
  CastToBF16Cpu(in, absl::MakeSpan(out));
  for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(out[i], ToBF16(in[i])) << i;
}

TEST_P(UpdateTest, StatsSumSquaresInAnOrderOfTheLengthAlone) {
  const auto block = Values(GetParam() + 1, 1);
  const auto span = absl::MakeConstSpan(block).subspan(1);
  double sums[16] = {};
  for (size_t i = 0; i < span.size(); ++i) {
    sums[i % 16] += double{span[i]} * span[i];
  }
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  const BlockStats stats = BlockStatsCpu(span);
  EXPECT_EQ(stats.sum_squares, sums[0]);
  EXPECT_EQ(stats.non_finite, 0u);
}

TEST(BlockStatsTest, CountsAndLeavesOutWhatIsNotFinite) {
  for (const size_t n : {size_t{5}, size_t{16}, size_t{40}}) {
    std::vector<float> block(n, 2.0f);
    block[0] = kInf;
    block[2] = -kInf;
    block[n - 1] = std::nanf("");
    const BlockStats stats = BlockStatsCpu(block);
    EXPECT_EQ(stats.non_finite, 3u);
    EXPECT_EQ(stats.sum_squares, 4.0 * static_cast<double>(n - 3));
  }
}

TEST(BlockStatsTest, CountsTheGreatestFiniteValueAsFinite) {
  const std::vector<float> block = {std::numeric_limits<float>::max()};
  const BlockStats stats = BlockStatsCpu(block);
  EXPECT_EQ(stats.non_finite, 0u);
  EXPECT_TRUE(std::isfinite(stats.sum_squares));
}

TEST(CheckCpuForKernelsTest, AcceptsTheMachineThatRunsTheTests) {
  EXPECT_TRUE(CheckCpuForKernels().ok());
}

}  // namespace
}  // namespace ballast
