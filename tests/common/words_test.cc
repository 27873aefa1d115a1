// SPDX-License-Identifier: Apache-2.0
// The small headers: bytes, hash, random, units, dtype, initial values.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "common/bytes.h"
#include "common/dtype.h"
#include "common/hash.h"
#include "common/initial_value.h"
#include "common/random.h"
#include "common/units.h"

namespace ballast {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(BytesTest, ReadsWhatWasWritten) {
  ByteWriter writer;
  writer.Put(uint8_t{7});
  writer.Put(uint64_t{1} << 63);
  writer.Put(-1.5);
  writer.PutString("");
  writer.PutString(absl::string_view("a\0b", 3));
  writer.Put(int32_t{-2});
  ByteReader reader(writer.bytes());
  EXPECT_EQ(reader.Get<uint8_t>(), 7);
  EXPECT_EQ(reader.Get<uint64_t>(), uint64_t{1} << 63);
  EXPECT_EQ(reader.Get<double>(), -1.5);
  EXPECT_EQ(reader.GetString(), "");
  EXPECT_EQ(reader.GetString(), std::string("a\0b", 3));
  EXPECT_EQ(reader.Get<int32_t>(), -2);
  EXPECT_TRUE(reader.ok());
  EXPECT_EQ(reader.remaining(), 0u);
}

TEST(BytesTest, IsLittleEndian) {
  ByteWriter writer;
  writer.Put(uint32_t{0x01020304});
  EXPECT_THAT(writer.bytes(), ElementsAre(4, 3, 2, 1));
}

TEST(BytesTest, AfterAShortReadEverythingIsZero) {
  ByteReader reader(absl::string_view("\x01\x02\x03", 3));
  EXPECT_EQ(reader.Get<uint32_t>(), 0u);
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.Get<uint8_t>(), 0u);
  EXPECT_EQ(reader.GetString(), "");
}

TEST(BytesTest, AStringLongerThanTheRestIsRefused) {
  ByteWriter writer;
  writer.Put(uint32_t{4});
  writer.Put(uint8_t{1});
  ByteReader reader(writer.bytes());
  EXPECT_EQ(reader.GetString(), "");
  EXPECT_FALSE(reader.ok());
}

// Values of the reference implementation's own test suite.
TEST(HashTest, IsXxh3Of128Bits) {
  EXPECT_EQ(HashHex(HashBytes("")), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(HashHex(HashBytes("a")), "a96faf705af16834e6c632b61e964e1f");
}

TEST(HashTest, HexKeepsLeadingZeros) {
  EXPECT_EQ(HashHex({0, 0xab}), std::string(30, '0') + "ab");
}

// Known answers of the Random123 distribution for philox4x32, 10 rounds.
TEST(RandomTest, PhiloxGivesTheKnownAnswers) {
  EXPECT_THAT(Philox(0, 0, 0),
              ElementsAre(0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u));
  EXPECT_THAT(Philox(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}),
              ElementsAre(0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu));
  EXPECT_THAT(
      Philox(0x299f31d0a4093822u, 0x85a308d3243f6a88u, 0x0370734413198a2eu),
      ElementsAre(0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u));
}

TEST(RandomTest, UnitIntervalExcludesItsEnds) {
  EXPECT_GT(UnitInterval(0), 0.0);
  EXPECT_LT(UnitInterval(0xffffffffu), 1.0);
}

TEST(RandomTest, NormalHasTheMomentsOfANormal) {
  constexpr int kCount = 200000;
  double sum = 0;
  double squares = 0;
  double fourths = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    const double value = Normal(3, 5, i);
    sum += value;
    squares += value * value;
    fourths += value * value * value * value;
  }
  EXPECT_NEAR(sum / kCount, 0.0, 0.01);
  EXPECT_NEAR(squares / kCount, 1.0, 0.02);
  EXPECT_NEAR(fourths / kCount, 3.0, 0.1);
}

TEST(DTypeTest, Bf16RoundsToNearestEven) {
  EXPECT_EQ(FromBF16(ToBF16(1.0f)), 1.0f);
  EXPECT_EQ(FromBF16(ToBF16(1.0f + 0x1p-8f)), 1.0f);            // A tie.
  EXPECT_EQ(FromBF16(ToBF16(1.0f + 0x3p-8f)), 1.0f + 0x1p-6f);  // A tie.
  EXPECT_EQ(FromBF16(ToBF16(1.0f + 0x1.02p-8f)), 1.0f + 0x1p-7f);
  EXPECT_EQ(FromBF16(ToBF16(-0.0f)), 0.0f);
  EXPECT_EQ(ToBF16(-0.0f), 0x8000);
}

