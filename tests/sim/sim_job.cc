// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_job.h"

#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "kernels/update.h"
#include "offload/residency.h"
#include "storage/gradient_log.h"
#include "storage/record.h"
#include "tests/sim/random.h"

namespace ballast::sim {
namespace {

TensorSpec Tensor(const std::string& name, std::vector<uint64_t> shape,
                  DType served) {
  TensorSpec tensor;
  tensor.name = name;
  tensor.init = shape.size() == 2 ? Init::kNormal : Init::kOnes;
  tensor.init_std = 0.05;
  tensor.decay = shape.size() == 2;
  tensor.shape = std::move(shape);
  tensor.served = served;
  return tensor;
}

ModelLayout MakeLayout(DType served, Random* random) {
  const uint64_t width = 8 * random->Between(1, 3);
  ModelLayout layout;
  TensorSpec embedding = Tensor("wte", {random->Between(9, 21), width}, served);
  embedding.by_rows = true;
  embedding.use_count = 2;
  layout.tensors.push_back(embedding);
  TensorSpec positions = Tensor("wpe", {random->Between(3, 9), width}, served);
  positions.by_rows = true;
  layout.tensors.push_back(positions);
  layout.units.push_back({"embed", {{0, 0}, {1, 0}}});
  const uint64_t layers = random->Between(1, 2);
  for (uint64_t layer = 0; layer < layers; ++layer) {
    const std::string name = absl::StrCat("h.", layer);
    const auto first = static_cast<uint32_t>(layout.tensors.size());
    layout.tensors.push_back(
        Tensor(name + ".weight", {width, random->Between(5, 14)}, served));
    layout.tensors.push_back(Tensor(name + ".bias", {width}, served));
    layout.units.push_back({name, {{first, 0}, {first + 1, 0}}});
  }
  const auto norm = static_cast<uint32_t>(layout.tensors.size());
  layout.tensors.push_back(Tensor("ln_f", {width}, served));
  layout.units.push_back({"head", {{norm, 0}, {0, 1}}});
  return layout;
}

// What one server that holds every chunk wants at least.
struct Smallest {
  uint64_t memory = 0;
  uint64_t log = 0;
};

Smallest SmallestBudgets(const SimJob& sim) {
  absl::StatusOr<ChunkTable> table =
      ChunkTable::Build(sim.layout, sim.job.server.chunk_elems);
  BALLAST_CHECK(table.ok());
  uint64_t step_bytes = 16 << 10;  // With the vote's mark.
  ResidencyRequest request;
  request.budget_bytes = uint64_t{1} << 30;
  request.workers = 3;       // At most, in a later part of the run too.
  request.copy_sources = 4;  // Servers come and go.
  for (const Chunk& chunk : table->chunks()) {
    const TensorSpec& tensor = table->tensor_of(chunk.id);
    const RecordLayout layout =
        RecordLayout::For(tensor, chunk, sim.job.optimizer.kind);
    request.chunks.push_back({layout.total_bytes, layout.prefix_bytes,
                              chunk.elem_count() * sizeof(float),
                              tensor.use_count});
    if (request.chunks.back().record_bytes > request.largest.record_bytes) {
      request.largest = request.chunks.back();
    }
    step_bytes += LogRecordBytes(chunk.elem_count() * sizeof(float)) + 32;
  }
  const absl::StatusOr<ResidencyPlan> plan = PlanResidency(request);
  BALLAST_CHECK(plan.ok());
  // Two steps and a segment.
  return {plan->smallest_budget_bytes, 2 * step_bytes + (64 << 10)};
}

// In (-1, 1), never 0.
float Signed(uint64_t bits) {
  const float magnitude = (static_cast<float>(bits >> 41) + 0.5f) * 0x1p-23f;
  return (bits & 1) != 0 ? magnitude : -magnitude;
}

uint64_t Name(const SimJob& job, uint64_t step, uint32_t micro_batch,
              uint64_t what) {
  return Mix(job.gradient_seed ^ Mix(step ^ Mix(micro_batch ^ Mix(what))));
}

}  // namespace

SimJob MakeSimJob(uint64_t seed) {
  Random random = Random(seed).Fork(2);
  SimJob sim;
  sim.gradient_seed = random.Next();
  Job& job = sim.job;
  job.run.name = "sim";
  job.run.dir = "/run";
  job.run.steps = random.Between(6, 14);
  job.run.seed = random.Next();
  job.run.state_hash_every = random.Chance(0.3);
  job.model.context = 4;
  job.batch.micro_batches = static_cast<uint32_t>(random.Between(3, 8));
  job.batch.micro_batch_size = 2;
  job.optimizer.kind =
      random.Chance(0.7) ? OptimizerKind::kAdamW : OptimizerKind::kSgd;
  job.optimizer.clip_norm = random.Chance(0.7) ? 0.05 : 0.0;
  job.schedule.warmup_steps = random.Below(4);
  job.precision.compute_dtype = random.Chance(0.4) ? DType::kBF16 : DType::kF32;
  job.worker.count = static_cast<uint32_t>(random.Between(1, 3));
  job.server.count = static_cast<uint32_t>(random.Between(1, 3));
  job.server.chunk_elems = 64 * random.Between(1, 3);
  job.server.data_dir = "/data";
  job.server.durability =
      random.Chance(0.7) ? Durability::kStep : Durability::kCheckpoint;
  if (job.server.count > 1 && random.Chance(0.2)) {
    job.server.durability = Durability::kReplica;
  }
  job.checkpoint.every = random.Chance(0.8) ? random.Between(2, 4) : 0;
  job.checkpoint.keep = static_cast<uint32_t>(random.Between(1, 3));
  job.eval.every = random.Chance(0.5) ? random.Between(2, 5) : 0;
  job.eval.micro_batches =
      random.Chance(0.2) ? 0 : static_cast<uint32_t>(random.Between(1, 6));
  job.cluster.skip_max = 4;
  job.cluster.give_up_after = absl::Seconds(60);
  sim.layout = MakeLayout(job.precision.compute_dtype, &random);
  // From hardly enough, where everything streams and spills, to plenty.
  const Smallest smallest = SmallestBudgets(sim);
  job.server.log_limit =
      random.Chance(0.8) ? smallest.log + random.Below(200 << 10) : 0;
  job.server.memory = smallest.memory;
  job.server.memory +=
      random.Chance(0.2) ? uint64_t{64} << 20 : 4096 * random.Below(24);
  for (uint64_t step = 1; step <= job.run.steps; ++step) {
    if (random.Chance(0.04)) {
      sim.poisoned.insert(step);
    }
  }
  return sim;
}

Hash128 HashOf(const Weights& weights) {
  std::string all;
  for (const std::vector<std::byte>& tensor : weights) {
    const Hash128 hash = HashBytes(tensor.data(), tensor.size());
    all.append(HashHex(hash));
  }
  return HashBytes(all);
}

double LossOf(const SimJob& job, uint64_t step, uint32_t micro_batch, bool eval,
              const Hash128& weights) {
  const uint64_t bits =
      Mix(Name(job, step, micro_batch, eval ? 1 : 2) ^ weights.low);
  return 1.0 + static_cast<double>(bits >> 11) * 0x1p-53;
}

double LossOfNode(const SimJob& job, uint64_t step, const Span& node,
                  const Hash128& weights) {
  if (node.count == 1) {
    return LossOf(job, step, node.first, /*eval=*/false, weights);
  }
  return LossOfNode(job, step, LeftChild(node), weights) +
         LossOfNode(job, step, RightChild(node), weights);
}

void GradientOf(const SimJob& job, uint64_t step, uint32_t micro_batch,
                const TensorUse& use, absl::Span<const std::byte> served,
                absl::Span<float> out) {
  const DType dtype = job.layout.tensors[use.tensor].served;
  const uint64_t bytes = DTypeBytes(dtype);
  BALLAST_CHECK(served.size() == out.size() * bytes);
  const uint64_t name =
      Name(job, step, micro_batch, 16 + use.tensor * 8 + use.use);
  for (size_t i = 0; i < out.size(); ++i) {
    uint32_t weight = 0;
    std::memcpy(&weight, served.data() + i * bytes, bytes);
    out[i] = Signed(Mix(name ^ Mix(weight ^ (uint64_t{i} << 32))));
  }
  const bool poison = job.poisoned.contains(step) && micro_batch == 1 &&
                      use.tensor == step % job.layout.tensors.size();
  if (poison) {
    out[0] = std::numeric_limits<float>::infinity();
  }
}

std::vector<float> GradientOfNode(const SimJob& job, uint64_t step,
                                  const Span& node, const TensorUse& use,
                                  absl::Span<const std::byte> served) {
  if (node.count > 1) {
    std::vector<float> sum =
        GradientOfNode(job, step, LeftChild(node), use, served);
    const std::vector<float> right =
        GradientOfNode(job, step, RightChild(node), use, served);
    AccumulateCpu(right, absl::MakeSpan(sum));
    return sum;
  }
  std::vector<float> leaf(job.layout.tensors[use.tensor].elem_count());
  GradientOf(job, step, node.first, use, served, absl::MakeSpan(leaf));
  return leaf;
}

}  // namespace ballast::sim
