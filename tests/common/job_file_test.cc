// SPDX-License-Identifier: Apache-2.0
#include "common/job_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/job_keys.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kJob[] = R"(run:
  name: tiny
  steps: 30
model:
  layers: 2
  heads: 2
  width: 16
  context: 8
data:
  path: text.txt
batch:
  micro_batches: 4
  micro_batch_size: 2
worker:
  memory: 1MiB
server:
  memory: 2MiB
)";

class JobFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / "job_file_test.XXXXXX";
    std::string name = folder_.string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    path_ = (folder_ / "job.yaml").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<JobFile> Load(const std::string& text,
                               const std::vector<std::string>& set = {}) {
    std::ofstream(path_) << text;
    return LoadJobFile(path_, set);
  }

  // The message, without the path of the temporary file.
  std::string ErrorOf(const std::string& text,
                      const std::vector<std::string>& set = {}) {
    const absl::StatusOr<JobFile> file = Load(text, set);
    if (file.ok()) return "no error";
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
    return absl::StrReplaceAll(file.status().message(), {{path_, "job.yaml"}});
  }

  std::string ErrorOfSet(const std::vector<std::string>& set) {
    return ErrorOf(kJob, set);
  }

  std::filesystem::path folder_;
  std::string path_;
};

std::string Replaced(absl::string_view from, absl::string_view to) {
  return absl::StrReplaceAll(kJob, {{from, to}});
}

std::string SourceOf(const JobFile& file, absl::string_view key) {
  for (const ConfigEntry& entry : file.entries) {
    if (entry.key == key) return entry.source;
  }
  return "no such entry";
}

TEST_F(JobFileTest, ReadsValuesUnitsAndDefaults) {
  const absl::StatusOr<JobFile> file = Load(absl::StrCat(
      kJob, "cluster:\n  lease: 1m30s\n", "  progress_timeout: 5m\n"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->job.run.name, "tiny");
  EXPECT_EQ(file->job.run.steps, 30u);
  EXPECT_EQ(file->job.run.dir, "runs/tiny");
  EXPECT_EQ(file->job.server.data_dir, "runs/tiny/servers");
  EXPECT_EQ(file->job.worker.memory, 1u << 20);
  EXPECT_EQ(file->job.server.memory, 2u << 20);
  EXPECT_EQ(file->job.optimizer.lr, 1e-3);
  EXPECT_EQ(file->job.cluster.lease, absl::Seconds(90));
}

TEST_F(JobFileTest, SaysWhereEachValueComesFrom) {
  const absl::StatusOr<JobFile> file =
      Load(kJob, {"worker.count=2", "worker.count=3"});
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->job.worker.count, 3u);
  EXPECT_EQ(SourceOf(*file, "worker.count"), "--set");
  EXPECT_EQ(SourceOf(*file, "worker.memory"), absl::StrCat(path_, ":15"));
  EXPECT_EQ(SourceOf(*file, "optimizer.lr"), "default");
}

TEST_F(JobFileTest, EffectiveYamlLoadsToTheSameJob) {
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"optimizer.lr=0.0012345678901234567", "run.seed=18446744073709551615",
       "worker.memory=4.5MiB", "data.path='odd: \"path\" # true'",
       "precision.compute_dtype=bf16", "model.tied=false"},
      {"optimizer.name=sgd", "optimizer.momentum=0.5", "schedule.name=constant",
       "run.state_hash=every", "cluster.lease=250ms"}};
  for (const std::vector<std::string>& set : cases) {
    const absl::StatusOr<JobFile> first = Load(kJob, set);
    ASSERT_TRUE(first.ok()) << first.status();
    const absl::StatusOr<JobFile> second = Load(EffectiveYaml(*first));
    ASSERT_TRUE(second.ok()) << second.status();
    EXPECT_EQ(NumericsFields(first->job), NumericsFields(second->job));
    EXPECT_EQ(OperationsFields(first->job), OperationsFields(second->job));
    EXPECT_EQ(NumericsHash(first->job), NumericsHash(second->job));
    EXPECT_EQ(EffectiveYaml(*first), EffectiveYaml(*second));
  }
}

