// SPDX-License-Identifier: Apache-2.0
// A job: everything a run is told, with its defaults. Plain data. The parser
// (common/job_file.h) refuses unknown keys, wrong types and broken relations,
// so whoever holds a Job may rely on what is stated here.
//
// Keys are named as users write them: `Job::worker.memory` is worker.memory.

#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "common/dtype.h"

namespace ballast {

struct RunOptions {
  std::string name = "run";
  std::string dir;     // Default: runs/<name>.
  uint64_t steps = 0;  // The schedule's horizon. At least 1.
  uint64_t seed = 1;
  bool state_hash_every = false;  // run.state_hash: end | every.
};

struct ModelOptions {
  std::string family = "gpt2";
  uint32_t layers = 0;
  uint32_t heads = 0;
  uint32_t width = 0;         // A multiple of heads.
  uint32_t context = 0;       // Tokens in a sequence.
  uint32_t vocabulary = 256;  // Bytes.
  bool tied = true;           // The head is the token embedding.
};

struct DataOptions {
  std::string path;  // A text file, read as bytes.
  // XXH3-128 of the text as hex, or "any". The launcher fills it in, so that a
  // run cannot be continued with a text that has changed meanwhile.
  std::string hash = "any";
  // Tail of the file held out for evaluation. 0 (exclusive) to 0.5.
  double validation_fraction = 0.05;
};

struct BatchOptions {
  uint32_t micro_batches = 0;     // M: pieces of a step's global batch.
  uint32_t micro_batch_size = 0;  // Sequences in a micro-batch.
};

enum class OptimizerKind : uint8_t { kAdamW = 0, kSgd = 1 };

struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kAdamW;  // optimizer.name: adamw | sgd.
  double lr = 1e-3;
  double beta1 = 0.9;  // AdamW only, as are beta2 and epsilon.
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double momentum = 0.9;      // SGD only.
  double weight_decay = 0.1;  // On matrices; never on vectors.
  double clip_norm = 1.0;     // Global norm; 0 turns clipping off.
};

enum class ScheduleKind : uint8_t { kConstant = 0, kCosine = 1 };

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::kCosine;  // schedule.name.
  uint64_t warmup_steps = 0;  // Linear from lr / warmup_steps to lr.
  double min_lr_ratio = 0.1;  // Cosine ends at lr * min_lr_ratio.
};

struct PrecisionOptions {
  DType compute_dtype = DType::kF32;  // Of matrix products and fetched weights.
  DType reduce_dtype = DType::kF32;   // Of gradients; only fp32 for now.
};

struct WorkerOptions {
  uint32_t count = 1;   // At most batch.micro_batches.
  uint64_t memory = 0;  // Device budget in bytes; hard.
  // Budget of everything else that can grow.
  uint64_t host_memory = uint64_t{1} << 30;
  uint32_t threads = 0;   // 0: this machine's cores / worker.count.
  uint32_t prefetch = 1;  // Units fetched ahead. 0 to 4.
};

enum class Durability : uint8_t { kCheckpoint = 0, kStep = 1, kReplica = 2 };

struct ServerOptions {
  uint32_t count = 1;
  uint64_t memory = 0;  // Budget of one process in bytes; hard.
  Durability durability = Durability::kStep;
  // Gradient log of one server under step and replica; 0: as much as four
  // steps need, at least 256 MiB. Bounds what a recovery replays.
  uint64_t log_limit = 0;
  uint64_t chunk_elems = 1 << 20;  // Longest chunk.
  std::string data_dir;            // Default: <run.dir>/servers.
};

struct CheckpointOptions {
  uint64_t every = 0;  // Steps; 0: only at the end.
  uint32_t keep = 2;   // Newest kept; at least 1.
};

struct EvalOptions {
  uint64_t every = 0;          // Steps; 0: only at the end.
  uint32_t micro_batches = 8;  // Held-out micro-batches of one evaluation.
};

struct ClusterOptions {
  std::string host = "127.0.0.1";
  uint32_t port = 7400;  // Of the coordinator; 0: chosen by the system.
  // A member that is silent for this long is taken for dead.
  absl::Duration lease = absl::Seconds(3);
  // So is one that has its inputs, owes something and gets no further; longer
  // where its own units take longer.
  absl::Duration progress_limit = absl::Seconds(3);
  // A run that does not progress for this long though everyone is in ends with
  // a named error.
  absl::Duration progress_timeout = absl::Seconds(60);
  // The longest wait for a member that nobody can replace (a server, the last
  // worker, the coordinator); then the run ends, resumable.
  absl::Duration give_up_after = absl::Minutes(10);
  // A member that leaves on request may take this long.
  absl::Duration drain_timeout = absl::Seconds(30);
  uint32_t min_workers = 1;  // Fewer: the run waits.
  uint32_t max_workers = 0;  // 0: batch.micro_batches.
  // Deaths of one member without a committed step in between that end the run.
  uint32_t restarts_max = 5;
  uint32_t skip_max = 10;  // Skipped steps in a row that end the run.
};

struct Job {
  RunOptions run;
  ModelOptions model;
  DataOptions data;
  BatchOptions batch;
  OptimizerOptions optimizer;
  ScheduleOptions schedule;
  PrecisionOptions precision;
  WorkerOptions worker;
  ServerOptions server;
  CheckpointOptions checkpoint;
  EvalOptions eval;
  ClusterOptions cluster;

  uint64_t tokens_per_step() const {
    return uint64_t{batch.micro_batches} * batch.micro_batch_size *
           model.context;
  }
};

}  // namespace ballast
