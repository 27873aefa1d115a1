// SPDX-License-Identifier: Apache-2.0
// The gradients of the reference layers against central differences of their
// own forward pass, in double.
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/layers.h"
#include "tests/kernels/kernel_test_util.h"

namespace ballast {
namespace {

using ::ballast::testing::AllNear;
using ::ballast::testing::Differences;
using ::ballast::testing::Dot;
using ::ballast::testing::Values;
using ::ballast::testing::Wide;

using Doubles = std::vector<double>;

constexpr double kTolerance = 1e-7;

Doubles Random(size_t count, uint64_t stream) {
  return Wide(Values(count, stream));
}

TEST(ReferenceTest, LinearGradientsAreDerivatives) {
  for (const bool out_major : {false, true}) {
    const LinearShape s{3, 4, 5, out_major};
    const Doubles x = Random(12, 1), w = Random(20, 2), b = Random(5, 3);
    const Doubles dy = Random(15, 4);
    const auto loss = [&](const Doubles& in, const Doubles& weight,
                          const Doubles& bias) {
      Doubles y(15);
      reference::Linear(s, in.data(), weight.data(), bias.data(), y.data());
      return Dot(y, dy);
    };
    Doubles dx(12), dw(20), db(5);
    reference::LinearGradInput(s, dy.data(), w.data(), dx.data());
    reference::LinearGradWeight(s, x.data(), dy.data(), dw.data(), db.data());
    EXPECT_TRUE(AllNear(
        dx, Differences(x, [&](const Doubles& at) { return loss(at, w, b); }),
        kTolerance));
    EXPECT_TRUE(AllNear(
        dw, Differences(w, [&](const Doubles& at) { return loss(x, at, b); }),
        kTolerance));
    EXPECT_TRUE(AllNear(
        db, Differences(b, [&](const Doubles& at) { return loss(x, w, at); }),
        kTolerance));
  }
}

TEST(ReferenceTest, LayerNormGradientsAreDerivatives) {
  const uint64_t rows = 3, width = 5;
  const Doubles x = Random(15, 1), gamma = Random(5, 2), beta = Random(5, 3);
  const Doubles dy = Random(15, 4), dx_add = Random(15, 5);
  Doubles mean(rows), rstd(rows), y(15), dx(15), dgamma(5), dbeta(5);
  const auto loss = [&](const Doubles& in, const Doubles& g, const Doubles& b) {
    Doubles out(15), m(rows), r(rows);
    reference::LayerNorm<double>(rows, width, 1e-5, in.data(), g.data(),
                                 b.data(), out.data(), m.data(), r.data());
    return Dot(out, dy) + Dot(in, dx_add);
  };
  reference::LayerNorm<double>(rows, width, 1e-5, x.data(), gamma.data(),
                               beta.data(), y.data(), mean.data(), rstd.data());
  reference::LayerNormGrad<double>(
      rows, width, x.data(), gamma.data(), mean.data(), rstd.data(), dy.data(),
      dx_add.data(), dx.data(), dgamma.data(), dbeta.data());
  EXPECT_TRUE(AllNear(
      dx,
      Differences(x, [&](const Doubles& at) { return loss(at, gamma, beta); }),
      kTolerance));
  EXPECT_TRUE(AllNear(
      dgamma,
      Differences(gamma, [&](const Doubles& at) { return loss(x, at, beta); }),
      kTolerance));
  EXPECT_TRUE(AllNear(
      dbeta,
      Differences(beta, [&](const Doubles& at) { return loss(x, gamma, at); }),
      kTolerance));
}

TEST(ReferenceTest, GeluGradientIsTheDerivative) {
  const Doubles x = Random(50, 1);
  for (const double at : x) {
    const double slope = Differences(
        {at}, [](const Doubles& in) { return reference::Gelu(in[0]); })[0];
    EXPECT_NEAR(reference::GeluGrad(at, 1.0), slope, kTolerance);
  }
}

TEST(ReferenceTest, AttentionGradientsAreDerivatives) {
  const AttentionShape s = {2, 4, 4, 2, 3, 12, 6, 12};
  const Doubles q = Random(96, 1), k = Random(48, 2), v = Random(48, 3);
  const Doubles dout = Random(96, 4);
  const auto loss = [&](const Doubles& a, const Doubles& b, const Doubles& c) {
    Doubles out(96), lse(32);
    reference::Attention(s, a.data(), b.data(), c.data(), out.data(),
                         lse.data());
    return Dot(out, dout);
  };
  Doubles out(96), lse(32), dq(96), dk(48), dv(48);
  reference::Attention(s, q.data(), k.data(), v.data(), out.data(), lse.data());
  reference::AttentionGrad(s, q.data(), k.data(), v.data(), out.data(),
                           lse.data(), dout.data(), dq.data(), dk.data(),
                           dv.data());
  EXPECT_TRUE(AllNear(
      dq, Differences(q, [&](const Doubles& at) { return loss(at, k, v); }),
      kTolerance));
  EXPECT_TRUE(AllNear(
      dk, Differences(k, [&](const Doubles& at) { return loss(q, at, v); }),
      kTolerance));
  EXPECT_TRUE(AllNear(
      dv, Differences(v, [&](const Doubles& at) { return loss(q, k, at); }),
      kTolerance));
}

TEST(ReferenceTest, CrossEntropyGradientIsTheDerivative) {
  const uint64_t rows = 3, vocab = 5;
  const uint32_t targets[] = {0, 4, 2};
  const Doubles logits = Random(rows * vocab, 1);
  Doubles grad = logits;
  reference::CrossEntropy(rows, vocab, targets, true, grad.data());
  EXPECT_TRUE(AllNear(grad,
                      Differences(logits,
                                  [&](Doubles at) {
                                    return reference::CrossEntropy(
                                        rows, vocab, targets, false, at.data());
                                  }),
                      kTolerance));
}

}  // namespace
}  // namespace ballast