TEST_F(JobFileTest, EveryKeyRoundTripsAndBelongsToOneSection) {
  Job job;
  std::vector<std::string> sections;
  std::set<std::string> names;
  for (const JobKey& key : JobKeys()) {
    EXPECT_TRUE(names.insert(key.name).second) << key.name;
    const std::string section = key.name.substr(0, key.name.find('.'));
    if (sections.empty() || sections.back() != section) {
      EXPECT_EQ(std::count(sections.begin(), sections.end(), section), 0)
          << section << " is split";
      sections.push_back(section);
    }
    const std::string text = key.print(job);
    // What must be given has no default that would pass.
    const bool unset = text.empty() || key.required;
    if (!unset) {
      EXPECT_TRUE(key.parse(text, &job).ok()) << key.name << " " << text;
    }
    EXPECT_EQ(key.print(job), text) << key.name;
  }
  EXPECT_EQ(sections.size(), 12u);
}

TEST_F(JobFileTest, OnlyWhatDecidesBitsChangesTheNumericsHash) {
  const Hash128 base = NumericsHash(Load(kJob)->job);
  for (const char* set :
       {"worker.count=2", "server.count=3", "worker.memory=9MiB",
        "server.chunk_elems=65536", "worker.prefetch=0", "cluster.port=0",
        "cluster.host=255.0.0.0", "cluster.host=node-1", "data.hash=any",
        "run.dir=elsewhere", "checkpoint.every=7", "worker.threads=1"}) {
    EXPECT_EQ(NumericsHash(Load(kJob, {set})->job), base) << set;
  }
  for (const char* set :
       {"run.seed=2", "run.steps=31", "model.layers=3", "optimizer.lr=0.1",
        "batch.micro_batches=8", "schedule.warmup_steps=3",
        "precision.compute_dtype=bf16", "data.path=other.txt",
        "data.hash=01234567890123456789012345678901"}) {
    EXPECT_NE(NumericsHash(Load(kJob, {set})->job), base) << set;
  }
}

TEST_F(JobFileTest, UnknownKeysNameLineAndNearestKey) {
  EXPECT_EQ(ErrorOf(Replaced("  memory: 1MiB", "  memry: 1MiB")),
            "job.yaml:15: worker.memry is not a key; did you mean "
            "worker.memory?");
  EXPECT_EQ(ErrorOf(absl::StrCat(kJob, "optimiser:\n  lr: 1\n")),
            "job.yaml:18: optimiser is not a section; did you mean "
            "optimizer?");
  EXPECT_EQ(ErrorOf(absl::StrCat(kJob, "seed: 1\n")),
            "job.yaml:18: seed is not a section; did you mean the key "
            "run.seed?");
  EXPECT_EQ(ErrorOf(Replaced("  name: tiny", "  context: 3")),
            "job.yaml:2: run.context is not a key; did you mean "
            "model.context?");
  EXPECT_EQ(ErrorOfSet({"worker.cuont=2"}),
            "--set worker.cuont=2: worker.cuont is not a key; did you mean "
            "worker.count?");
}

TEST_F(JobFileTest, RepeatedKeysAndSectionsAreRefused) {
  EXPECT_EQ(ErrorOf(Replaced("  steps: 30", "  steps: 30\n  steps: 31")),
            "job.yaml:4: run.steps is given twice, first at job.yaml:3; "
            "remove one of them");
  EXPECT_EQ(ErrorOf(absl::StrCat(kJob, "run:\n  seed: 1\n")),
            "job.yaml:18: run is given twice, first at job.yaml:1; join the "
            "two sections");
}

