// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "storage/checkpoint.h"
#include "tests/storage/sample_checkpoint.h"
#include "tests/storage/storage_testing.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using testing::Says;

constexpr auto kLoss = absl::StatusCode::kDataLoss;

const CheckpointManifest& Sample() {
  static const testing::SampleCheckpoint sample(2);
  return sample.manifest;
}

void ExpectSame(const CheckpointManifest& a, const CheckpointManifest& b) {
  EXPECT_EQ(a.format_version, b.format_version);
  EXPECT_EQ(a.run, b.run);
  EXPECT_EQ(a.run_name, b.run_name);
  EXPECT_EQ(a.timeline, b.timeline);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.optimizer_step, b.optimizer_step);
  EXPECT_EQ(a.samples_consumed, b.samples_consumed);
  EXPECT_EQ(a.decision, b.decision);
  EXPECT_EQ(a.config, b.config);
  EXPECT_EQ(a.optimizer, b.optimizer);
  EXPECT_EQ(a.layout, b.layout);
  EXPECT_EQ(a.directories, b.directories);
  ASSERT_EQ(a.records.size(), b.records.size());
  for (size_t i = 0; i < a.records.size(); ++i) {
    EXPECT_EQ(a.records[i].tensor, b.records[i].tensor);
    EXPECT_EQ(a.records[i].begin, b.records[i].begin);
    EXPECT_EQ(a.records[i].end, b.records[i].end);
    EXPECT_EQ(a.records[i].version, b.records[i].version);
    EXPECT_EQ(a.records[i].timeline, b.records[i].timeline);
    EXPECT_EQ(a.records[i].directory, b.records[i].directory);
    EXPECT_EQ(a.records[i].extent, b.records[i].extent);
  }
}

TEST(ManifestTest, ComesBackFromJsonAsItWas) {
  const auto back = CheckpointManifest::FromJson(Sample().ToJson());
  ASSERT_EQ(back.status(), absl::OkStatus());
  ExpectSame(*back, Sample());
}

TEST(ManifestTest, KeepsTextThatIsNoUtf8AndNumbersOf64Bits) {
  CheckpointManifest manifest = Sample();
  manifest.directories[0] = "/data/\xff\xfe/ps-0";
  manifest.config = std::string("\x00\x80\"\\\n", 5);
  manifest.samples_consumed = ~uint64_t{0};
  manifest.run = {~uint64_t{0}, 1};
  const auto back = CheckpointManifest::FromJson(manifest.ToJson());
  ASSERT_EQ(back.status(), absl::OkStatus());
  ExpectSame(*back, manifest);
}

TEST(ManifestTest, HasOneRecordALine) {
  const std::string json = Sample().ToJson();
  size_t lines = 0;
  for (size_t at = 0;
       (at = json.find("\n  {\"tensor\":", at)) != std::string::npos; ++at) {
    ++lines;
  }
  EXPECT_EQ(lines, Sample().records.size());
}

TEST(ManifestTest, AnyFlippedByteOrTruncationIsFound) {
  const std::string good = Sample().ToJson();
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    ASSERT_EQ(CheckpointManifest::FromJson(bad).status().code(), kLoss) << i;
  }
  for (size_t i = 0; i < good.size(); i += 7) {
    ASSERT_EQ(CheckpointManifest::FromJson(good.substr(0, i)).status().code(),
              kLoss)
        << i;
  }
  EXPECT_EQ(CheckpointManifest::FromJson(good + "\n").status().code(), kLoss);
}

// What a checksum cannot find: a manifest that was written wrong.
struct Mutation {
  const char* name;
  const char* says;
  std::function<void(CheckpointManifest*)> apply;
};

class ManifestMutationTest : public ::testing::TestWithParam<Mutation> {};

TEST_P(ManifestMutationTest, IsRefusedByName) {
  CheckpointManifest manifest = Sample();
  GetParam().apply(&manifest);
  EXPECT_TRUE(Says(CheckpointManifest::FromJson(manifest.ToJson()).status(),
                   kLoss, GetParam().says));
}

