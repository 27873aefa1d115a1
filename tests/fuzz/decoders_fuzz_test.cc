// SPDX-License-Identifier: Apache-2.0
// Decoders of what a person or a peer sends, fed with damaged input: a clear
// refusal or a value that means the same when it is written again; never a
// crash, an exception or an endless loop.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <string>

#include "common/job_file.h"
#include "proto/bulk.h"
#include "tests/fuzz/mutate.h"

namespace ballast::testing {
namespace {

// A new seed each run: what a night finds, --gtest_random_seed repeats.
std::mt19937_64 SeededRandom() {
  uint64_t seed =
      static_cast<uint64_t>(::testing::UnitTest::GetInstance()->random_seed());
  if (seed == 0) {
    seed = std::random_device{}() % 99999 + 1;
  }
  std::cout << "repeat with --gtest_random_seed=" << seed << "\n";
  return std::mt19937_64(seed);
}

constexpr char kJob[] = R"(run: {name: tiny, steps: 30, state_hash: every}
model:
  layers: 2
  heads: 2
  width: 16
  context: 8
  tied: false
data:
  path: text.txt
  validation_fraction: 0.1
batch: {micro_batches: 4, micro_batch_size: 2}
optimizer:
  name: adamw
  lr: 4e-3
  clip_norm: 1.0
schedule:
  name: cosine
  warmup_steps: 3
precision:
  compute_dtype: bf16
worker:
  memory: 1MiB
  count: 2
server:
  memory: 2MiB
  chunk_elems: 65536
)";

class JobFileFuzzTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "/fuzz_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<JobFile> Load(const std::string& text) {
    const std::string path = folder_ + "/job.yaml";
    std::ofstream(path, std::ios::binary) << text;
    return LoadJobFile(path, {});
  }

  std::string folder_;
};

TEST_F(JobFileFuzzTest, ADamagedJobFileIsRefusedOrKeepsItsMeaning) {
  std::mt19937_64 random = SeededRandom();
  ASSERT_TRUE(Load(kJob).ok()) << Load(kJob).status();
  int loaded = 0;
  for (int round = 0; round < 3000; ++round) {
    const std::string text = Mutate(kJob, &random);
    SCOPED_TRACE(text);
    const absl::StatusOr<JobFile> file = Load(text);
    if (!file.ok()) {
      EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_FALSE(file.status().message().empty());
      continue;
    }
    ++loaded;
    const absl::StatusOr<JobFile> again = Load(EffectiveYaml(*file));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(NumericsHash(again->job), NumericsHash(file->job));
    EXPECT_EQ(EffectiveYaml(*again), EffectiveYaml(*file));
  }
  EXPECT_GT(loaded, 0);
}

// Found by this test: yaml-cpp's LoadAll takes memory for ever here.
TEST_F(JobFileFuzzTest, ATextThatStartsWithACommaIsRefused) {
  EXPECT_FALSE(Load(", a: 1\n").ok());
  EXPECT_FALSE(Load("}").ok());
}

// Found by this test: such a path would be another one in config.yaml.
TEST_F(JobFileFuzzTest, ATextThatIsNotUtf8IsRefused) {
  const std::string job = kJob;
  for (const char* bad :
       {"\x80", "\xbf\xbf", "\xc3", "\xc0\xaf", "\xed\xa0\x80",
        "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80"}) {
    EXPECT_FALSE(Load(job + "# " + bad + "\n").ok());
  }
  for (const char* good :
       {"\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x9a\xa2", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(Load(job + "# " + good + "\n").ok()) << good;
  }
}

TEST_F(JobFileFuzzTest, OneDocumentIsWanted) {
  const std::string job = kJob;
  EXPECT_TRUE(Load("# a comment\n---\n" + job).ok());
  EXPECT_FALSE(Load(job + "---\n").ok());
  EXPECT_FALSE(Load(job + "---\nrun: {seed: 2}\n").ok());
  EXPECT_FALSE(Load(job + "...\nrun: {seed: 2}\n").ok());
  EXPECT_FALSE(Load("--- {a: 1}\n---\n" + job).ok());
}

// Headers with sound checksums whose fields are anything.
TEST(BulkFuzzTest, AnyHeaderIsRefusedOrDecodesToItself) {
  std::mt19937_64 random = SeededRandom();
  std::map<BulkKind, int> decoded;
  for (int round = 0; round < 20000; ++round) {
    BulkHeader header;
    header.kind = static_cast<BulkKind>(random() % 13);
    header.step = random();
    header.record_timeline = random() % 4 == 0 ? random() : 0;
    uint64_t payload = 0;
    for (uint64_t i = random() % 4; i > 0; --i) {
      BulkItem item;
      item.chunk = static_cast<uint32_t>(random());
      item.span = {static_cast<uint32_t>(random()),
                   static_cast<uint32_t>(random())};
      item.dtype = static_cast<DType>(random() % 3 / 2 * (random() % 256));
      item.encoding = static_cast<uint8_t>(random() % 16 == 0);
      item.elem_begin = random();
      item.elem_count = random();
      item.payload_bytes = random() >> (random() % 64);
      item.record_version = random() % 2 == 0 ? random() : 0;
      if (random() % 2 == 0) {  // As of a complete gradient.
        item.use = kBulkAllUses;
        item.elem_begin = 0;
        item.elem_count = item.payload_bytes / 4;
      }
      payload += item.payload_bytes;
      header.items.push_back(item);
    }
    const std::string bytes = EncodeBulkHeader(header);
    const auto read = DecodeBulkHeader(bytes, bytes.size() + payload);
    if (read.ok()) {
      ++decoded[header.kind];
      EXPECT_EQ(*read, header);
      for (const BulkItem& item : read->items) {
        if (header.kind == BulkKind::kReplicaBase) {
          EXPECT_LE(item.elem_begin, item.elem_count);
          EXPECT_LE(item.payload_bytes, item.elem_count - item.elem_begin);
        }
      }
    }
  }
  EXPECT_EQ(decoded.size(), 11u);  // Every kind, and no other.
}

TEST(BulkFuzzTest, ADamagedHeaderIsRefused) {
  std::mt19937_64 random = SeededRandom();
  BulkHeader header;
  header.kind = BulkKind::kPush;
  header.items.resize(3);
  header.items[1].payload_bytes = 100;
  const std::string good = EncodeBulkHeader(header);
  for (int round = 0; round < 20000; ++round) {
    const std::string bytes = Mutate(good, &random);
    const auto decoded = DecodeBulkHeader(bytes, bytes.size() + 100);
    EXPECT_EQ(decoded.ok(), bytes == good);
  }
}

}  // namespace
}  // namespace ballast::testing
