// SPDX-License-Identifier: Apache-2.0
// Layer normalisation, GELU, embedding, loss and sums against the reference in
// double, at lengths around the widths of vectors.
#include "kernels/reference/layers.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu_kernels.h"
#include "tests/kernels/kernel_test_util.h"

namespace ballast {
namespace {

using ::ballast::testing::Near;
using ::ballast::testing::SameBits;
using ::ballast::testing::Scratch;
using ::ballast::testing::Values;
using ::ballast::testing::Wide;

constexpr float kEpsilon = 1e-5f;

struct Norm {
  std::vector<float> y, mean, rstd, dx, dgamma, dbeta;
};

Norm RunNorm(uint64_t rows, uint64_t width, int threads, bool with_add) {
  const auto kernels = MakeCpuKernels(threads);
  const auto x = Values(rows * width, 1, 2.0, 0.5);
  const auto gamma = Values(width, 2, 0.3, 1.0);
  const auto beta = Values(width, 3);
  const auto dy = Values(rows * width, 4);
  const auto dx_add = Values(rows * width, 5);
  Norm n{std::vector<float>(x.size()), std::vector<float>(rows),
         std::vector<float>(rows),     std::vector<float>(x.size()),
         std::vector<float>(width),    std::vector<float>(width)};
  kernels->LayerNorm(rows, width, kEpsilon, x.data(), gamma.data(), beta.data(),
                     n.y.data(), n.mean.data(), n.rstd.data());
  kernels->LayerNormGrad(
      rows, width, x.data(), gamma.data(), n.mean.data(), n.rstd.data(),
      dy.data(), with_add ? dx_add.data() : nullptr, n.dx.data(),
      n.dgamma.data(), n.dbeta.data(),
      Scratch(kernels->LayerNormGradScratchBytes(rows, width)).get());
  return n;
}

class LayerNormTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(LayerNormTest, AgreesWithTheReferenceInDouble) {
  const uint64_t width = GetParam();
  const uint64_t rows = 37;
  for (const bool with_add : {false, true}) {
    const Norm got = RunNorm(rows, width, 2, with_add);
    const auto x = Wide(Values(rows * width, 1, 2.0, 0.5));
    const auto gamma = Wide(Values(width, 2, 0.3, 1.0));
    const auto beta = Wide(Values(width, 3));
    const auto dy = Wide(Values(rows * width, 4));
    const auto dx_add = Wide(Values(rows * width, 5));
    std::vector<double> y(x.size()), mean(rows), rstd(rows), dx(x.size()),
        dgamma(width), dbeta(width);
    reference::LayerNorm<double>(rows, width, kEpsilon, x.data(), gamma.data(),
                                 beta.data(), y.data(), mean.data(),
                                 rstd.data());
    reference::LayerNormGrad<double>(rows, width, x.data(), gamma.data(),
                                     mean.data(), rstd.data(), dy.data(),
                                     with_add ? dx_add.data() : nullptr,
                                     dx.data(), dgamma.data(), dbeta.data());
    // Some ten roundings of values below 10 per element; sums over 37 rows.
    // A single column has no variance: rstd is 316 and magnifies rounding.
    const double unit = width == 1 ? 316.0 : 1.0;
    EXPECT_TRUE(Near(got.y, y, unit * 4e-6));
    EXPECT_TRUE(Near(got.mean, mean, 2e-6));
    EXPECT_TRUE(Near(got.rstd, rstd, 0, 1e-5));
    EXPECT_TRUE(Near(got.dx, dx, unit * 1e-5, 1e-5));
    EXPECT_TRUE(Near(got.dgamma, dgamma, unit * 1e-4));
    EXPECT_TRUE(Near(got.dbeta, dbeta, 2e-5));
  }
}

TEST_P(LayerNormTest, GivesTheSameBitsOnOneTwoAndThreeThreads) {
  const Norm one = RunNorm(131, GetParam(), 1, true);
  for (const int threads : {2, 3}) {
    const Norm other = RunNorm(131, GetParam(), threads, true);
    EXPECT_TRUE(SameBits(one.y, other.y));
    EXPECT_TRUE(SameBits(one.dx, other.dx));
    EXPECT_TRUE(SameBits(one.dgamma, other.dgamma));
    EXPECT_TRUE(SameBits(one.dbeta, other.dbeta));
  }
}

INSTANTIATE_TEST_SUITE_P(Widths, LayerNormTest,
                         ::testing::Values(1, 7, 8, 9, 15, 16, 17, 65, 512));

TEST(LayerNormGradTest, MayAddIntoTheGradientItReads) {
  const uint64_t rows = 5;
  const uint64_t width = 33;
  const Norm apart = RunNorm(rows, width, 2, true);
  const auto kernels = MakeCpuKernels(2);
  const auto x = Values(rows * width, 1, 2.0, 0.5);
  const auto gamma = Values(width, 2, 0.3, 1.0);
  const auto dy = Values(rows * width, 4);
  auto dx = Values(rows * width, 5);
  std::vector<float> dgamma(width), dbeta(width);
  kernels->LayerNormGrad(
      rows, width, x.data(), gamma.data(), apart.mean.data(), apart.rstd.data(),
      dy.data(), dx.data(), dx.data(), dgamma.data(), dbeta.data(),
      Scratch(kernels->LayerNormGradScratchBytes(rows, width)).get());
  EXPECT_TRUE(SameBits(apart.dx, dx));
}

class ElementWiseTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(ElementWiseTest, GeluAgreesWithTheReferenceInDouble) {
  const uint64_t count = GetParam();
  const auto kernels = MakeCpuKernels(2);
  // One element further than the allocation: misaligned on purpose.
  const auto x = Values(count + 1, 1, 3.0);
  const auto dy = Values(count + 1, 2);
  std::vector<float> y(count);
  std::vector<float> dx(count);
  kernels->Gelu(count, x.data() + 1, y.data());
  kernels->GeluGrad(count, x.data() + 1, dy.data() + 1, dx.data());
  std::vector<double> want_y, want_dx;
  for (size_t i = 1; i <= count; ++i) {
    want_y.push_back(reference::Gelu<double>(x[i]));
    want_dx.push_back(reference::GeluGrad<double>(x[i], dy[i]));
  }
  // exp errs by a few units of 2^-24 times its argument, at most 20 where it
  // counts.
  EXPECT_TRUE(Near(y, want_y, 1e-6, 2e-6));
  EXPECT_TRUE(Near(dx, want_dx, 2e-6, 4e-6));
}

TEST_P(ElementWiseTest, AddAndAccumulateAreExactSums) {
  const uint64_t count = GetParam();
  const auto kernels = MakeCpuKernels(2);
  const auto a = Values(count, 1);
  const auto b = Values(count, 2);
  std::vector<float> want(count);
  for (size_t i = 0; i < count; ++i) want[i] = a[i] + b[i];
  std::vector<float> y = a;
  kernels->Add(count, y.data(), b.data(), y.data());
  EXPECT_TRUE(SameBits(y, want));
  std::vector<float> total = a;
  kernels->Accumulate(count, b.data(), total.data());
  EXPECT_TRUE(SameBits(total, want));
}

INSTANTIATE_TEST_SUITE_P(Counts, ElementWiseTest,
                         ::testing::Values(1, 7, 8, 9, 15, 16, 17, 16384, 16385,
                                           50000));

TEST(GeluTest, IsFiniteAndFlatFarFromZero) {
  const auto kernels = MakeCpuKernels(1);
  const std::vector<float> x = {-1e30f, -1e4f, -50.0f, 50.0f, 1e4f, 1e30f};
  const std::vector<float> ones(x.size(), 1.0f);
  std::vector<float> y(x.size());
  std::vector<float> dx(x.size());
  kernels->Gelu(x.size(), x.data(), y.data());
  kernels->GeluGrad(x.size(), x.data(), ones.data(), dx.data());
  EXPECT_EQ(y, (std::vector<float>{0, 0, 0, 50.0f, 1e4f, 1e30f}));
  EXPECT_EQ(dx, (std::vector<float>{0, 0, 0, 1, 1, 1}));
}

class CrossEntropyTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(CrossEntropyTest, AgreesWithTheReferenceInDouble) {
  const uint64_t vocab = GetParam();
  const uint64_t rows = 9;
  const auto logits = Values(rows * vocab, 1, 3.0);
  std::vector<uint32_t> targets;
  for (uint64_t r = 0; r < rows; ++r) {
    targets.push_back(static_cast<uint32_t>((r * 7 + vocab - 1) % vocab));
  }
  auto want = Wide(logits);
  const double want_loss = reference::CrossEntropy<double>(
      rows, vocab, targets.data(), true, want.data());

