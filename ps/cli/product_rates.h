// SPDX-License-Identifier: Apache-2.0
// How fast this machine multiplies matrices: the ceiling that every training
// figure of ours stands beside, measured in the same run.

#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "kernels/kernels.h"

namespace ballast {

// One product of a GPT's training at one shape.
struct ProductRate {
  LinearShape shape;
  std::string product;  // forward | grad_input | grad_weight.
  double gflops = 0;    // Median over the repeats.
};

// Times the three products of the shapes of a small GPT (rows 2,048), each for
// about `each`, on `threads` threads.
std::vector<ProductRate> MeasureProducts(int threads, DType dtype,
                                         absl::Duration each);

// The highest of them.
double CeilingGflops(const std::vector<ProductRate>& rates);

}  // namespace ballast
