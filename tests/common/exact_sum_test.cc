// SPDX-License-Identifier: Apache-2.0
#include "common/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace ballast {
namespace {

constexpr double kMax = std::numeric_limits<double>::max();
constexpr double kMin = std::numeric_limits<double>::denorm_min();
constexpr double kInf = std::numeric_limits<double>::infinity();

double SumOf(const std::vector<double>& terms) {
  ExactSum sum;
  for (const double term : terms) {
    sum.Add(term);
  }
  return sum.Round();
}

// Any finite double: sign, exponent and mantissa are uniform.
double AnyDouble(std::mt19937_64* random) {
  double value = kInf;
  while (!std::isfinite(value)) {
    value = std::bit_cast<double>((*random)());
  }
  return value;
}

TEST(ExactSumTest, IsZeroWithoutTerms) {
  EXPECT_EQ(ExactSum().Round(), 0.0);
  EXPECT_EQ(SumOf({0.0, -0.0}), 0.0);
}

TEST(ExactSumTest, OneTermComesBackUnchanged) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const double term = AnyDouble(&random);
    EXPECT_EQ(SumOf({term}), term);
  }
  for (const double term : {kMin, -kMin, kMax, -kMax, 0x1p-1022, 0x1.8p-1074,
                            0x1.fffffffffffffp-1022, 1.0, -0.1}) {
    EXPECT_EQ(SumOf({term}), term);
  }
}

// The sum of two doubles rounded once is what the machine's addition gives.
TEST(ExactSumTest, TwoTermsRoundAsTheMachineAdds) {
  std::mt19937_64 random(2);
  std::uniform_int_distribution<int> shift(-60, 60);
  for (int i = 0; i < 50000; ++i) {
    const double a = AnyDouble(&random);
    const double b =
        std::ldexp(AnyDouble(&random) < 0 ? -a : a, shift(random)) *
        std::uniform_real_distribution<double>(1, 2)(random);
    if (std::isfinite(a + b) && std::isfinite(b)) {
      EXPECT_EQ(SumOf({a, b}), a + b) << std::hexfloat << a << " " << b;
    }
  }
}

// Integers below 2^62 of a common scale: their sum is exact in 128 bits.
TEST(ExactSumTest, ManyTermsMatchIntegerArithmeticRoundedOnce) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 300; ++round) {
    const int scale = std::uniform_int_distribution<int>(-1074, 800)(random);
    __int128 exact = 0;
    ExactSum sum;
    for (int i = 0; i < 200; ++i) {
      const int bits = std::uniform_int_distribution<int>(11, 63)(random);
      auto mantissa = static_cast<int64_t>(random() >> bits);
      mantissa = (random() & 1) != 0 ? -mantissa : mantissa;
      const int up = std::uniform_int_distribution<int>(0, 60)(random);
      exact += static_cast<__int128>(mantissa) << up;
      sum.Add(std::ldexp(static_cast<double>(mantissa), scale + up));
    }
    // gcc converts __int128 to double with one rounding, to nearest even.
    EXPECT_EQ(sum.Round(), std::ldexp(static_cast<double>(exact), scale));
  }
}

TEST(ExactSumTest, TheOrderAndTheSplitChangeNoBit) {
  std::mt19937_64 random(4);
  std::vector<double> terms;
  terms.reserve(1000);
  for (int i = 0; i < 1000; ++i) {
    terms.push_back(AnyDouble(&random) * 0x1p-20);
  }
  ExactSum all;
  for (const double term : terms) {
    all.Add(term);
  }
  for (int round = 0; round < 20; ++round) {
    std::shuffle(terms.begin(), terms.end(), random);
    std::vector<ExactSum> parts(5);
    for (const double term : terms) {
      parts[random() % parts.size()].Add(term);
    }
    ExactSum total;
    for (const ExactSum& part : parts) {
      total.Add(part);
    }
    EXPECT_EQ(total.Encode(), all.Encode());
    EXPECT_EQ(total.Round(), all.Round());
  }
}

TEST(ExactSumTest, CancellationLeavesTheSmallestTerm) {
  EXPECT_EQ(SumOf({kMax, kMin, -kMax}), kMin);
  EXPECT_EQ(SumOf({-kMax, -kMin, kMax}), -kMin);
  EXPECT_EQ(SumOf({1e16, 1.0, -1e16}), 1.0);
  EXPECT_EQ(SumOf({1e300, -1e300}), 0.0);
  EXPECT_EQ(SumOf({1.0, 1e100, 1.0, -1e100}), 2.0);
}

TEST(ExactSumTest, TiesRoundToEvenAndASingleFarBitBreaksThem) {
  const double half_ulp = 0x1p-53;
  EXPECT_EQ(SumOf({1.0, half_ulp}), 1.0);
  EXPECT_EQ(SumOf({1.0, half_ulp, kMin}), 1.0 + 0x1p-52);
  EXPECT_EQ(SumOf({1.0, half_ulp, -kMin}), 1.0);
  EXPECT_EQ(SumOf({1.0 + 0x1p-52, half_ulp}), 1.0 + 0x1p-51);
  EXPECT_EQ(SumOf({1.0 + 0x1p-52, half_ulp, -kMin}), 1.0 + 0x1p-52);
  EXPECT_EQ(SumOf({-1.0, -half_ulp, -kMin}), -1.0 - 0x1p-52);
}

