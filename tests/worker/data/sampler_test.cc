// SPDX-License-Identifier: Apache-2.0
#include "worker/data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

namespace ballast {
namespace {

using ::testing::HasSubstr;

Job SmallJob() {
  Job job;
  job.run.seed = 11;
  job.model.context = 8;
  job.batch.micro_batches = 3;
  job.batch.micro_batch_size = 2;
  job.data.validation_fraction = 0.25;
  job.eval.micro_batches = 2;
  return job;
}

TEST(PermuteSampleTest, IsAPermutationOfEverySize) {
  for (uint64_t count = 1; count <= 300; ++count) {
    std::vector<bool> seen(count, false);
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t image = PermuteSample(1, 2, count, i);
      ASSERT_LT(image, count);
      EXPECT_FALSE(seen[image]) << count;
      seen[image] = true;
    }
  }
}

TEST(PermuteSampleTest, HoldsForCountsBeyond32Bits) {
  const uint64_t count = (uint64_t{1} << 45) + 12345;
  std::set<uint64_t> images;
  for (uint64_t i = 0; i < 1000; ++i) {
    const uint64_t image = PermuteSample(1, 2, count, count - 1 - i);
    EXPECT_LT(image, count);
    images.insert(image);
  }
  EXPECT_EQ(images.size(), 1000u);
}

TEST(PermuteSampleTest, SeedAndEpochChooseThePermutation) {
  std::set<std::vector<uint64_t>> orders;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    for (uint64_t epoch = 0; epoch < 10; ++epoch) {
      std::vector<uint64_t> order;
      for (uint64_t i = 0; i < 50; ++i) {
        order.push_back(PermuteSample(seed, epoch, 50, i));
      }
      orders.insert(order);
    }
  }
  EXPECT_EQ(orders.size(), 100u);
}

// Over many seeds every image of every index is about equally frequent, and
// neighbours are not kept together: what a shuffle is for.
TEST(PermuteSampleTest, LooksLikeAShuffle) {
  constexpr uint64_t kCount = 12;
  constexpr uint64_t kSeeds = 12000;
  std::vector<int> images(kCount * kCount, 0);
  int kept = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (uint64_t i = 0; i < kCount; ++i) {
      const uint64_t image = PermuteSample(seed, 0, kCount, i);
      ++images[i * kCount + image];
      kept += i > 0 && PermuteSample(seed, 0, kCount, i - 1) + 1 == image;
    }
  }
  // 1000 expected; the standard deviation is 30.
  EXPECT_GT(*std::min_element(images.begin(), images.end()), 850);
  EXPECT_LT(*std::max_element(images.begin(), images.end()), 1150);
  // 11 pairs, each kept in one of 12 orders.
  EXPECT_NEAR(kept / static_cast<double>(kSeeds), 11.0 / 12.0, 0.05);
}

TEST(SamplerTest, CutsTheTextIntoWindowsWithATargetEach) {
  // 75 bytes train: (75 - 1) / 8; 25 are held out: (25 - 1) / 8 = 3 < 4.
  EXPECT_FALSE(Sampler::Create(SmallJob(), 100).ok());
  Job job = SmallJob();
  job.eval.micro_batches = 1;
  const auto sampler = Sampler::Create(job, 100);
  ASSERT_TRUE(sampler.ok()) << sampler.status();
  EXPECT_EQ(sampler->train_samples(), 9u);
  EXPECT_EQ(sampler->eval_samples(), 3u);
}

// Whoever computes which micro-batch, each window occurs once an epoch, also
// where a step straddles two epochs.
TEST(SamplerTest, EveryEpochReadsEveryTrainingWindowOnce) {
  for (const uint64_t bytes : {200u, 401u, 555u}) {
    const auto sampler = Sampler::Create(SmallJob(), bytes);
    ASSERT_TRUE(sampler.ok()) << sampler.status();
    const uint64_t count = sampler->train_samples();
    std::vector<uint64_t> offsets;
    for (uint64_t step = 1; offsets.size() < 3 * count; ++step) {
      for (uint32_t m = 0; m < 3; ++m) {
        for (uint32_t i = 0; i < 2; ++i) {
          offsets.push_back(sampler->TrainOffset(step, m, i));
        }
      }
    }
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      std::set<uint64_t> seen;
      for (uint64_t i = epoch * count; i < (epoch + 1) * count; ++i) {
        EXPECT_EQ(offsets[i] % 8, 0u);
        EXPECT_LE(offsets[i] + 9, bytes - bytes / 4);
        seen.insert(offsets[i]);
      }
      EXPECT_EQ(seen.size(), count) << bytes << " epoch " << epoch;
    }
  }
}

// The sequences of a step do not depend on how it is cut into micro-batches.
TEST(SamplerTest, TheSplitOfAStepMovesNoSample) {
  Job coarse = SmallJob();
  coarse.batch.micro_batches = 2;
  coarse.batch.micro_batch_size = 6;
  coarse.eval.micro_batches = 1;
  Job fine = coarse;
  fine.batch.micro_batches = 6;
  fine.batch.micro_batch_size = 2;
  const auto a = Sampler::Create(coarse, 1000);
  const auto b = Sampler::Create(fine, 1000);
  ASSERT_TRUE(a.ok() && b.ok());
  for (uint64_t step = 1; step <= 20; ++step) {
    for (uint32_t i = 0; i < 12; ++i) {
      EXPECT_EQ(a->TrainOffset(step, i / 6, i % 6),
                b->TrainOffset(step, i / 2, i % 2));
    }
  }
}

TEST(SamplerTest, HeldOutWindowsAreInFileOrderAndSpreadOverTheTail) {
  const auto sampler = Sampler::Create(SmallJob(), 4000);
  ASSERT_TRUE(sampler.ok());
  ASSERT_EQ(sampler->eval_samples(), 124u);
  EXPECT_EQ(sampler->EvalOffset(0, 0), 3000u);
  EXPECT_EQ(sampler->EvalOffset(0, 1), 3000u + 8 * 31);
  EXPECT_EQ(sampler->EvalOffset(1, 0), 3000u + 8 * 62);
  EXPECT_EQ(sampler->EvalOffset(1, 1), 3000u + 8 * 93);
}

TEST(SamplerTest, AnEvaluationOfTheWholeTailReadsEachWindowOnce) {
  Job job = SmallJob();
  job.eval.micro_batches = 62;
  const auto sampler = Sampler::Create(job, 4000);
  ASSERT_TRUE(sampler.ok());
  for (uint32_t i = 0; i < 124; ++i) {
    EXPECT_EQ(sampler->EvalOffset(i / 2, i % 2), 3000u + 8 * i);
  }
  job.eval.micro_batches = 63;
  const auto refused = Sampler::Create(job, 4000);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("124 sequences; eval.micro_batches wants 126"));
}

TEST(SamplerTest, ATextShorterThanAContextIsRefused) {
  Job job = SmallJob();
  job.data.validation_fraction = 0;
  job.eval.micro_batches = 0;
  EXPECT_TRUE(Sampler::Create(job, 9).ok());
  const auto refused = Sampler::Create(job, 8);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("data.path has 8 bytes to train on; want at least 9"));
}

}  // namespace
}  // namespace ballast
