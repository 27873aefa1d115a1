// SPDX-License-Identifier: Apache-2.0
#include "common/job_keys.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/layout.h"
#include "common/units.h"

namespace ballast {
namespace {

constexpr KeyGroup kNumerics = KeyGroup::kNumerics;
constexpr KeyGroup kOperations = KeyGroup::kOperations;

// Shortest text that reads back to the same double.
std::string DoubleText(double value) {
  std::array<char, 32> buffer = {};
  const auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return std::string(buffer.data(), end.ptr);
}

// Exact, in the largest unit that divides the size.
std::string BytesText(uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"", "KiB", "MiB", "GiB",
                                                 "TiB"};
  size_t unit = 0;
  while (bytes != 0 && bytes % 1024 == 0 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrCat(bytes, kUnits[unit]);
}

absl::Status Unwanted(const std::string& text, absl::string_view wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("is `", text, "`; want ", wanted));
}

std::string Always(const Job&) { return ""; }

JobKey Key(absl::string_view name, KeyGroup group) {
  JobKey key;
  key.name = std::string(name);
  key.group = group;
  key.idle = Always;
  return key;
}

// In each of these `field` is a generic lambda from a job to the field, so that
// one expression serves reading and writing.
template <typename Field>
JobKey Count(absl::string_view name, KeyGroup group, Field field, uint64_t low,
             uint64_t high) {
  JobKey key = Key(name, group);
  key.parse = [field, low, high](const std::string& text, Job* job) {
    uint64_t value = 0;
    if (!absl::SimpleAtoi(text, &value) || value < low || value > high) {
      return Unwanted(
          text, high == std::numeric_limits<uint64_t>::max()
                    ? absl::StrCat("a whole number from ", low)
                    : absl::StrCat("a whole number from ", low, " to ", high));
    }
    auto& target = field(*job);
    target = static_cast<std::decay_t<decltype(target)>>(value);
    return absl::OkStatus();
  };
  key.print = [field](const Job& job) { return absl::StrCat(field(job)); };
  return key;
}

// A finite number for which `fits` holds; `wanted` says so in words.
template <typename Field>
JobKey Real(absl::string_view name, Field field, bool (*fits)(double),
            const char* wanted) {
  JobKey key = Key(name, kNumerics);
  key.parse = [field, fits, wanted](const std::string& text, Job* job) {
    double value = 0;
    if (!absl::SimpleAtod(text, &value) || !std::isfinite(value) ||
        !fits(value)) {
      return Unwanted(text, wanted);
    }
    field(*job) = value;
    return absl::OkStatus();
  };
  key.print = [field](const Job& job) { return DoubleText(field(job)); };
  return key;
}

template <typename Field>
JobKey Bytes(absl::string_view name, Field field) {
  JobKey key = Key(name, kOperations);
  key.parse = [field](const std::string& text, Job* job) {
    const absl::StatusOr<uint64_t> bytes = ParseBytes(text);
    if (!bytes.ok() || *bytes == 0) {
      return Unwanted(text, "a size above 0, such as 64MiB");
    }
    field(*job) = *bytes;
    return absl::OkStatus();
  };
  key.print = [field](const Job& job) { return BytesText(field(job)); };
  return key;
}

// 0 stands for a size that is chosen for the job.
template <typename Field>
JobKey BytesOrChosen(absl::string_view name, Field field) {
  JobKey key = Bytes(name, field);
  key.parse = [field](const std::string& text, Job* job) {
    const absl::StatusOr<uint64_t> bytes = ParseBytes(text);
    if (!bytes.ok()) {
      return Unwanted(text, "a size such as 64MiB, or 0 for one that fits");
    }
    field(*job) = *bytes;
    return absl::OkStatus();
  };
  return key;
}

template <typename Field>
JobKey Time(absl::string_view name, Field field, absl::Duration low,
            absl::Duration high) {
  JobKey key = Key(name, kOperations);
  key.parse = [field, low, high](const std::string& text, Job* job) {
    absl::Duration value;
    if (!absl::ParseDuration(text, &value) || value < low || value > high) {
      return Unwanted(
          text,
          absl::StrCat("a time from ", absl::FormatDuration(low), " to ",
                       absl::FormatDuration(high), ", such as 5s or 1m30s"));
    }
    field(*job) = value;
    return absl::OkStatus();
  };
  key.print = [field](const Job& job) {
    return absl::FormatDuration(field(job));
  };
  return key;
}

template <typename Field>
JobKey Text(absl::string_view name, KeyGroup group, Field field) {
  JobKey key = Key(name, group);
  key.parse = [field](const std::string& text, Job* job) {
    if (text.empty()) return Unwanted(text, "some text");
    field(*job) = text;
    return absl::OkStatus();
  };
  key.print = [field](const Job& job) { return std::string(field(job)); };
  return key;
}

// A name or an IPv4 address: "host:port" must have one colon, and a number
// alone is an address to some resolvers and a name to others.
bool IsHost(const std::string& text) {
  const auto allowed = [](char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '-' || c == '_';
  };
  const auto names = [](char c) { return absl::ascii_isalpha(c); };
  if (text.empty() || !std::all_of(text.begin(), text.end(), allowed)) {
    return false;
  }
  const std::vector<std::string> parts = absl::StrSplit(text, '.');
  return std::any_of(text.begin(), text.end(), names) ||
         (parts.size() == 4 &&
          std::all_of(parts.begin(), parts.end(), [](const auto& part) {
            uint32_t number = 0;
            return absl::SimpleAtoi(part, &number) && number <= 255;
          }));
}

template <typename Field>
JobKey Host(absl::string_view name, KeyGroup group, Field field) {
  JobKey key = Text(name, group, field);
  key.parse = [field](const std::string& text, Job* job) {
    if (!IsHost(text)) {
      return Unwanted(text, "a host's name or IPv4 address, such as 127.0.0.1");
    }
    field(*job) = text;
    return absl::OkStatus();
  };
  return key;
}

template <typename T>
using Choices = std::vector<std::pair<const char*, T>>;

template <typename T, typename Field>
JobKey OneOf(absl::string_view name, KeyGroup group, Field field,
             Choices<T> choices) {
  JobKey key = Key(name, group);
  key.parse = [field, choices](const std::string& text, Job* job) {
    for (const auto& [word, value] : choices) {
      if (text == word) {
        field(*job) = value;
        return absl::OkStatus();
      }
    }
    return Unwanted(
        text, absl::StrJoin(choices, " or ", [](std::string* out, auto& pair) {
          absl::StrAppend(out, pair.first);
        }));
  };
  key.print = [field, choices](const Job& job) {
    for (const auto& [word, value] : choices) {
      if (field(job) == value) return std::string(word);
    }
    return std::string();
  };
  return key;
}

// Refuses, by name, values of a key that are planned and not built.
JobKey NotBuilt(JobKey key, const std::vector<std::string>& values,
                const std::string& instead) {
  key.parse = [parse = key.parse, values, instead](const std::string& text,
                                                   Job* job) {
    for (const std::string& value : values) {
      if (text == value) {
        return absl::InvalidArgumentError(absl::StrCat(
            "is `", text, "`, which is not built yet; use ", instead));
      }
    }
    return parse(text, job);
  };
  return key;
}

JobKey Required(JobKey key) {
  key.required = true;
  return key;
}

JobKey IdleWhen(JobKey key, std::function<std::string(const Job&)> idle) {
  key.idle = std::move(idle);
  return key;
}

std::string IdleWithSgd(const Job& job) {
  return job.optimizer.kind == OptimizerKind::kSgd
             ? "has no effect: optimizer.name is sgd; remove the key, or set "
               "optimizer.name: adamw"
             : "";
}

std::string IdleWithAdamW(const Job& job) {
  return job.optimizer.kind == OptimizerKind::kAdamW
             ? "has no effect: optimizer.name is adamw; remove the key, or set "
               "optimizer.name: sgd"
             : "";
}

std::string IdleWhenConstant(const Job& job) {
  return job.schedule.kind == ScheduleKind::kConstant
             ? "has no effect: schedule.name is constant; remove the key, or "
               "set schedule.name: cosine"
             : "";
}

// A name becomes part of paths.
JobKey RunName() {
  JobKey key = Text(
      "run.name", kOperations, [](auto& job) -> auto& { return job.run.name; });
  key.parse = [](const std::string& text, Job* job) {
    constexpr absl::string_view kAllowed =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    if (text.empty() || text.size() > 64 || text[0] == '.' ||
        absl::string_view(text).find_first_not_of(kAllowed) !=
            absl::string_view::npos) {
      return Unwanted(text,
                      "1 to 64 letters, digits, `.`, `_` or `-`, not starting "
                      "with `.`");
    }
    job->run.name = text;
    return absl::OkStatus();
  };
  return key;
}

// 32 hex digits, or any.
JobKey TextHash() {
  JobKey key = Text(
      "data.hash", kNumerics, [](auto& job) -> auto& { return job.data.hash; });
  key.parse = [](const std::string& text, Job* job) {
    const bool hex =
        text.size() == 32 && absl::string_view(text).find_first_not_of(
                                 "0123456789abcdef") == std::string::npos;
    if (text != "any" && !hex) {
      return Unwanted(text, "`any` or 32 hex digits");
    }
    job->data.hash = text;
    return absl::OkStatus();
  };
  return key;
}

using Table = std::vector<JobKey>;

// The address of a field, for reading and for writing.
// NOLINTBEGIN(bugprone-macro-parentheses): `path` follows a dot.
#define BALLAST_FIELD(path) \
  [](auto& job) -> auto& { return job.path; }
// NOLINTEND(bugprone-macro-parentheses)

void AddRunModelData(Table* table) {
  table->push_back(RunName());
  table->push_back(Text("run.dir", kOperations, BALLAST_FIELD(run.dir)));
  table->push_back(Required(Count("run.steps", kNumerics,
                                  BALLAST_FIELD(run.steps), 1, 1'000'000'000)));
  table->push_back(Count("run.seed", kNumerics, BALLAST_FIELD(run.seed), 0,
                         std::numeric_limits<uint64_t>::max()));
  table->push_back(OneOf<bool>("run.state_hash", kOperations,
                               BALLAST_FIELD(run.state_hash_every),
                               {{"end", false}, {"every", true}}));

  table->push_back(OneOf<std::string>("model.family", kNumerics,
                                      BALLAST_FIELD(model.family),
                                      {{"gpt2", "gpt2"}}));
  table->push_back(Required(
      Count("model.layers", kNumerics, BALLAST_FIELD(model.layers), 1, 4096)));
  table->push_back(Required(
      Count("model.heads", kNumerics, BALLAST_FIELD(model.heads), 1, 1024)));
  table->push_back(Required(
      Count("model.width", kNumerics, BALLAST_FIELD(model.width), 1, 65536)));
  table->push_back(Required(Count("model.context", kNumerics,
                                  BALLAST_FIELD(model.context), 1, 1 << 20)));
  // A token is a byte, so a smaller vocabulary could not name every token.
  table->push_back(Count("model.vocabulary", kNumerics,
                         BALLAST_FIELD(model.vocabulary), 256, 1 << 20));
  table->push_back(OneOf<bool>("model.tied", kNumerics,
                               BALLAST_FIELD(model.tied),
                               {{"true", true}, {"false", false}}));

  table->push_back(
      Required(Text("data.path", kNumerics, BALLAST_FIELD(data.path))));
  table->push_back(TextHash());
  table->push_back(Real(
      "data.validation_fraction", BALLAST_FIELD(data.validation_fraction),
      [](double value) { return value > 0 && value <= 0.5; },
      "a number above 0, at most 0.5"));

  table->push_back(
      Required(Count("batch.micro_batches", kNumerics,
                     BALLAST_FIELD(batch.micro_batches), 1, 65536)));
  table->push_back(
      Required(Count("batch.micro_batch_size", kNumerics,
                     BALLAST_FIELD(batch.micro_batch_size), 1, 65536)));
}

void AddOptimizerSchedulePrecision(Table* table) {
  const auto positive = [](double value) { return value > 0; };
  const auto not_negative = [](double value) { return value >= 0; };
  const auto below_one = [](double value) { return value >= 0 && value < 1; };
  table->push_back(OneOf<OptimizerKind>(
      "optimizer.name", kNumerics, BALLAST_FIELD(optimizer.kind),
      {{"adamw", OptimizerKind::kAdamW}, {"sgd", OptimizerKind::kSgd}}));
  table->push_back(Real("optimizer.lr", BALLAST_FIELD(optimizer.lr), positive,
                        "a number above 0"));
  table->push_back(
      IdleWhen(Real("optimizer.beta1", BALLAST_FIELD(optimizer.beta1),
                    below_one, "a number from 0, below 1"),
               IdleWithSgd));
  table->push_back(
      IdleWhen(Real("optimizer.beta2", BALLAST_FIELD(optimizer.beta2),
                    below_one, "a number from 0, below 1"),
               IdleWithSgd));
  table->push_back(
      IdleWhen(Real("optimizer.epsilon", BALLAST_FIELD(optimizer.epsilon),
                    positive, "a number above 0"),
               IdleWithSgd));
  table->push_back(
      IdleWhen(Real("optimizer.momentum", BALLAST_FIELD(optimizer.momentum),
                    below_one, "a number from 0, below 1"),
               IdleWithAdamW));
  table->push_back(Real("optimizer.weight_decay",
                        BALLAST_FIELD(optimizer.weight_decay), not_negative,
                        "a number from 0"));
  table->push_back(Real("optimizer.clip_norm",
                        BALLAST_FIELD(optimizer.clip_norm), not_negative,
                        "a number from 0 (0 turns clipping off)"));

  table->push_back(OneOf<ScheduleKind>("schedule.name", kNumerics,
                                       BALLAST_FIELD(schedule.kind),
                                       {{"constant", ScheduleKind::kConstant},
                                        {"cosine", ScheduleKind::kCosine}}));
  table->push_back(Count("schedule.warmup_steps", kNumerics,
                         BALLAST_FIELD(schedule.warmup_steps), 0,
                         1'000'000'000));
  table->push_back(IdleWhen(
      Real(
          "schedule.min_lr_ratio", BALLAST_FIELD(schedule.min_lr_ratio),
          [](double value) { return value >= 0 && value <= 1; },
          "a number from 0 to 1"),
      IdleWhenConstant));

  const Choices<DType> dtypes = {{"fp32", DType::kF32}, {"bf16", DType::kBF16}};
  table->push_back(OneOf<DType>("precision.compute_dtype", kNumerics,
                                BALLAST_FIELD(precision.compute_dtype),
                                dtypes));
  table->push_back(
      NotBuilt(OneOf<DType>("precision.reduce_dtype", kNumerics,
                            BALLAST_FIELD(precision.reduce_dtype), dtypes),
               {"bf16"}, "precision.reduce_dtype: fp32"));
}

void AddOperations(Table* table) {
  table->push_back(Count("worker.count", kOperations,
                         BALLAST_FIELD(worker.count), 1, 65536));
  table->push_back(
      Required(Bytes("worker.memory", BALLAST_FIELD(worker.memory))));
  table->push_back(
      Bytes("worker.host_memory", BALLAST_FIELD(worker.host_memory)));
  table->push_back(Count("worker.threads", kOperations,
                         BALLAST_FIELD(worker.threads), 0, 1024));
  table->push_back(Count("worker.prefetch", kOperations,
                         BALLAST_FIELD(worker.prefetch), 0, 4));

  table->push_back(Count("server.count", kOperations,
                         BALLAST_FIELD(server.count), 1, 65536));
  table->push_back(
      Required(Bytes("server.memory", BALLAST_FIELD(server.memory))));
  table->push_back(
      NotBuilt(OneOf<Durability>("server.durability", kOperations,
                                 BALLAST_FIELD(server.durability),
                                 {{"checkpoint", Durability::kCheckpoint},
                                  {"step", Durability::kStep}}),
               {"replica"}, "server.durability: step"));
  table->push_back(
      BytesOrChosen("server.log_limit", BALLAST_FIELD(server.log_limit)));
  // The block is the least that a chunk can be.
  table->push_back(Count("server.chunk_elems", kOperations,
                         BALLAST_FIELD(server.chunk_elems), kBlockElems,
                         uint64_t{1} << 28));
  table->push_back(
      Text("server.data_dir", kOperations, BALLAST_FIELD(server.data_dir)));

  table->push_back(Count("checkpoint.every", kOperations,
                         BALLAST_FIELD(checkpoint.every), 0, 1'000'000'000));
  table->push_back(Count("checkpoint.keep", kOperations,
                         BALLAST_FIELD(checkpoint.keep), 1, 10000));
  table->push_back(Count("eval.every", kOperations, BALLAST_FIELD(eval.every),
                         0, 1'000'000'000));
  table->push_back(Count("eval.micro_batches", kOperations,
                         BALLAST_FIELD(eval.micro_batches), 1, 65536));

  table->push_back(
      Host("cluster.host", kOperations, BALLAST_FIELD(cluster.host)));
  table->push_back(Count("cluster.port", kOperations,
                         BALLAST_FIELD(cluster.port), 0, 65535));
  table->push_back(Time("cluster.lease", BALLAST_FIELD(cluster.lease),
                        absl::Milliseconds(100), absl::Hours(1)));
  table->push_back(Time("cluster.progress_limit",
                        BALLAST_FIELD(cluster.progress_limit),
                        absl::Milliseconds(100), absl::Hours(1)));
  table->push_back(Time("cluster.progress_timeout",
                        BALLAST_FIELD(cluster.progress_timeout),
                        absl::Seconds(1), absl::Hours(24)));
  table->push_back(Time("cluster.give_up_after",
                        BALLAST_FIELD(cluster.give_up_after), absl::Seconds(1),
                        absl::Hours(24 * 7)));
  table->push_back(Time("cluster.drain_timeout",
                        BALLAST_FIELD(cluster.drain_timeout), absl::Seconds(1),
                        absl::Hours(24)));
  table->push_back(Count("cluster.min_workers", kOperations,
                         BALLAST_FIELD(cluster.min_workers), 1, 65536));
  table->push_back(Count("cluster.max_workers", kOperations,
                         BALLAST_FIELD(cluster.max_workers), 0, 65536));
  table->push_back(Count("cluster.restarts_max", kOperations,
                         BALLAST_FIELD(cluster.restarts_max), 0, 1'000'000));
  table->push_back(Count("cluster.skip_max", kOperations,
                         BALLAST_FIELD(cluster.skip_max), 1, 1'000'000));
}

#undef BALLAST_FIELD

}  // namespace

std::vector<JobKey> JobKeys() {
  Table table;
  AddRunModelData(&table);
  AddOptimizerSchedulePrecision(&table);
  AddOperations(&table);
  return table;
}

namespace {

// A wait that is longer than the one that waits for it is never heard of.
BrokenRelation NotShorter(absl::string_view key, absl::Duration value,
                          absl::string_view than, absl::Duration longer) {
  if (value < longer) {
    return {};
  }
  return {std::string(key), absl::StrCat("is ", absl::FormatDuration(value),
                                         ", not shorter than ", than, " = ",
                                         absl::FormatDuration(longer),
                                         ", which would run out first; lower ",
                                         key, " or raise ", than)};
}

BrokenRelation FindBrokenCluster(const Job& job) {
  const ClusterOptions& cluster = job.cluster;
  for (const BrokenRelation& broken :
       {NotShorter("cluster.lease", cluster.lease, "cluster.progress_timeout",
                   cluster.progress_timeout),
        NotShorter("cluster.progress_limit", cluster.progress_limit,
                   "cluster.progress_timeout", cluster.progress_timeout),
        NotShorter("cluster.lease", cluster.lease, "cluster.give_up_after",
                   cluster.give_up_after),
        NotShorter("cluster.progress_limit", cluster.progress_limit,
                   "cluster.give_up_after", cluster.give_up_after)}) {
    if (!broken.key.empty()) {
      return broken;
    }
  }
  const uint32_t workers_max =
      cluster.max_workers == 0 ? job.batch.micro_batches : cluster.max_workers;
  if (workers_max > job.batch.micro_batches) {
    return {"cluster.max_workers",
            absl::StrCat(
                "is ", workers_max,
                ", more than batch.micro_batches = ", job.batch.micro_batches,
                "; some would have no work, want at most that")};
  }
  if (job.worker.count > workers_max) {
    return {"worker.count",
            absl::StrCat("is ", job.worker.count,
                         ", more than cluster.max_workers = ", workers_max)};
  }
  if (cluster.min_workers > job.worker.count) {
    return {"cluster.min_workers",
            absl::StrCat("is ", cluster.min_workers,
                         ", more than worker.count = ", job.worker.count,
                         ", so the run would never begin")};
  }
  return {};
}

}  // namespace

BrokenRelation FindBrokenRelation(const Job& job) {
  if (job.model.width % job.model.heads != 0) {
    return {
        "model.width",
        absl::StrCat("is ", job.model.width,
                     ", which model.heads = ", job.model.heads,
                     " does not divide; want a multiple of ", job.model.heads)};
  }
  if (job.worker.count > job.batch.micro_batches) {
    return {
        "worker.count",
        absl::StrCat(
            "is ", job.worker.count,
            ", more than batch.micro_batches = ", job.batch.micro_batches,
            ", so some would have no work; want at most ",
            job.batch.micro_batches, ", or more and smaller micro-batches")};
  }
  if (job.schedule.warmup_steps > job.run.steps) {
    return {"schedule.warmup_steps",
            absl::StrCat("is ", job.schedule.warmup_steps,
                         ", more than run.steps = ", job.run.steps,
                         "; want at most ", job.run.steps)};
  }
  return FindBrokenCluster(job);
}

}  // namespace ballast