TEST_F(JobFileTest, WrongTypesAndRangesNameTheWantedValue) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"run.steps=many", "run.steps is `many`; want a whole number from 1"},
      {"run.steps=0", "run.steps is `0`; want a whole number from 1"},
      {"run.steps=-3", "run.steps is `-3`"},
      {"run.steps=1.5", "run.steps is `1.5`"},
      {"run.name=a/b", "run.name is `a/b`; want 1 to 64 letters"},
      {"run.state_hash=always", "want end or every"},
      {"model.tied=maybe", "model.tied is `maybe`; want true or false"},
      {"model.vocabulary=255", "want a whole number from 256"},
      {"model.family=llama", "model.family is `llama`; want gpt2"},
      {"optimizer.lr=0", "optimizer.lr is `0`; want a number above 0"},
      {"optimizer.lr=nan", "optimizer.lr is `nan`"},
      {"optimizer.beta2=1", "want a number from 0, below 1"},
      {"data.validation_fraction=0", "above 0, at most 0.5"},
      {"data.validation_fraction=0.51", "above 0, at most 0.5"},
      {"worker.memory=4 apples", "want a size above 0, such as 64MiB"},
      {"worker.memory=0", "want a size above 0"},
      {"worker.prefetch=5", "want a whole number from 0 to 4"},
      {"server.chunk_elems=65535", "want a whole number from 65536"},
      {"cluster.port=65536", "want a whole number from 0 to 65535"},
      {"cluster.lease=5", "want a time from"},
      {"cluster.host=0", "want a host's name or IPv4 address"},
      {"cluster.host=1.2.3", "want a host's name or IPv4 address"},
      {"cluster.host=1.2.3.256", "want a host's name or IPv4 address"},
      {"cluster.host=::1", "want a host's name or IPv4 address"},
      {"cluster.host=é", "want a host's name or IPv4 address"},
      {"data.hash=0123", "want `any` or 32 hex digits"},
      {"data.hash=0123456789abcdef0123456789abcdeg", "want `any` or 32 hex"},
      {"checkpoint.keep=0", "want a whole number from 1"},
      {"run.dir=", "run.dir has no value"},
      {"run.dir=[a, b]", "run.dir is a list or a map; want one value"}};
  for (const auto& [set, wanted] : cases) {
    const std::string error = ErrorOfSet({set});
    EXPECT_THAT(error, StartsWith(absl::StrCat("--set ", set, ": ")));
    EXPECT_THAT(error, HasSubstr(wanted));
  }
}

TEST_F(JobFileTest, BoundsThemselvesAreAccepted) {
  for (const char* set :
       {"run.steps=1", "worker.prefetch=0", "worker.prefetch=4",
        "worker.count=4", "data.validation_fraction=0.5",
        "server.chunk_elems=65536", "cluster.port=0", "cluster.port=65535",
        "optimizer.beta1=0", "optimizer.clip_norm=0", "model.vocabulary=256",
        "schedule.warmup_steps=30", "schedule.min_lr_ratio=1"}) {
    EXPECT_EQ(ErrorOfSet({set}), "no error") << set;
  }
}

TEST_F(JobFileTest, BrokenRelationsNameBothKeys) {
  EXPECT_EQ(ErrorOf(Replaced("  width: 16", "  width: 15")),
            "job.yaml:7: model.width is 15, which model.heads = 2 does not "
            "divide; want a multiple of 2");
  EXPECT_EQ(ErrorOfSet({"worker.count=5"}),
            "--set worker.count=5: worker.count is 5, more than "
            "batch.micro_batches = 4, so some would have no work; want at "
            "most 4, or more and smaller micro-batches");
  EXPECT_THAT(ErrorOfSet({"schedule.warmup_steps=31"}),
              HasSubstr("more than run.steps = 30"));
  EXPECT_THAT(ErrorOfSet({"cluster.progress_timeout=3s"}),
              HasSubstr("cluster.lease is 3s, not shorter than "
                        "cluster.progress_timeout = 3s"));
  EXPECT_EQ(ErrorOfSet({"cluster.progress_timeout=3001ms"}), "no error");
}

TEST_F(JobFileTest, ContradictingTimeoutsAreRefusedNamingThePair) {
  // Each wait must be shorter than the one around it; equal is too long.
  const std::vector<std::vector<std::string>> pairs = {
      {"cluster.lease", "cluster.progress_timeout"},
      {"cluster.progress_limit", "cluster.progress_timeout"},
      {"cluster.lease", "cluster.give_up_after"},
      {"cluster.progress_limit", "cluster.give_up_after"}};
  for (const auto& pair : pairs) {
    const auto with = [&pair](const char* inner) {
      std::vector<std::string> set = {
          "cluster.lease=1s", "cluster.progress_limit=1s",
          "cluster.progress_timeout=60s", "cluster.give_up_after=60s"};
      set.push_back(absl::StrCat(pair[0], "=", inner));
      set.push_back(absl::StrCat(pair[1], "=20s"));
      return set;
    };
    EXPECT_THAT(
        ErrorOfSet(with("20s")),
        HasSubstr(absl::StrCat(pair[0], " is 20s, not shorter than ", pair[1],
                               " = 20s, which would run out first; lower ",
                               pair[0], " or raise ", pair[1])));
    EXPECT_EQ(ErrorOfSet(with("19999ms")), "no error") << pair[0];
  }
}

