// SPDX-License-Identifier: Apache-2.0
#include "worker/step/gradient_sums.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

// A sum comes back from host memory in pieces of this size, so that it does not
// need a second tensor's worth of device memory.
constexpr uint64_t kPieceElems = uint64_t{64} << 10;

}  // namespace

double TreeSum(const Span& node, absl::Span<const double> losses,
               uint32_t first) {
  if (node.count == 1) {
    return losses[node.first - first];
  }
  return TreeSum(LeftChild(node), losses, first) +
         TreeSum(RightChild(node), losses, first);
}

GradientSums::GradientSums(const Options& options) : options_(options) {
  for (const TensorUse& use : options.layout->units[options.unit].tensors) {
    Slot& slot = slots_.emplace_back();
    slot.use = use;
    slot.elems = options.layout->tensors[use.tensor].elem_count();
  }
}

void GradientSums::StartLeaf() {
  const std::vector<Span>& nodes = options_.assignment->nodes;
  if (next_ == nodes[node_].count) {
    ++node_;
    next_ = 0;
  }
  BALLAST_CHECK(node_ < nodes.size());
  micro_batch_ = nodes[node_].first + next_;
  ++next_;
}

absl::StatusOr<float*> GradientSums::Begin(uint32_t slot) {
  Slot& entry = slots_[slot];
  BALLAST_ASSIGN_OR_RETURN(
      entry.leaf,
      options_.device->Allocate(entry.elems * sizeof(float), "gradients"));
  return entry.leaf.as<float>();
}

absl::Status GradientSums::Done(uint32_t slot) {
  Slot& entry = slots_[slot];
  DeviceBuffer sum = std::move(entry.leaf);
  const Span& root = options_.assignment->nodes[node_];
  Span span = {micro_batch_, 1};
  while (span != root) {
    const Span parent = *Parent(span, options_.assignment->total);
    if (span == LeftChild(parent)) {
      return Park(&entry, span, std::move(sum));
    }
    BALLAST_CHECK(!entry.waiting.empty() &&
                  entry.waiting.back().span == LeftChild(parent));
    Waiting left = std::move(entry.waiting.back());
    entry.waiting.pop_back();
    BALLAST_RETURN_IF_ERROR(AddLeft(entry, std::move(left), &sum));
    span = parent;
  }
  return Push(entry, span, sum);
}

absl::Status GradientSums::Park(Slot* slot, const Span& span,
                                DeviceBuffer sum) {
  Waiting waiting = {.span = span, .device = {}, .host = {}};
  if (span.count < options_.host_sums_from) {
    waiting.device = std::move(sum);
  } else {
    const uint64_t bytes = slot->elems * sizeof(float);
    BALLAST_ASSIGN_OR_RETURN(waiting.host,
                             options_.host->Allocate(bytes, "gradient sums"));
    options_.device->CopyOut(sum.data(), bytes, waiting.host.data());
  }
  slot->waiting.push_back(std::move(waiting));
  return absl::OkStatus();
}

absl::Status GradientSums::AddLeft(const Slot& slot, Waiting left,
                                   DeviceBuffer* sum) {
  Device& device = *options_.device;
  if (left.device) {
    device.kernels().Accumulate(slot.elems, sum->as<float>(),
                                left.device.as<float>());
    *sum = std::move(left.device);
    return absl::OkStatus();
  }
  // Here the right sibling is the total: an addition has the same bits either
  // way round.
  const uint64_t piece = std::min(slot.elems, kPieceElems);
  BALLAST_ASSIGN_OR_RETURN(
      const DeviceBuffer term,
      device.Allocate(piece * sizeof(float), "gradient sums"));
  for (uint64_t begin = 0; begin < slot.elems; begin += piece) {
    const uint64_t count = std::min(piece, slot.elems - begin);
    if (left.host.data() != nullptr) {  // Null in a planning run.
      device.CopyIn(device.Mark(), left.host.as<float>() + begin,
                    count * sizeof(float), term.data());
      device.kernels().Accumulate(count, term.as<float>(),
                                  sum->as<float>() + begin);
    }
  }
  return absl::OkStatus();
}

absl::Status GradientSums::Push(const Slot& slot, const Span& span,
                                const DeviceBuffer& sum) {
  std::optional<double> loss;
  if (options_.losses != nullptr && &slot == slots_.data()) {
    // Entries of `losses` are in the order of the assignment.
    uint32_t before = 0;
    for (size_t i = 0; i < node_; ++i) {
      before += options_.assignment->nodes[i].count;
    }
    loss = TreeSum(
        span, absl::MakeConstSpan(*options_.losses).subspan(before, span.count),
        span.first);
  }
  return options_.sink->Push(
      {.use = slot.use, .span = span, .data = sum.as<float>(), .loss = loss});
}

}  // namespace ballast