TEST(DTypeTest, Bf16KeepsInfinityAndNaN) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(FromBF16(ToBF16(infinity)), infinity);
  EXPECT_EQ(FromBF16(ToBF16(std::numeric_limits<float>::max())), infinity);
  EXPECT_TRUE(std::isnan(FromBF16(ToBF16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(FromBF16(ToBF16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(UnitsTest, ReadsSizesAsPeopleWriteThem) {
  EXPECT_EQ(ParseBytes("4096").value(), 4096u);
  EXPECT_EQ(ParseBytes("4MiB").value(), 4u << 20);
  EXPECT_EQ(ParseBytes(" 1.5 GB ").value(), 1500000000u);
  EXPECT_EQ(ParseBytes("2kib").value(), 2048u);
  EXPECT_EQ(ParseBytes("3 TiB").value(), uint64_t{3} << 40);
  EXPECT_EQ(ParseBytes("7 B").value(), 7u);
  EXPECT_EQ(ParseBytes("0").value(), 0u);
}

TEST(UnitsTest, RefusesWhatIsNoSize) {
  for (const char* text : {"", "MiB", "-1", "4 MX", "1e3", "1.2.3", ".", "nan",
                           "inf", "0x10", "4 M", "9223372036854775808",
                           "8388608 TiB", "99999999999999999999999 TB"}) {
    const auto bytes = ParseBytes(text);
    ASSERT_FALSE(bytes.ok()) << text;
    EXPECT_THAT(std::string(bytes.status().message()), HasSubstr(text));
  }
}

TEST(UnitsTest, WritesThreeDigits) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.00 KiB");
  EXPECT_EQ(FormatBytes(3523215), "3.36 MiB");
  EXPECT_EQ(FormatBytes(10239), "10.0 KiB");
  EXPECT_EQ(FormatBytes(102399), "100 KiB");
  EXPECT_EQ(FormatBytes((1 << 20) - 1), "1.00 MiB");
  EXPECT_EQ(FormatBytes(uint64_t{5} << 50), "5120 TiB");
}

TensorSpec NormalTensor() {
  TensorSpec tensor;
  tensor.name = "wte.weight";
  tensor.shape = {100, 3};
  tensor.init = Init::kNormal;
  tensor.init_std = 0.02;
  return tensor;
}

TEST(InitialValueTest, APartEqualsThatPartOfTheWhole) {
  const TensorSpec tensor = NormalTensor();
  std::vector<float> whole(300);
  FillInitial(tensor, 9, 0, absl::MakeSpan(whole));
  for (const uint64_t begin : {0u, 1u, 150u, 299u, 300u}) {
    std::vector<float> part(std::min<uint64_t>(7, 300 - begin));
    FillInitial(tensor, 9, begin, absl::MakeSpan(part));
    for (uint64_t i = 0; i < part.size(); ++i) {
      EXPECT_EQ(part[i], whole[begin + i]);
    }
  }
}

TEST(InitialValueTest, IsTheStatedFormula) {
  std::vector<float> value(1);
  FillInitial(NormalTensor(), 9, 42, absl::MakeSpan(value));
  const uint64_t stream = HashBytes("wte.weight").low;
  EXPECT_EQ(value[0], static_cast<float>(0.02 * Normal(9, stream, 42)));
}

TEST(InitialValueTest, DependsOnSeedAndName) {
  std::vector<float> a(300);
  std::vector<float> b(300);
  TensorSpec tensor = NormalTensor();
  FillInitial(tensor, 9, 0, absl::MakeSpan(a));
  FillInitial(tensor, 10, 0, absl::MakeSpan(b));
  EXPECT_NE(a, b);
  tensor.name = "wpe.weight";
  FillInitial(tensor, 9, 0, absl::MakeSpan(b));
  EXPECT_NE(a, b);
}

TEST(InitialValueTest, FillsZerosAndOnes) {
  std::vector<float> values(300, 7.0f);
  TensorSpec tensor = NormalTensor();
  tensor.init = Init::kZeros;
  FillInitial(tensor, 9, 0, absl::MakeSpan(values));
  EXPECT_THAT(values, Each(0.0f));
  tensor.init = Init::kOnes;
  FillInitial(tensor, 9, 0, absl::MakeSpan(values));
  EXPECT_THAT(values, Each(1.0f));
}

TEST(InitialValueDeathTest, RefusesARangeOutsideTheTensor) {
  std::vector<float> values(2);
  EXPECT_DEATH(FillInitial(NormalTensor(), 9, 299, absl::MakeSpan(values)),
               "check failed");
}

TEST(HashTest, HexIsReadBackAndNothingElseIs) {
  const Hash128 hash = {0x0123456789abcdef, 0xfedcba9876543210};
  EXPECT_EQ(ParseHashHex(HashHex(hash)), hash);
  for (const char* text :
       {"", "0123456789abcdeffedcba987654321",
        "0123456789ABCDEFfedcba9876543210", "0123456789abcdef0xfedcba98765432",
        "0123456789abcdeffedcba98765432100"}) {
    EXPECT_EQ(ParseHashHex(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace ballast
