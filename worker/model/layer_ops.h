// SPDX-License-Identifier: Apache-2.0
// Kernels with their scratch: each call takes the scratch that its shape needs
// from the device and gives it back. Families compose their units from these.

#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/model/family.h"

namespace ballast {

// `pointer` advanced by `elems`; null stays null (a planning run).
inline float* At(float* pointer, uint64_t elems) {
  return pointer == nullptr ? nullptr : pointer + elems;
}
inline const float* At(const float* pointer, uint64_t elems) {
  return pointer == nullptr ? nullptr : pointer + elems;
}

// Errors of all methods: RESOURCE_EXHAUSTED from the device, and those of the
// writer. Lives on the stack of one call.
class LayerOps {
 public:
  explicit LayerOps(Device* device)
      : device_(*device), kernels_(device->kernels()) {}

  Kernels& kernels() { return kernels_; }

  // fp32 activations.
  absl::StatusOr<DeviceBuffer> Activations(uint64_t elems) {
    return device_.Allocate(elems * sizeof(float), "activations");
  }

  absl::Status Linear(const LinearShape& shape, const float* x,
                      const void* weight, const void* bias, float* y);
  absl::Status LinearGradInput(const LinearShape& shape, const float* dy,
                               const void* weight, float* dx);
  // bias_slot < 0: no bias.
  absl::Status LinearGradWeight(const LinearShape& shape, const float* x,
                                const float* dy, GradientWriter* writer,
                                uint32_t weight_slot, int bias_slot);
  // gamma is the slot of the gradient of gamma, gamma + 1 that of beta.
  absl::Status LayerNormGrad(uint64_t rows, uint64_t width, const float* x,
                             const void* gamma, const float* mean,
                             const float* rstd, const float* dy,
                             const float* dx_add, float* dx,
                             GradientWriter* writer, uint32_t gamma_slot);
  absl::Status Attention(const AttentionShape& shape, const float* q,
                         const float* k, const float* v, float* out,
                         float* lse);
  absl::Status AttentionGrad(const AttentionShape& shape, const float* q,
                             const float* k, const float* v, const float* out,
                             const float* lse, const float* dout, float* dq,
                             float* dk, float* dv);

  // `loss` receives the sum; see Kernels::CrossEntropy.
  absl::Status CrossEntropy(uint64_t rows, uint64_t vocab,
                            const uint32_t* targets, bool with_grad,
                            float* logits, double* loss);

 private:
  // Empty when no byte is needed.
  absl::StatusOr<DeviceBuffer> Scratch(uint64_t bytes);

  Device& device_;
  Kernels& kernels_;
};

}  // namespace ballast