ManifestRecord& Last(CheckpointManifest* manifest) {
  return manifest->records.back();
}

INSTANTIATE_TEST_SUITE_P(
    All, ManifestMutationTest,
    ::testing::Values(
        Mutation{"RecordMissing", "records of ",
                 [](auto* m) { m->records.pop_back(); }},
        Mutation{"RecordTwice", "overlap at element",
                 [](auto* m) { m->records.push_back(m->records.back()); }},
        Mutation{"NoRecords", "end at element 0 of",
                 [](auto* m) { m->records.clear(); }},
        Mutation{"TensorOutOfRange", "names tensor 3 of 3",
                 [](auto* m) { Last(m).tensor = 3; }},
        Mutation{"DirectoryOutOfRange", "directory 2 of 2",
                 [](auto* m) { Last(m).directory = 2; }},
        Mutation{"Reversed", "no range of whole blocks",
                 [](auto* m) { std::swap(Last(m).begin, Last(m).end); }},
        Mutation{"OffTheBlocks", "no range of whole blocks",
                 [](auto* m) { Last(m).begin += 1; }},
        Mutation{"BehindTheEnd", "no range of whole blocks",
                 [](auto* m) { Last(m).end += 1; }},
        Mutation{"ExtentTooShort", "has an extent of",
                 [](auto* m) { Last(m).extent.bytes -= 4096; }},
        Mutation{"ExtentOffThePages", "page boundary",
                 [](auto* m) { Last(m).extent.offset += 1; }},
        Mutation{"OtherOptimizer", "has an extent of",
                 [](auto* m) { m->optimizer = OptimizerKind::kSgd; }},
        Mutation{"UseMissing", "a use that no unit lists",
                 [](auto* m) { m->layout.units.pop_back(); }},
        Mutation{"NameTwice", "declared twice",
                 [](auto* m) {
                   m->layout.tensors[2].name = m->layout.tensors[1].name;
                 }},
        Mutation{"NewerFormat", "has format 2, want 1",
                 [](auto* m) { m->format_version = 2; }}),
    [](const auto& param) { return param.param.name; });

// Replaces text and makes the checksum fit again.
absl::Status AfterEdit(absl::string_view from, const std::string& to) {
  std::string body = Sample().ToJson();
  body.resize(body.rfind("\"checksum\""));
  const size_t at = body.find(std::string(from));
  EXPECT_NE(at, std::string::npos) << from;
  body.replace(at, from.size(), to);
  return CheckpointManifest::FromJson(absl::StrCat(body, "\"checksum\": \"",
                                                   HashHex(HashBytes(body)),
                                                   "\"\n}\n"))
      .status();
}

TEST(ManifestTest, NamesTheMemberThatIsMissingOrOfAnotherType) {
  EXPECT_EQ(AfterEdit("\"step\"", "\"step\""), absl::OkStatus());
  EXPECT_TRUE(Says(AfterEdit("\"step\": 800", "\"stop\": 800"), kLoss,
                   "manifest.step"));
  EXPECT_TRUE(
      Says(AfterEdit("\"step\": 800", "\"step\": -1"), kLoss, "manifest.step"));
  EXPECT_TRUE(Says(AfterEdit("\"step\": 800", "\"step\": 1e99"), kLoss,
                   "manifest.step"));
  EXPECT_TRUE(Says(AfterEdit("\"step\": 800", "\"step\": \"800\""), kLoss,
                   "manifest.step"));
  EXPECT_TRUE(
      Says(AfterEdit("\"run\": \"0", "\"run\": \"x"), kLoss, "manifest.run"));
  EXPECT_TRUE(Says(AfterEdit("\"decision_hex\": \"0", "\"decision_hex\": \""),
                   kLoss, "decision_hex"));
  EXPECT_TRUE(Says(AfterEdit("\"adamw\"", "\"lion\""), kLoss, "'lion'"));
  EXPECT_TRUE(Says(AfterEdit("\"directory\":0", "\"directory\":4294967296"),
                   kLoss, "records[0].directory"));
  EXPECT_TRUE(Says(AfterEdit("\"decay\":true", "\"decay\":1"), kLoss,
                   "tensors[1].decay"));
  EXPECT_TRUE(
      Says(AfterEdit("[300,700]", "[300,\"x\"]"), kLoss, "tensors[0].shape"));
  EXPECT_TRUE(Says(AfterEdit("ballast-checkpoint", "cargo"), kLoss, "format"));
  EXPECT_TRUE(Says(AfterEdit("\"records\": [", "\"records\": {["), kLoss,
                   "is no object"));
}

