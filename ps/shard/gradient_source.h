// SPDX-License-Identifier: Apache-2.0
// A pushed gradient before it is taken: bytes that lie in the slices of a
// received message.

#pragma once

#include "absl/types/span.h"

namespace ballast {

// fp32, shape (N,) of the chunk.
class GradientSource {
 public:
  virtual ~GradientSource() = default;
  virtual void CopyTo(absl::Span<float> out) const = 0;
  // total[i] += value[i], as AccumulateCpu.
  virtual void AddTo(absl::Span<float> total) const = 0;
};

}  // namespace ballast
