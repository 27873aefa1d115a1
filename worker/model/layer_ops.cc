// SPDX-License-Identifier: Apache-2.0
#include "worker/model/layer_ops.h"

#include "common/status_macros.h"

namespace ballast {

absl::StatusOr<DeviceBuffer> LayerOps::Scratch(uint64_t bytes) {
  if (bytes == 0) {
    return DeviceBuffer();
  }
  return device_.Allocate(bytes, "scratch of kernels");
}

absl::Status LayerOps::Linear(const LinearShape& shape, const float* x,
                              const void* weight, const void* bias, float* y) {
  BALLAST_ASSIGN_OR_RETURN(const DeviceBuffer scratch,
                           Scratch(kernels_.LinearScratchBytes(shape)));
  kernels_.Linear(shape, x, weight, static_cast<const float*>(bias), y,
                  scratch.data());
  return absl::OkStatus();
}

absl::Status LayerOps::LinearGradInput(const LinearShape& shape,
                                       const float* dy, const void* weight,
                                       float* dx) {
  BALLAST_ASSIGN_OR_RETURN(
      const DeviceBuffer scratch,
      Scratch(kernels_.LinearGradInputScratchBytes(shape)));
  kernels_.LinearGradInput(shape, dy, weight, dx, scratch.data());
  return absl::OkStatus();
}

absl::Status LayerOps::LinearGradWeight(const LinearShape& shape,
                                        const float* x, const float* dy,
                                        GradientWriter* writer,
                                        uint32_t weight_slot, int bias_slot) {
  const bool has_bias = bias_slot >= 0;
  const auto bias = static_cast<uint32_t>(has_bias ? bias_slot : 0);
  BALLAST_ASSIGN_OR_RETURN(float* const dweight, writer->Begin(weight_slot));
  float* dbias = nullptr;
  if (has_bias) {
    BALLAST_ASSIGN_OR_RETURN(dbias, writer->Begin(bias));
  }
  {
    BALLAST_ASSIGN_OR_RETURN(
        const DeviceBuffer scratch,
        Scratch(kernels_.LinearGradWeightScratchBytes(shape)));
    kernels_.LinearGradWeight(shape, x, dy, dweight, dbias, scratch.data());
  }
  BALLAST_RETURN_IF_ERROR(writer->Done(weight_slot));
  return has_bias ? writer->Done(bias) : absl::OkStatus();
}

absl::Status LayerOps::LayerNormGrad(uint64_t rows, uint64_t width,
                                     const float* x, const void* gamma,
                                     const float* mean, const float* rstd,
                                     const float* dy, const float* dx_add,
                                     float* dx, GradientWriter* writer,
                                     uint32_t gamma_slot) {
  BALLAST_ASSIGN_OR_RETURN(float* const dgamma, writer->Begin(gamma_slot));
  BALLAST_ASSIGN_OR_RETURN(float* const dbeta, writer->Begin(gamma_slot + 1));
  {
    BALLAST_ASSIGN_OR_RETURN(
        const DeviceBuffer scratch,
        Scratch(kernels_.LayerNormGradScratchBytes(rows, width)));
    kernels_.LayerNormGrad(rows, width, x, static_cast<const float*>(gamma),
                           mean, rstd, dy, dx_add, dx, dgamma, dbeta,
                           scratch.data());
  }
  BALLAST_RETURN_IF_ERROR(writer->Done(gamma_slot));
  return writer->Done(gamma_slot + 1);
}

absl::Status LayerOps::Attention(const AttentionShape& shape, const float* q,
                                 const float* k, const float* v, float* out,
                                 float* lse) {
  BALLAST_ASSIGN_OR_RETURN(const DeviceBuffer scratch,
                           Scratch(kernels_.AttentionScratchBytes(shape)));
  kernels_.Attention(shape, q, k, v, out, lse, scratch.data());
  return absl::OkStatus();
}

absl::Status LayerOps::AttentionGrad(const AttentionShape& shape,
                                     const float* q, const float* k,
                                     const float* v, const float* out,
                                     const float* lse, const float* dout,
                                     float* dq, float* dk, float* dv) {
  BALLAST_ASSIGN_OR_RETURN(const DeviceBuffer scratch,
                           Scratch(kernels_.AttentionGradScratchBytes(shape)));
  kernels_.AttentionGrad(shape, q, k, v, out, lse, dout, dq, dk, dv,
                         scratch.data());
  return absl::OkStatus();
}

absl::Status LayerOps::CrossEntropy(uint64_t rows, uint64_t vocab,
                                    const uint32_t* targets, bool with_grad,
                                    float* logits, double* loss) {
  BALLAST_ASSIGN_OR_RETURN(const DeviceBuffer scratch,
                           Scratch(kernels_.CrossEntropyScratchBytes(rows)));
  *loss = kernels_.CrossEntropy(rows, vocab, targets, with_grad, logits,
                                scratch.data());
  return absl::OkStatus();
}

}  // namespace ballast
