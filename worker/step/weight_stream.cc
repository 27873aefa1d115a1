// SPDX-License-Identifier: Apache-2.0
#include "worker/step/weight_stream.h"

#include <algorithm>
#include <utility>

#include "common/clock.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

// Of each tensor within the memory of its unit.
constexpr uint64_t kTensorAlignment = 64;

}  // namespace

WeightStream::WeightStream(const ModelLayout* layout, Device* device,
                           WeightSource* source, uint64_t version,
                           std::vector<Stop> stops, uint32_t prefetch)
    : layout_(*layout),
      device_(*device),
      source_(*source),
      version_(version),
      stops_(std::move(stops)),
      prefetch_(prefetch),
      units_(layout->units.size()) {}

WeightStream::~WeightStream() {
  if (std::any_of(units_.begin(), units_.end(),
                  [](const UnitWeights& unit) { return unit.in_flight; })) {
    source_.Abandon();
  }
}

absl::StatusOr<absl::Span<const void* const>> WeightStream::Enter(
    size_t index) {
  const size_t ahead = std::min(stops_.size(), index + prefetch_ + 1);
  for (; started_ < ahead; ++started_) {
    const Stop& stop = stops_[started_];
    if (stop.needs_weights && !units_[stop.unit].buffer) {
      BALLAST_RETURN_IF_ERROR(Start(stop.unit));
    }
  }
  UnitWeights& unit = units_[stops_[index].unit];
  if (!stops_[index].needs_weights) {
    unit.tensors.assign(layout_.units[stops_[index].unit].tensors.size(),
                        nullptr);
  } else if (unit.in_flight) {
    const absl::Time begin = MonotonicNow();
    BALLAST_RETURN_IF_ERROR(source_.Wait(stops_[index].unit));
    unit.in_flight = false;
    waited_ += MonotonicNow() - begin;
  }
  return absl::MakeConstSpan(unit.tensors);
}

void WeightStream::Leave(size_t index) {
  if (!stops_[index].keep) {
    units_[stops_[index].unit].buffer.reset();
  }
}

absl::Status WeightStream::Start(uint32_t unit) {
  std::vector<uint64_t> offsets;
  uint64_t bytes = 0;
  for (const TensorUse& use : layout_.units[unit].tensors) {
    const TensorSpec& tensor = layout_.tensors[use.tensor];
    offsets.push_back(bytes);
    const uint64_t end =
        bytes + tensor.elem_count() * DTypeBytes(tensor.served);
    bytes = (end + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
  }
  UnitWeights& weights = units_[unit];
  BALLAST_ASSIGN_OR_RETURN(weights.buffer, device_.Allocate(bytes, "weights"));
  std::vector<std::byte*> destination;
  std::byte* const base = weights.buffer.data();
  for (const uint64_t offset : offsets) {
    destination.push_back(base == nullptr ? nullptr : base + offset);
  }
  weights.tensors.assign(destination.begin(), destination.end());
  weights.in_flight = true;
  return source_.Prefetch(unit, version_, device_.Mark(), destination);
}

}  // namespace ballast
