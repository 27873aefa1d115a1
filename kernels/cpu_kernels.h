// SPDX-License-Identifier: Apache-2.0
// The CPU's Kernels: oneDNN for matrix products, our own SIMD loops with
// run-time dispatch for the rest, and one pool of threads under both.

#pragma once

#include <memory>

#include "absl/status/status.h"
#include "kernels/kernels.h"

namespace ballast {

// What the processor must offer before any kernel is called, update.h included.
// Errors: FAILED_PRECONDITION  it has no fused multiply-add, so its results
//                              would differ from those of other machines.
absl::Status CheckCpuForKernels();

// Whether products with DType::kBF16 run on this processor.
bool CpuHasBF16Products();

// Kernels on `threads` threads (at least 1), the caller's among them.
// Each *ScratchBytes grows with `threads`; no result depends on it.
std::unique_ptr<Kernels> MakeCpuKernels(int threads);

}  // namespace ballast
