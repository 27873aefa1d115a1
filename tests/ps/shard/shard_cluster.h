// SPDX-License-Identifier: Apache-2.0
// Real shard servers on loopback under a fake coordinator, a small model with
// everything that makes chunks differ (rows, ties, vectors, several blocks),
// and the same training computed plainly.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "common/job.h"
#include "common/layout.h"
#include "rpc/bulk_message.h"
#include "rpc/raw_stream.h"
#include "storage/record.h"
#include "tests/ps/shard/fake_coordinator.h"

namespace ballast::testing {

inline constexpr uint32_t kMicroBatches = 6;
inline constexpr uint64_t kFirstWorker = 100;  // Incarnations of workers.

ModelLayout SmallLayout(DType served);

// Whole tensors of one field.
using Tensors = std::vector<std::vector<float>>;

// The gradient of a node of the span tree, summed as a worker would.
std::vector<float> NodeGradient(const TensorSpec& tensor, uint32_t index,
                                uint64_t step, uint32_t use, const Span& span);

// The training, without servers.
class PlainTraining {
 public:
  PlainTraining(const Job& job, const ModelLayout& layout);
  // Of the step's whole gradient, as a vote encodes it.
  std::string SumSquares(uint64_t step) const;
  // Applies the step's whole gradient.
  void Step(const v1::Decision& decision);
  // exp_avg and exp_avg_sq are `slots`[0] and [1].
  const Tensors& param() const { return param_; }
  const Tensors& slot(int index) const { return slots_[index]; }

 private:
  std::vector<float> Gradient(uint32_t tensor, uint64_t step) const;

  const Job job_;
  const ModelLayout layout_;
  Tensors param_;
  Tensors slots_[2];
};

struct ClusterOptions {
  uint32_t servers = 1;
  uint64_t memory = 64 << 20;  // server.memory; 0: the smallest that works.
  uint64_t chunk_elems = 1 << 20;
  DType served = DType::kF32;
  uint32_t workers = 3;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  std::string data_root;  // <root>/server-N.
};

class ShardCluster {
 public:
  explicit ShardCluster(const ClusterOptions& options);
  ~ShardCluster();  // Tells the servers to leave.

  const Job& job() const { return job_; }
  const ChunkTable& table() const { return *table_; }
  FakeCoordinator& coordinator() { return coordinator_; }
  uint32_t servers() const { return options_.servers; }
  uint32_t OwnerOf(uint32_t chunk) const { return chunk % options_.servers; }
  const std::string& address(uint32_t server) const {
    return addresses_[server];
  }
  std::string data_dir(uint32_t server) const;

  // Loads version `step` (from a manifest unless empty).
  void Load(uint64_t step, const std::string& manifest);
  // Servers collect `step`, with what was decided before.
  void Collect(uint64_t step, const std::vector<v1::Decision>& decisions);
  // Every worker pushes its spans, some of them twice, all at the same time.
  void PushAll(uint64_t step);
  // The servers' votes for the step, added.
  v1::Vote WaitForVotes(uint64_t step);
  v1::Decision Decide(const v1::Vote& vote, bool checkpoint);
  void WaitForConfirms(uint64_t step);
  std::vector<v1::CheckpointSaved> WaitForCheckpoints(uint64_t step);
  // The hash of version `step`, from the servers' digests.
  Hash128 StateHashOf(uint64_t step);
  // Stats of the last report of a server.
  v1::MemberStats Leave(uint32_t server);

  // All of a field at `version`, as a worker (kServedField) or a tool.
  absl::StatusOr<Tensors> Fetch(uint64_t version, uint8_t field);
  std::unique_ptr<RawStream> Open(uint32_t server, const char* method);
  BulkHeader Header(BulkKind kind, uint64_t step) const;

 private:
  void RunDirective(const std::string& name, v1::ServerDirective* directive);
  void PushWorker(uint32_t worker, uint64_t step);

  const ClusterOptions options_;
  Job job_;
  ModelLayout layout_;
  std::unique_ptr<ChunkTable> table_;
  FakeCoordinator coordinator_;
  std::vector<std::string> addresses_;
  std::vector<std::thread> threads_;
  std::vector<bool> left_;
  v1::ServerDirective last_;
};

}  // namespace ballast::testing
