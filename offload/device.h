// SPDX-License-Identifier: Apache-2.0
// Where a worker computes: a fixed budget of memory, copies to and from the
// host, and kernels on one compute stream. The step loop knows nothing else of
// it, so that a GPU can stand where the CPU does. On a CPU the device is an
// arena of its own and a copy into it is the transfer a GPU would need.
//
// Everything that a device would hold comes from Allocate: weights, gradients,
// activations, token ids and the scratch of kernels.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/kernels.h"
#include "offload/arena.h"

namespace ballast {

// Device memory. data() may only be read or written by kernels and copies.
using DeviceBuffer = ArenaBuffer;

// A point in the work given to the compute stream.
struct StreamMark {
  uint64_t value = 0;
};

// Allocate, CopyOut, Mark and the kernels belong to one thread, the one that
// runs the step; CopyIn may be called from any thread.
class Device {
 public:
  virtual ~Device() = default;

  // 64-byte aligned. `what` is for the message of a refusal. Work given to the
  // stream before may still use the memory: order a copy from another thread
  // behind it with Mark.
  // Errors: RESOURCE_EXHAUSTED  as Arena::Allocate.
  virtual absl::StatusOr<DeviceBuffer> Allocate(uint64_t bytes,
                                                absl::string_view what) = 0;
  // All work given so far.
  virtual StreamMark Mark() = 0;
  // Copies host memory to the device once `after` is done; returns when the
  // bytes are there.
  virtual void CopyIn(StreamMark after, const void* host, uint64_t bytes,
                      void* device) = 0;
  // Copies device memory to the host after all work given so far; returns when
  // the bytes are there.
  virtual void CopyOut(const void* device, uint64_t bytes, void* host) = 0;
  virtual Kernels& kernels() = 0;

  virtual uint64_t budget_bytes() const = 0;
  virtual uint64_t used_bytes() const = 0;
  // As Arena::peak_bytes.
  virtual uint64_t peak_bytes() const = 0;
};

// The host as a device: work is done when a call returns.
class CpuDevice : public Device {
 public:
  // Takes `memory_bytes` of host memory, named worker.memory in messages.
  // Errors: RESOURCE_EXHAUSTED  the system refuses.
  static absl::StatusOr<std::unique_ptr<CpuDevice>> Create(
      uint64_t memory_bytes, std::unique_ptr<Kernels> kernels);

  absl::StatusOr<DeviceBuffer> Allocate(uint64_t bytes,
                                        absl::string_view what) override {
    return arena_->Allocate(bytes, what);
  }
  StreamMark Mark() override { return {}; }
  void CopyIn(StreamMark after, const void* host, uint64_t bytes,
              void* device) override;
  void CopyOut(const void* device, uint64_t bytes, void* host) override;
  Kernels& kernels() override { return *kernels_; }
  uint64_t budget_bytes() const override { return arena_->budget_bytes(); }
  uint64_t used_bytes() const override { return arena_->used_bytes(); }
  uint64_t peak_bytes() const override { return arena_->peak_bytes(); }

 private:
  CpuDevice(std::unique_ptr<Arena> arena, std::unique_ptr<Kernels> kernels)
      : arena_(std::move(arena)), kernels_(std::move(kernels)) {}
  const std::unique_ptr<Arena> arena_;
  const std::unique_ptr<Kernels> kernels_;
};

// A device without memory whose kernels do nothing but answer how much scratch
// they need. Buffers have no data. A step run on it takes the same allocations
// in the same order as on a real one: that is how the planner finds the peak.
std::unique_ptr<Device> MakePlanningDevice(uint64_t memory_bytes,
                                           Kernels* real);

}  // namespace ballast
