// SPDX-License-Identifier: Apache-2.0
#include "offload/device.h"

#include <cstring>
#include <string>
#include <utility>

#include "common/status_macros.h"

namespace ballast {
namespace {

constexpr char kBudgetKey[] = "worker.memory";

// Answers the questions about scratch and computes nothing.
class PlanningKernels : public Kernels {
 public:
  explicit PlanningKernels(Kernels* real) : real_(real) {}

  std::string Identity() const override { return real_->Identity(); }
  uint64_t LinearScratchBytes(const LinearShape& shape) override {
    return real_->LinearScratchBytes(shape);
  }
  void Linear(const LinearShape&, const float*, const void*, const float*,
              float*, void*) override {}
  uint64_t LinearGradInputScratchBytes(const LinearShape& shape) override {
    return real_->LinearGradInputScratchBytes(shape);
  }
  void LinearGradInput(const LinearShape&, const float*, const void*, float*,
                       void*) override {}
  uint64_t LinearGradWeightScratchBytes(const LinearShape& shape) override {
    return real_->LinearGradWeightScratchBytes(shape);
  }
  void LinearGradWeight(const LinearShape&, const float*, const float*, float*,
                        float*, void*) override {}
  void LayerNorm(uint64_t, uint64_t, float, const float*, const float*,
                 const float*, float*, float*, float*) override {}
  uint64_t LayerNormGradScratchBytes(uint64_t rows, uint64_t width) override {
    return real_->LayerNormGradScratchBytes(rows, width);
  }
  void LayerNormGrad(uint64_t, uint64_t, const float*, const float*,
                     const float*, const float*, const float*, const float*,
                     float*, float*, float*, void*) override {}
  void Gelu(uint64_t, const float*, float*) override {}
  void GeluGrad(uint64_t, const float*, const float*, float*) override {}
  uint64_t AttentionScratchBytes(const AttentionShape& shape) override {
    return real_->AttentionScratchBytes(shape);
  }
  void Attention(const AttentionShape&, const float*, const float*,
                 const float*, float*, float*, void*) override {}
  uint64_t AttentionGradScratchBytes(const AttentionShape& shape) override {
    return real_->AttentionGradScratchBytes(shape);
  }
  void AttentionGrad(const AttentionShape&, const float*, const float*,
                     const float*, const float*, const float*, const float*,
                     float*, float*, float*, void*) override {}
  void Embedding(uint64_t, uint64_t, uint64_t, DType, const uint32_t*,
                 const void*, const void*, float*) override {}
  void EmbeddingGrad(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                     const uint32_t*, const float*, float*, float*) override {}
  uint64_t CrossEntropyScratchBytes(uint64_t rows) override {
    return real_->CrossEntropyScratchBytes(rows);
  }
  double CrossEntropy(uint64_t, uint64_t, const uint32_t*, bool, float*,
                      void*) override {
    return 0;
  }
  void Add(uint64_t, const float*, const float*, float*) override {}
  void Accumulate(uint64_t, const float*, float*) override {}

 private:
  Kernels* const real_;
};

class PlanningDevice : public Device {
 public:
  PlanningDevice(uint64_t memory_bytes, Kernels* real)
      : arena_(Arena::CreateWithoutMemory(
            {.name = kBudgetKey, .bytes = memory_bytes})),
        kernels_(real) {}

  absl::StatusOr<DeviceBuffer> Allocate(uint64_t bytes,
                                        absl::string_view what) override {
    return arena_->Allocate(bytes, what);
  }
  StreamMark Mark() override { return {}; }
  void CopyIn(StreamMark, const void*, uint64_t, void*) override {}
  void CopyOut(const void*, uint64_t, void*) override {}
  Kernels& kernels() override { return kernels_; }
  uint64_t budget_bytes() const override { return arena_->budget_bytes(); }
  uint64_t used_bytes() const override { return arena_->used_bytes(); }
  uint64_t peak_bytes() const override { return arena_->peak_bytes(); }

 private:
  const std::unique_ptr<Arena> arena_;
  PlanningKernels kernels_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CpuDevice>> CpuDevice::Create(
    uint64_t memory_bytes, std::unique_ptr<Kernels> kernels) {
  BALLAST_ASSIGN_OR_RETURN(
      std::unique_ptr<Arena> arena,
      Arena::Create({.name = kBudgetKey, .bytes = memory_bytes}));
  return std::unique_ptr<CpuDevice>(
      new CpuDevice(std::move(arena), std::move(kernels)));
}

void CpuDevice::CopyIn(StreamMark, const void* host, uint64_t bytes,
                       void* device) {
  std::memcpy(device, host, bytes);
}

void CpuDevice::CopyOut(const void* device, uint64_t bytes, void* host) {
  std::memcpy(host, device, bytes);
}

std::unique_ptr<Device> MakePlanningDevice(uint64_t memory_bytes,
                                           Kernels* real) {
  return std::make_unique<PlanningDevice>(memory_bytes, real);
}

}  // namespace ballast