TEST(ExactSumTest, SubnormalsAddUpIntoNormals) {
  ExactSum sum;
  for (int i = 0; i < 1 << 16; ++i) {
    sum.Add(0x1p-1074);
  }
  EXPECT_EQ(sum.Round(), 0x1p-1058);
  EXPECT_EQ(SumOf({0x1.ffffffffffffep-1023, 0x1p-1074}), 0x1p-1022);
}

TEST(ExactSumTest, OverflowRoundsToInfinityAndCanComeBack) {
  EXPECT_EQ(SumOf({kMax, kMax}), kInf);
  EXPECT_EQ(SumOf({-kMax, -kMax}), -kInf);
  EXPECT_EQ(SumOf({kMax, 0x1p969}), kMax);  // Below half an ulp.
  EXPECT_EQ(SumOf({kMax, 0x1p970}), kInf);  // A tie; even is infinity.
  EXPECT_EQ(SumOf({kMax, kMax, -kMax}), kMax);
  ExactSum many;
  for (int i = 0; i < 100000; ++i) {
    many.Add(kMax);
  }
  EXPECT_EQ(many.Round(), kInf);
  for (int i = 0; i < 99999; ++i) {
    many.Add(-kMax);
  }
  EXPECT_EQ(many.Round(), kMax);
}

TEST(ExactSumTest, ATermThatIsNotFiniteStays) {
  for (const double term : {kInf, -kInf, std::nan("")}) {
    ExactSum sum;
    sum.Add(term);
    sum.Add(1.0);
    EXPECT_TRUE(std::isnan(sum.Round()));
    ExactSum other;
    other.Add(2.0);
    other.Add(sum);
    EXPECT_TRUE(std::isnan(other.Round()));
    const absl::StatusOr<ExactSum> decoded = ExactSum::Decode(other.Encode());
    ASSERT_TRUE(decoded.ok());
    EXPECT_TRUE(std::isnan(decoded->Round()));
  }
}

TEST(ExactSumTest, SumsThatAreNotFiniteAreEqualWhateverTheirTerms) {
  ExactSum one;
  one.Add(kInf);
  one.Add(3.0);
  ExactSum two;
  two.Add(-kInf);
  EXPECT_EQ(one.Encode(), two.Encode());
}

TEST(ExactSumTest, EncodedSumsDecodeToThemselves) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    ExactSum sum;
    for (int i = 0; i < 20; ++i) {
      sum.Add(AnyDouble(&random));
    }
    const std::string bytes = sum.Encode();
    absl::StatusOr<ExactSum> decoded = ExactSum::Decode(bytes);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->Encode(), bytes);
    const double term = AnyDouble(&random);
    sum.Add(term);
    decoded->Add(term);
    EXPECT_EQ(decoded->Encode(), sum.Encode());
  }
}

TEST(ExactSumTest, RefusesEveryOtherLength) {
  const std::string bytes = ExactSum().Encode();
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(ExactSum::Decode(bytes.substr(0, length)).ok());
  }
  EXPECT_FALSE(ExactSum::Decode(bytes + '\0').ok());
}

TEST(ExactSumTest, RefusesBytesThatNoSumEncodesTo) {
  ExactSum sum;
  sum.Add(1.0);
  const std::string good = sum.Encode();
  std::string flag = good;
  flag[0] = 2;
  EXPECT_FALSE(ExactSum::Decode(flag).ok());
  std::string limb = good;
  limb[1 + 8 * 3 + 4] = 1;  // Limb 3 reaches 2^32.
  EXPECT_FALSE(ExactSum::Decode(limb).ok());
  std::string top = good;
  top.back() = 0x7f;  // Adding two such sums would overflow the last limb.
  EXPECT_FALSE(ExactSum::Decode(top).ok());
  std::string not_finite = good;
  not_finite[0] = 0;  // A sum that is not finite has no digits.
  EXPECT_FALSE(ExactSum::Decode(not_finite).ok());
}

// What decodes must be safe to use, whatever a peer sent.
TEST(ExactSumTest, DamagedBytesAreRefusedOrGiveAUsableSum) {
  constexpr uint64_t kSeed = 20261201;
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 20000; ++round) {
    ExactSum sum;
    sum.Add(AnyDouble(&random));
    std::string bytes = sum.Encode();
    const int flips = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < flips; ++i) {
      char& byte = bytes[random() % bytes.size()];
      byte = static_cast<char>(byte ^ (1 << (random() % 8)));
    }
    absl::StatusOr<ExactSum> decoded = ExactSum::Decode(bytes);
    if (decoded.ok()) {
      EXPECT_EQ(decoded->Encode(), bytes);
      ExactSum copy = *decoded;
      decoded->Add(copy);
      decoded->Add(kMax);
      EXPECT_EQ(std::isnan(decoded->Round()), bytes[0] == 0);
    }
  }
}

}  // namespace
}  // namespace ballast
