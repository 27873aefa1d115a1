// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu_kernels.h"
#include "kernels/reference/layers.h"
#include "tests/kernels/kernel_test_util.h"

namespace ballast {
namespace {

using ::ballast::testing::Near;
using ::ballast::testing::SameBits;
using ::ballast::testing::Scratch;
using ::ballast::testing::Values;
using ::ballast::testing::Wide;

// Rows wider than the heads need: what lies between must stay as it was.
AttentionShape Shape(uint64_t batch, uint64_t tokens, uint64_t heads,
                     uint64_t kv_heads, uint64_t head_size) {
  return {batch,
          tokens,
          heads,
          kv_heads,
          head_size,
          heads * head_size + 3,
          kv_heads * head_size + 5,
          heads * head_size + 1};
}

struct Result {
  std::vector<float> out, lse, dq, dk, dv;
};

struct Input {
  explicit Input(const AttentionShape& s)
      : q(Values(s.batch * s.tokens * s.q_stride, 1)),
        k(Values(s.batch * s.tokens * s.kv_stride, 2)),
        v(Values(s.batch * s.tokens * s.kv_stride, 3)),
        dout(Values(s.batch * s.tokens * s.out_stride, 4)) {}
  std::vector<float> q, k, v, dout;
};

constexpr float kUntouched = 123.0f;

Result RunBoth(const AttentionShape& s, const Input& in, int threads) {
  const auto kernels = MakeCpuKernels(threads);
  Result r{std::vector<float>(in.dout.size(), kUntouched),
           std::vector<float>(s.batch * s.heads * s.tokens),
           std::vector<float>(in.q.size(), kUntouched),
           std::vector<float>(in.k.size(), kUntouched),
           std::vector<float>(in.k.size(), kUntouched)};
  kernels->Attention(s, in.q.data(), in.k.data(), in.v.data(), r.out.data(),
                     r.lse.data(),
                     Scratch(kernels->AttentionScratchBytes(s)).get());
  kernels->AttentionGrad(s, in.q.data(), in.k.data(), in.v.data(), r.out.data(),
                         r.lse.data(), in.dout.data(), r.dq.data(), r.dk.data(),
                         r.dv.data(),
                         Scratch(kernels->AttentionGradScratchBytes(s)).get());
  return r;
}

class AttentionTest : public ::testing::TestWithParam<AttentionShape> {};

TEST_P(AttentionTest, AgreesWithTheReferenceInDouble) {
  const AttentionShape s = GetParam();
  const Input in(s);
  const Result got = RunBoth(s, in, 2);
  const auto q = Wide(in.q), k = Wide(in.k), v = Wide(in.v);
  const auto dout = Wide(in.dout);
  std::vector<double> out(dout.size(), kUntouched), lse(got.lse.size()),
      dq(q.size(), kUntouched), dk(k.size(), kUntouched),
      dv(k.size(), kUntouched);
  reference::Attention<double>(s, q.data(), k.data(), v.data(), out.data(),
                               lse.data());
  reference::AttentionGrad<double>(s, q.data(), k.data(), v.data(), out.data(),
                                   lse.data(), dout.data(), dq.data(),
                                   dk.data(), dv.data());
  // Scores are below 10, so probabilities err by 10 * 2^-23; each output sums
  // them with weights of order 1, each gradient over at most `tokens` rows.
  EXPECT_TRUE(Near(got.out, out, 1e-5));
  EXPECT_TRUE(Near(got.lse, lse, 4e-6));
  EXPECT_TRUE(Near(got.dq, dq, 5e-5));
  EXPECT_TRUE(Near(got.dk, dk, 1e-4));
  EXPECT_TRUE(Near(got.dv, dv, 1e-4));
}

TEST_P(AttentionTest, GivesTheSameBitsOnOneTwoAndThreeThreads) {
  const AttentionShape s = GetParam();
  const Input in(s);
  const Result one = RunBoth(s, in, 1);
  for (const int threads : {2, 3}) {
    const Result other = RunBoth(s, in, threads);
    EXPECT_TRUE(SameBits(one.out, other.out));
    EXPECT_TRUE(SameBits(one.lse, other.lse));
    EXPECT_TRUE(SameBits(one.dq, other.dq));
    EXPECT_TRUE(SameBits(one.dk, other.dk));
    EXPECT_TRUE(SameBits(one.dv, other.dv));
  }
}

// Tokens around the block of 64, head sizes around the width of a vector, with
// and without shared key heads.
INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionTest,
    ::testing::Values(Shape(1, 1, 1, 1, 1), Shape(2, 3, 2, 2, 7),
                      Shape(1, 63, 2, 1, 16), Shape(1, 64, 1, 1, 64),
                      Shape(2, 65, 4, 2, 17), Shape(1, 130, 3, 3, 15),
                      Shape(1, 200, 6, 2, 33), Shape(1, 129, 1, 1, 128)));

TEST(AttentionTest, LargeScoresDoNotOverflow) {
  const AttentionShape s = Shape(1, 70, 1, 1, 16);
  Input in(s);
  for (float& value : in.q) value *= 100;
  for (float& value : in.k) value *= 100;
  const Result got = RunBoth(s, in, 1);
  for (uint64_t r = 0; r < s.tokens; ++r) {
    EXPECT_TRUE(std::isfinite(got.lse[r]));
    for (uint64_t i = 0; i < s.head_size; ++i) {
      EXPECT_TRUE(std::isfinite(got.out[r * s.out_stride + i]));
      EXPECT_TRUE(std::isfinite(got.dq[r * s.q_stride + i]));
    }
  }
}

}  // namespace
}  // namespace ballast