TEST(ManifestTest, RandomTextIsNeverAManifest) {
  std::mt19937_64 random(testing::Seed());
  const std::string good = Sample().ToJson();
  for (int i = 0; i < 300; ++i) {
    std::string body = good.substr(0, good.rfind("\"checksum\""));
    for (uint64_t cuts = 1 + random() % 3; cuts > 0; --cuts) {
      const size_t at = random() % body.size();
      body.erase(at, 1 + random() % 9);
    }
    // A checksum that fits: what is left to the parser.
    const auto status = CheckpointManifest::FromJson(
                            absl::StrCat(body, "\"checksum\": \"",
                                         HashHex(HashBytes(body)), "\"\n}\n"))
                            .status();
    EXPECT_TRUE(status.ok() || status.code() == kLoss) << status;
  }
}

TEST(ManifestFilesTest, AreReadByFileFolderOrAsTheNewest) {
  const testing::TempDir dir;
  const std::string checkpoints = dir.path("checkpoints");
  for (const uint64_t step : {900, 1'000'000'000, 800}) {
    CheckpointManifest manifest = Sample();
    manifest.step = step;
    ASSERT_EQ(WriteManifest(checkpoints, manifest), absl::OkStatus());
  }
  EXPECT_THAT(ListManifests(checkpoints), ElementsAre(800, 900, 1'000'000'000));
  EXPECT_EQ(ReadManifest(checkpoints)->step, 1'000'000'000u);
  EXPECT_EQ(ReadManifest(checkpoints + "/step-00000800")->step, 800u);
  EXPECT_EQ(ReadManifest(checkpoints + "/step-00000900/manifest.json")->step,
            900u);
}

TEST(ManifestFilesTest, DamagedOnesAreLeftOutOfTheListAndLossByName) {
  const testing::TempDir dir;
  for (const uint64_t step : {1, 2, 3}) {
    CheckpointManifest manifest = Sample();
    manifest.step = step;
    ASSERT_EQ(WriteManifest(dir.path(), manifest), absl::OkStatus());
  }
  const std::string newest = dir.path("step-00000003/manifest.json");
  testing::FlipByte(newest, 100);
  std::filesystem::create_directory(dir.path("step-00000009"));
  std::filesystem::create_directory(dir.path("step-x"));
  testing::Spill(dir.path("step-00000009/manifest.json.tmp"), "{");
  std::filesystem::copy(dir.path("step-00000001"), dir.path("step-00000007"));
  EXPECT_THAT(ListManifests(dir.path()), ElementsAre(1, 2));
  EXPECT_EQ(ReadManifest(dir.path())->step, 2u);
  EXPECT_TRUE(Says(ReadManifest(newest).status(), kLoss, newest));
}

TEST(ManifestFilesTest, WhatIsNotThereIsNotFound) {
  const testing::TempDir dir;
  constexpr auto kNotFound = absl::StatusCode::kNotFound;
  EXPECT_EQ(ReadManifest(dir.path()).status().code(), kNotFound);
  EXPECT_EQ(ReadManifest(dir.path("none")).status().code(), kNotFound);
  EXPECT_TRUE(ListManifests(dir.path("none")).empty());
}

}  // namespace
}  // namespace ballast
