// SPDX-License-Identifier: Apache-2.0
// A step without servers: weights from a callback, gradients into memory. For
// tests of the numbers.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/job.h"
#include "kernels/kernels.h"
#include "worker/data/loader.h"
#include "worker/step/step_io.h"

namespace ballast {

// Fills `out` with the fp32 values of a tensor; bf16 copies are made of them.
using TensorValues =
    std::function<void(const TensorSpec& tensor, absl::Span<float> out)>;

// Takes weights from a callback, at once.
class LocalWeights : public WeightSource {
 public:
  LocalWeights(const ModelLayout* layout, Device* device, TensorValues values)
      : layout_(*layout), device_(*device), values_(std::move(values)) {}

  absl::Status Prefetch(uint32_t unit, uint64_t version, StreamMark after,
                        absl::Span<std::byte* const> destination) override;
  absl::Status Wait(uint32_t unit) override;
  void Abandon() override {}
  // Of all fetches so far.
  uint64_t fetched_bytes() const { return fetched_bytes_; }

 private:
  const ModelLayout& layout_;
  Device& device_;
  const TensorValues values_;
  uint64_t fetched_bytes_ = 0;
};

// Keeps every node of every use, and adds them up as servers do.
class LocalGradients : public GradientSink {
 public:
  LocalGradients(const ModelLayout* layout, Device* device, uint32_t total)
      : layout_(*layout), device_(*device), total_(total) {}

  absl::Status Push(const GradientPiece& piece) override;
  uint64_t pushed_bytes() const { return pushed_bytes_; }

  // By tensor name: nodes in tree order, then uses in order. Errors:
  // FAILED_PRECONDITION  a node is missing, or was pushed twice.
  absl::StatusOr<std::map<std::string, std::vector<float>>> Reduce();
  // Errors: as Reduce.
  absl::StatusOr<double> ReduceLoss();

 private:
  const ModelLayout& layout_;
  Device& device_;
  const uint32_t total_;
  uint64_t pushed_bytes_ = 0;
  // By (tensor, use).
  std::map<std::pair<uint32_t, uint32_t>, std::map<Span, std::vector<float>>>
      nodes_;
  std::map<Span, double> losses_;
};

struct LocalResult {
  double loss_sum = 0;  // Over all tokens, in nats.
  std::map<std::string, std::vector<float>> gradients;  // Of that sum.
};

// One whole step of job.batch.micro_batches micro-batches under the budgets of
// `job`, computed as job.worker.count workers would, one after the other.
// Errors: those of the planner and the model family.
absl::StatusOr<LocalResult> RunLocalStep(
    const Job& job,
    const std::function<std::unique_ptr<Kernels>()>& make_kernels,
    absl::Span<const MicroBatch> batches, const TensorValues& values);

}  // namespace ballast
