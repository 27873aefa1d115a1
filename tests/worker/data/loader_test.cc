// SPDX-License-Identifier: Apache-2.0
#include "worker/data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace ballast {
namespace {

using ::testing::HasSubstr;

class LoaderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "/loader_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    job_.data.path = folder_ + "/text";
    job_.data.validation_fraction = 0.25;
    job_.model.context = 8;
    job_.batch.micro_batches = 4;
    job_.batch.micro_batch_size = 3;
    job_.eval.micro_batches = 2;
    for (int i = 0; i < 2000; ++i) {
      text_.push_back(static_cast<char>((i * 7 + i / 256) & 0xff));
    }
    Write(text_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& text) {
    std::ofstream(job_.data.path, std::ios::binary | std::ios::trunc) << text;
  }

  std::string ErrorOf(absl::StatusCode code) {
    const auto loader = Loader::Open(job_);
    EXPECT_EQ(loader.status().code(), code) << loader.status();
    return std::string(loader.status().message());
  }

  // The bytes of the text at the sampler's offsets, and those one later.
  MicroBatch Expected(const Sampler& sampler, const BatchName& name) {
    MicroBatch batch;
    for (uint32_t i = 0; i < job_.batch.micro_batch_size; ++i) {
      const uint64_t offset =
          name.eval ? sampler.EvalOffset(name.micro_batch, i)
                    : sampler.TrainOffset(name.step, name.micro_batch, i);
      for (uint64_t t = 0; t < job_.model.context; ++t) {
        batch.ids.push_back(static_cast<uint8_t>(text_[offset + t]));
        batch.targets.push_back(static_cast<uint8_t>(text_[offset + t + 1]));
      }
    }
    return batch;
  }

  void ExpectTaken(Loader* loader, const BatchName& name) {
    const absl::StatusOr<MicroBatch> batch = loader->Take(name);
    ASSERT_TRUE(batch.ok()) << batch.status();
    const MicroBatch expected = Expected(loader->sampler(), name);
    EXPECT_EQ(batch->ids, expected.ids);
    EXPECT_EQ(batch->targets, expected.targets);
  }

  std::string folder_;
  std::string text_;
  Job job_;
};

TEST_F(LoaderTest, GivesTheBytesOfTheTextAnnouncedOrNot) {
  const auto loader = Loader::Open(job_);
  ASSERT_TRUE(loader.ok()) << loader.status();
  ExpectTaken(loader->get(), {1, 2, false});
  ExpectTaken(loader->get(), {0, 1, true});
  std::vector<BatchName> names;
  for (uint64_t step = 1; step <= 50; ++step) {
    for (uint32_t m = 0; m < 4; ++m) {
      names.push_back({step, m, false});
    }
  }
  (*loader)->Announce(names);
  for (const BatchName& name : names) {
    ExpectTaken(loader->get(), name);
  }
}

TEST_F(LoaderTest, ANewAnnouncementReplacesWhatWasNotTaken) {
  const auto loader = Loader::Open(job_);
  ASSERT_TRUE(loader.ok());
  for (uint64_t step = 1; step <= 200; ++step) {
    (*loader)->Announce({{{step, 0, false}, {step, 1, false}}});
    ExpectTaken(loader->get(), {step, 1, false});
    (*loader)->Announce({{{step, 0, false}, {step + 1, 0, false}}});
    ExpectTaken(loader->get(), {step, 0, false});
    ExpectTaken(loader->get(), {step, 3, false});
  }
  (*loader)->Announce({});
  ExpectTaken(loader->get(), {1, 0, false});
}

TEST_F(LoaderTest, SeveralThreadsMayTake) {
  const auto loader = Loader::Open(job_);
  ASSERT_TRUE(loader.ok());
  std::vector<std::thread> threads;
  for (uint32_t m = 0; m < 4; ++m) {
    threads.emplace_back([this, m, &loader] {
      for (uint64_t step = 1; step <= 100; ++step) {
        (*loader)->Announce({{{step, m, false}, {step + 1, m, false}}});
        ExpectTaken(loader->get(), {step, m, false});
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST_F(LoaderTest, EndsWithAnnouncementsThatNobodyTook) {
  const auto loader = Loader::Open(job_);
  ASSERT_TRUE(loader.ok());
  (*loader)->Announce({{{1, 0, false}, {1, 1, false}}});
}

TEST_F(LoaderTest, AFileCutShortMeanwhileIsAnError) {
  const auto loader = Loader::Open(job_);
  ASSERT_TRUE(loader.ok());
  ASSERT_EQ(truncate(job_.data.path.c_str(), 4), 0);
  const auto batch = (*loader)->Take({1, 0, false});
  EXPECT_EQ(batch.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(batch.status().message()),
              HasSubstr("was cut short; it had 2000 bytes"));
}

TEST_F(LoaderTest, AByteOutsideTheVocabularyIsAnError) {
  job_.model.vocabulary = 128;
  Write(std::string(2000, '\x7f'));
  auto loader = Loader::Open(job_);
  ASSERT_TRUE(loader.ok());
  EXPECT_TRUE((*loader)->Take({1, 0, false}).ok());
  Write(std::string(2000, '\x80'));
  loader = Loader::Open(job_);
  ASSERT_TRUE(loader.ok());
  const auto batch = (*loader)->Take({1, 0, false});
  EXPECT_EQ(batch.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(batch.status().message()),
              HasSubstr("want bytes below model.vocabulary, 128"));
}

TEST_F(LoaderTest, NamesWhatIsWrongWithTheFile) {
  Write("");
  EXPECT_THAT(
      ErrorOf(absl::StatusCode::kInvalidArgument),
      HasSubstr("data.path is '" + job_.data.path + "', which is empty"));
  Write("short");
  EXPECT_THAT(ErrorOf(absl::StatusCode::kInvalidArgument),
              HasSubstr("data.path has 4 bytes to train on; want at least 9"));
  std::filesystem::remove(job_.data.path);
  EXPECT_THAT(ErrorOf(absl::StatusCode::kNotFound), HasSubstr("no such file"));
  job_.data.path = folder_;
  EXPECT_THAT(ErrorOf(absl::StatusCode::kInvalidArgument),
              HasSubstr("which is not a file"));
}

}  // namespace
}  // namespace ballast
