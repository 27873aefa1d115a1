// SPDX-License-Identifier: Apache-2.0
// What a model family is to the rest of the worker: the tensors and units that
// it declares, and the forward and backward of each unit over device memory.
// A family is one file; nothing outside that file may know which one runs.
//
// A unit takes what it needs from the device while it runs and gives it back;
// its sequence of allocations may depend on shapes alone, because the planner
// finds the peak by running it without memory (pointers are then null, and
// kernels do nothing).

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/job.h"
#include "common/layout.h"
#include "offload/device.h"

namespace ballast {

// What one call works on: one micro-batch. All pointers are device memory.
struct UnitArgs {
  Device* device = nullptr;
  // By position in UnitSpec::tensors, each in its `served` dtype.
  absl::Span<const void* const> weights;
  // Output of the unit before, fp32 (rows, width); null for the first unit.
  const float* x = nullptr;
  // (rows): token ids of the first unit, targets of the last; null elsewhere.
  const uint32_t* ids = nullptr;
};

// What a unit's forward leaves for its backward beside its input; opaque.
using KeptActivations = std::vector<DeviceBuffer>;

// Where backward writes gradients of a unit's tensors. A tensor is handed on as
// soon as it is written, so that a whole unit's gradient need not exist.
class GradientWriter {
 public:
  virtual ~GradientWriter() = default;
  // Memory for the leaf gradient of tensor `slot` (position in
  // UnitSpec::tensors), fp32, uninitialised; every element must be written.
  // Errors: as Device::Allocate.
  virtual absl::StatusOr<float*> Begin(uint32_t slot) = 0;
  // It is written. Errors: those of whoever takes it.
  virtual absl::Status Done(uint32_t slot) = 0;
};

// Every unit but the last. Stateless: a call leaves nothing behind. Errors of
// all methods: RESOURCE_EXHAUSTED from the device; those of the writer.
class Unit {
 public:
  virtual ~Unit() = default;
  // False: weights are null in Backward and need not be fetched for it.
  virtual bool backward_reads_weights() const { return true; }
  // Returns the output (rows, width). `keep` receives what Backward would
  // recompute; null: nothing is kept.
  virtual absl::StatusOr<DeviceBuffer> Forward(const UnitArgs& args,
                                               KeptActivations* keep) = 0;
  // Takes the gradient of the output, writes that of every tensor and returns
  // that of the input (empty for the first unit). `kept` is what Forward left;
  // when it is empty, the same kernels make it again, so no bit depends on it.
  virtual absl::StatusOr<DeviceBuffer> Backward(const UnitArgs& args,
                                                KeptActivations kept,
                                                DeviceBuffer dy,
                                                GradientWriter* writer) = 0;
};

// The last unit: loss and its gradient in one go, micro-batch by micro-batch.
class LossUnit {
 public:
  virtual ~LossUnit() = default;
  // `loss` receives the sum over the micro-batch's tokens, in nats, before the
  // writer hears of the first tensor. Returns the gradient of that sum by the
  // input; empty when `writer` is null, which asks for the loss alone.
  virtual absl::StatusOr<DeviceBuffer> Run(const UnitArgs& args, double* loss,
                                           GradientWriter* writer) = 0;
};

// Immutable but for the units' calls, which belong to one thread.
class ModelFamily {
 public:
  virtual ~ModelFamily() = default;
  virtual const ModelLayout& layout() const = 0;
  // Rows of a micro-batch (sequences times tokens) and width of a row of what
  // passes between units.
  virtual uint64_t rows() const = 0;
  virtual uint64_t width() const = 0;
  // index < layout().units.size() - 1; in forward order.
  virtual Unit& unit(uint32_t index) = 0;
  virtual LossUnit& loss_unit() = 0;
};

// The family that job.model.family names.
// Errors: INVALID_ARGUMENT  there is no such family; the message lists them.
absl::StatusOr<std::unique_ptr<ModelFamily>> MakeModelFamily(const Job& job);

}  // namespace ballast
