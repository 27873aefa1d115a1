// SPDX-License-Identifier: Apache-2.0
// The three matrix products of a linear layer, on oneDNN.
//
// oneDNN chooses its blocking, and so the order of its sums, by the number of
// threads. Here every product is cut into tiles of rows by its shape alone;
// each tile is a product on one thread, and the threads share the tiles. So the
// bits cannot depend on their number, and all memory is the caller's scratch.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/kernels.h"
#include "kernels/task_pool.h"

namespace ballast {

enum class LinearProduct : uint8_t { kForward, kGradInput, kGradWeight };

// Thread-compatible. Remembers the compiled products of the shapes it has seen.
class MatrixProducts {
 public:
  // The pool is not owned and outlives the object.
  explicit MatrixProducts(TaskPool* pool);
  ~MatrixProducts();

  static bool HasBF16();
  // See Kernels::Identity.
  static std::string Identity();

  uint64_t ScratchBytes(LinearProduct product, const LinearShape& shape);

  // kForward:    a = x,  b = W,  c = y;  bias may be null.
  // kGradInput:  a = dy, b = W,  c = dx; bias is null.
  // kGradWeight: a = x,  b = dy, c = dW; bias is null.
  void Run(LinearProduct product, const LinearShape& shape, const void* a,
           const void* b, const float* bias, float* c, void* scratch);

 private:
  class Plan;
  struct Cache;
  const Plan& PlanFor(LinearProduct product, const LinearShape& shape,
                      bool with_bias);

  TaskPool* const pool_;  // Not owned.
  std::unique_ptr<Cache> cache_;
};

}  // namespace ballast