  const auto run = [&](int threads, bool with_grad, float* out) {
    const auto kernels = MakeCpuKernels(threads);
    return kernels->CrossEntropy(
        rows, vocab, targets.data(), with_grad, out,
        Scratch(kernels->CrossEntropyScratchBytes(rows)).get());
  };
  auto kept = logits;
  const double loss = run(1, false, kept.data());
  EXPECT_TRUE(SameBits(kept, logits));
  EXPECT_NEAR(loss, want_loss, 1e-6 * (1 + want_loss));

  auto grad = logits;
  EXPECT_EQ(run(1, true, grad.data()), loss);
  EXPECT_TRUE(Near(grad, want, 1e-6));
  for (const int threads : {2, 3}) {
    auto other = logits;
    EXPECT_EQ(run(threads, true, other.data()), loss);
    EXPECT_TRUE(SameBits(grad, other));
  }
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, CrossEntropyTest,
                         ::testing::Values(1, 7, 8, 9, 15, 16, 17, 256, 50257));

TEST(CrossEntropyLargeTest, DoesNotOverflow) {
  std::vector<float> logits = {1e4f, -1e4f, 0};
  const uint32_t target = 1;
  const auto kernels = MakeCpuKernels(1);
  const double loss = kernels->CrossEntropy(
      1, 3, &target, true, logits.data(),
      Scratch(kernels->CrossEntropyScratchBytes(1)).get());
  EXPECT_DOUBLE_EQ(loss, 2e4);
  EXPECT_EQ(logits, (std::vector<float>{1, -1, 0}));
}

TEST(EmbeddingTest, AddsTokenAndPositionRows) {
  const std::vector<float> tokens = {1, 2, 3, 10, 20, 30};
  const std::vector<float> positions = {0.5f, 0.25f, 0, -1, -2, -3};
  const std::vector<uint32_t> ids = {1, 0, 1, 1};
  const auto kernels = MakeCpuKernels(2);
  std::vector<float> y(12);
  kernels->Embedding(2, 2, 3, DType::kF32, ids.data(), tokens.data(),
                     positions.data(), y.data());
  EXPECT_EQ(y, (std::vector<float>{10.5f, 20.25f, 30, 0, 0, 0, 10.5f, 20.25f,
                                   30, 9, 18, 27}));
  kernels->Embedding(2, 2, 3, DType::kF32, ids.data(), tokens.data(), nullptr,
                     y.data());
  EXPECT_EQ(y,
            (std::vector<float>{10, 20, 30, 1, 2, 3, 10, 20, 30, 10, 20, 30}));
}

TEST(EmbeddingTest, ReadsBF16Tables) {
  const std::vector<uint16_t> tokens = {ToBF16(1.5f), ToBF16(-2)};
  const std::vector<uint16_t> positions = {ToBF16(0.25f), ToBF16(4)};
  const std::vector<uint32_t> ids = {1, 0};
  std::vector<float> y(2);
  MakeCpuKernels(1)->Embedding(1, 2, 1, DType::kBF16, ids.data(), tokens.data(),
                               positions.data(), y.data());
  EXPECT_EQ(y, (std::vector<float>{-1.75f, 5.5f}));
}

TEST(EmbeddingGradTest, ScattersInRowOrderAndZeroesTheRest) {
  const uint64_t batch = 3, tokens = 50, width = 19, vocab = 200;
  const uint64_t position_rows = 64;
  std::vector<uint32_t> ids;
  for (uint64_t r = 0; r < batch * tokens; ++r) {
    ids.push_back(static_cast<uint32_t>((r * r) % 90));
  }
  const auto dy = Values(batch * tokens * width, 1);
  std::vector<float> want(vocab * width, 0.0f);
  std::vector<float> want_position(position_rows * width, 0.0f);
  for (uint64_t r = 0; r < batch * tokens; ++r) {
    for (uint64_t i = 0; i < width; ++i) {
      want[ids[r] * width + i] += dy[r * width + i];
      want_position[r % tokens * width + i] += dy[r * width + i];
    }
  }
  for (const int threads : {1, 2, 3}) {
    std::vector<float> dtoken(vocab * width, NAN);
    std::vector<float> dposition(position_rows * width, NAN);
    MakeCpuKernels(threads)->EmbeddingGrad(batch, tokens, width, vocab,
                                           position_rows, ids.data(), dy.data(),
                                           dtoken.data(), dposition.data());
    EXPECT_TRUE(SameBits(dtoken, want));
    EXPECT_TRUE(SameBits(dposition, want_position));
  }
}

}  // namespace
}  // namespace ballast
