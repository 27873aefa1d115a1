// SPDX-License-Identifier: Apache-2.0
#include <tuple>
#include <vector>

#include "common/dtype.h"
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

std::vector<float> Rounded(std::vector<float> values, DType dtype) {
  if (dtype == DType::kBF16) {
    for (float& value : values) value = FromBF16(ToBF16(value));
  }
  return values;
}

std::vector<uint16_t> Bits(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  bits.reserve(values.size());
  for (const float value : values) bits.push_back(ToBF16(value));
  return bits;
}

struct Results {
  std::vector<float> y;
  std::vector<float> dx;
  std::vector<float> dweight;
  std::vector<float> dbias;
};

struct Inputs {
  explicit Inputs(const LinearShape& s)
      : x(Values(s.rows * s.in, 1)),
        weight(Rounded(Values(s.in * s.out, 2), s.dtype)),
        bias(Values(s.out, 3)),
        dy(Values(s.rows * s.out, 4)) {}
  std::vector<float> x;
  std::vector<float> weight;
  std::vector<float> bias;
  std::vector<float> dy;
};

Results RunAll(const LinearShape& s, const Inputs& in, int threads) {
  const auto kernels = MakeCpuKernels(threads);
  const std::vector<uint16_t> bits = Bits(in.weight);
  const void* weight = s.dtype == DType::kBF16
                           ? static_cast<const void*>(bits.data())
                           : in.weight.data();
  Results r{std::vector<float>(s.rows * s.out), std::vector<float>(in.x.size()),
            std::vector<float>(in.weight.size()), std::vector<float>(s.out)};
  kernels->Linear(s, in.x.data(), weight, in.bias.data(), r.y.data(),
                  Scratch(kernels->LinearScratchBytes(s)).get());
  kernels->LinearGradInput(
      s, in.dy.data(), weight, r.dx.data(),
      Scratch(kernels->LinearGradInputScratchBytes(s)).get());
  kernels->LinearGradWeight(
      s, in.x.data(), in.dy.data(), r.dweight.data(), r.dbias.data(),
      Scratch(kernels->LinearGradWeightScratchBytes(s)).get());
  return r;
}

class MatrixProductTest
    : public ::testing::TestWithParam<std::tuple<LinearShape, bool, DType>> {
 protected:
  void SetUp() override {
    shape_ = std::get<0>(GetParam());
    shape_.out_major = std::get<1>(GetParam());
    shape_.dtype = std::get<2>(GetParam());
    if (shape_.dtype == DType::kBF16 && !CpuHasBF16Products()) {
      GTEST_SKIP() << "this processor has no bf16 products";
    }
  }
  LinearShape shape_;
};

// A sum of n products of normal values has deviation sqrt(n); rounding it in
// fp32 in any order errs by at most n * 2^-24 times the sum of magnitudes, in
// practice by sqrt(n) * 2^-24 times it. 8 * n * 2^-24 leaves room for both.
double Tolerance(uint64_t terms) {
  return 1e-6 + 8.0 * static_cast<double>(terms) * 0x1p-24;
}

TEST_P(MatrixProductTest, AgreesWithTheReferenceInDouble) {
  const LinearShape& s = shape_;
  const Inputs in(s);
  const Results got = RunAll(s, in, 2);

  const auto x = Wide(Rounded(in.x, s.dtype));
  const auto dy = Wide(Rounded(in.dy, s.dtype));
  const auto weight = Wide(in.weight);
  const auto bias = Wide(in.bias);
  std::vector<double> y(got.y.size());
  std::vector<double> dx(got.dx.size());
  std::vector<double> dweight(got.dweight.size());
  std::vector<double> dbias(got.dbias.size());
  reference::Linear(s, x.data(), weight.data(), bias.data(), y.data());
  reference::LinearGradInput(s, dy.data(), weight.data(), dx.data());
  const auto dy_exact = Wide(in.dy);
  reference::LinearGradWeight(s, x.data(), dy.data(), dweight.data(),
                              static_cast<double*>(nullptr));
  std::vector<double> unused(got.dweight.size());
  reference::LinearGradWeight(s, x.data(), dy_exact.data(), unused.data(),
                              dbias.data());
  EXPECT_TRUE(Near(got.y, y, Tolerance(s.in)));
  EXPECT_TRUE(Near(got.dx, dx, Tolerance(s.out)));
  EXPECT_TRUE(Near(got.dweight, dweight, Tolerance(s.rows)));
  EXPECT_TRUE(Near(got.dbias, dbias, Tolerance(s.rows)));
}

TEST_P(MatrixProductTest, GivesTheSameBitsOnOneTwoAndThreeThreads) {
  const Inputs in(shape_);
  const Results one = RunAll(shape_, in, 1);
  for (const int threads : {2, 3}) {
    const Results other = RunAll(shape_, in, threads);
    EXPECT_TRUE(SameBits(one.y, other.y)) << threads;
    EXPECT_TRUE(SameBits(one.dx, other.dx)) << threads;
    EXPECT_TRUE(SameBits(one.dweight, other.dweight)) << threads;
    EXPECT_TRUE(SameBits(one.dbias, other.dbias)) << threads;
  }
}

// Around the 64 rows of a tile and the 16 lanes of a vector, and the shape for
// which oneDNN itself would divide the sum among threads.
INSTANTIATE_TEST_SUITE_P(
    Shapes, MatrixProductTest,
    ::testing::Combine(
        ::testing::Values(LinearShape{1, 1, 1}, LinearShape{1, 16, 48},
                          LinearShape{63, 15, 17}, LinearShape{64, 16, 16},
                          LinearShape{65, 17, 65}, LinearShape{200, 96, 130},
                          LinearShape{4096, 8, 8}, LinearShape{130, 64, 192}),
        ::testing::Bool(), ::testing::Values(DType::kF32, DType::kBF16)));

// Products as a GPT-2 block has them, where a tile is much work; and one with
// so few elements and so long a sum that oneDNN would divide the sum by
// threads.
TEST(MatrixProductBitsTest, DoNotDependOnThreadsAtSizesInUse) {
  for (const LinearShape& s :
       {LinearShape{1024, 512, 1536}, LinearShape{256, 2048, 512},
        LinearShape{512, 448, 256, true}, LinearShape{16384, 64, 64}}) {
    const Inputs in(s);
    const Results one = RunAll(s, in, 1);
    const Results three = RunAll(s, in, 3);
    EXPECT_TRUE(SameBits(one.y, three.y)) << s.rows;
    EXPECT_TRUE(SameBits(one.dx, three.dx)) << s.rows;
    EXPECT_TRUE(SameBits(one.dweight, three.dweight)) << s.rows;
    EXPECT_TRUE(SameBits(one.dbias, three.dbias)) << s.rows;
  }
}

TEST(MatrixProductBiasTest, NullMeansNone) {
  const LinearShape s{70, 24, 40};
  const Inputs in(s);
  const std::vector<float> zeros(s.out, 0.0f);
  const auto kernels = MakeCpuKernels(2);
  const Scratch scratch(kernels->LinearScratchBytes(s));
  std::vector<float> without(s.rows * s.out);
  std::vector<float> with(s.rows * s.out);
  kernels->Linear(s, in.x.data(), in.weight.data(), nullptr, without.data(),
                  scratch.get());
  kernels->Linear(s, in.x.data(), in.weight.data(), zeros.data(), with.data(),
                  scratch.get());
  EXPECT_EQ(without, with);
}

}  // namespace
}  // namespace ballast