TEST_F(JobFileTest, ALogLimitOfZeroIsChosenForTheJob) {
  EXPECT_EQ(ErrorOfSet({"server.log_limit=0"}), "no error");
  EXPECT_EQ(ErrorOfSet({"server.log_limit=64MiB"}), "no error");
  EXPECT_THAT(ErrorOfSet({"server.log_limit=-1"}),
              HasSubstr("server.log_limit is `-1`; want a size such as 64MiB, "
                        "or 0 for one that fits"));
}

TEST_F(JobFileTest, KeysWithoutEffectAreRefusedWithTheFix) {
  EXPECT_EQ(ErrorOf(absl::StrCat(kJob, "optimizer:\n  momentum: 0.9\n")),
            "job.yaml:19: optimizer.momentum has no effect: optimizer.name is "
            "adamw; remove the key, or set optimizer.name: sgd");
  EXPECT_THAT(ErrorOfSet({"optimizer.name=sgd", "optimizer.beta1=0.8"}),
              HasSubstr("optimizer.beta1 has no effect: optimizer.name is "
                        "sgd"));
  EXPECT_THAT(
      ErrorOfSet({"schedule.name=constant", "schedule.min_lr_ratio=0.2"}),
      HasSubstr("has no effect: schedule.name is constant"));
  EXPECT_EQ(ErrorOfSet({"optimizer.name=sgd", "optimizer.momentum=0.8"}),
            "no error");
}

TEST_F(JobFileTest, WhatIsNotBuiltYetIsRefusedByName) {
  EXPECT_THAT(ErrorOfSet({"server.durability=replica"}),
              HasSubstr("not built yet"));
  EXPECT_THAT(ErrorOfSet({"precision.reduce_dtype=bf16"}),
              HasSubstr("not built yet; use precision.reduce_dtype: fp32"));
  EXPECT_THAT(ErrorOfSet({"server.durability=none"}),
              HasSubstr("want checkpoint"));
}

TEST_F(JobFileTest, MissingKeysAreNamed) {
  EXPECT_EQ(ErrorOf(Replaced("  memory: 1MiB\n", "")),
            "job.yaml: worker.memory is missing and has no default; add it, "
            "or give --set worker.memory=VALUE");
  EXPECT_EQ(ErrorOf(Replaced("  steps: 30\n", ""), {"run.steps=3"}),
            "no error");
}

TEST_F(JobFileTest, WhatIsNoJobFileIsSaidSo) {
  EXPECT_THAT(ErrorOf("run: [1\n"), HasSubstr("is not YAML"));
  EXPECT_THAT(ErrorOf("run:\n\tsteps: 3\n"), HasSubstr("job.yaml:2: is not"));
  EXPECT_THAT(ErrorOf("just words\n"), HasSubstr("is not a job file"));
  EXPECT_THAT(ErrorOf(""), HasSubstr("it is empty"));
  EXPECT_THAT(ErrorOf("a: 1\n---\nb: 2\n"), HasSubstr("want one YAML map"));
  EXPECT_THAT(ErrorOf("run: 3\n"), HasSubstr("run is a section"));
  EXPECT_THAT(ErrorOfSet({"worker.count"}),
              HasSubstr("want section.key=value"));
  EXPECT_THAT(ErrorOfSet({"worker.count=[1"}), HasSubstr("is not YAML"));
  const absl::Status missing =
      LoadJobFile((folder_ / "none.yaml").string(), {}).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(missing.message()),
              HasSubstr("cannot read the job file: No such file"));
}

}  // namespace
}  // namespace ballast
