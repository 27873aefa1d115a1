// SPDX-License-Identifier: Apache-2.0
#include "worker/step/executor.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/clock.h"
#include "common/status_macros.h"
#include "worker/step/gradient_sums.h"
#include "worker/step/weight_stream.h"

namespace ballast {
namespace {

// An activation, or its gradient, between uses: on the device or on the host.
// For a moment it may be in both places.
struct Held {
  DeviceBuffer device;
  ArenaBuffer host;
};

// One pass: what lives from its first unit to its last.
class Pass {
 public:
  Pass(ModelFamily* family, Device* device, Arena* host,
       const StepPolicy& policy, absl::Span<const MicroBatch> batches,
       PassObserver* observer)
      : family_(*family),
        device_(*device),
        host_(*host),
        policy_(policy),
        batches_(batches),
        observer_(*observer),
        last_(static_cast<uint32_t>(family->layout().units.size() - 1)),
        row_bytes_(family->rows() * family->width() * sizeof(float)),
        flow_(batches.size()) {}

  absl::StatusOr<TrainResult> Train(const Assignment& assignment,
                                    WeightSource* source, GradientSink* sink);
  absl::StatusOr<std::vector<double>> Evaluate(uint64_t version,
                                               WeightSource* source);

 private:
  // Whether `unit` is among the last `count` before the last unit.
  bool Among(uint32_t unit, uint32_t count) const {
    return unit < last_ && last_ - unit <= count;
  }
  std::vector<WeightStream::Stop> TrainStops() const;

  absl::Status ForwardUnit(uint32_t unit, absl::Span<const void* const> weights,
                           bool train);
  absl::Status LossUnitPass(absl::Span<const void* const> weights,
                            GradientSums* sums);
  absl::Status BackwardUnit(uint32_t unit,
                            absl::Span<const void* const> weights,
                            GradientSums* sums);

  // The bytes on the device; `held` keeps its host copy, if it has one.
  absl::StatusOr<DeviceBuffer> Load(Held* held);
  // Where the flow policy wants it.
  absl::StatusOr<Held> Store(DeviceBuffer value);
  absl::StatusOr<ArenaBuffer> CopyToHost(const DeviceBuffer& value);
  absl::StatusOr<DeviceBuffer> LoadIds(const std::vector<uint32_t>& ids);
  // Adds the unit's name to an error.
  absl::Status Name(const absl::Status& status, uint32_t unit) const;

  ModelFamily& family_;
  Device& device_;
  Arena& host_;
  const StepPolicy policy_;
  const absl::Span<const MicroBatch> batches_;
  PassObserver& observer_;
  const uint32_t last_;       // Index of the last unit.
  const uint64_t row_bytes_;  // Of what one micro-batch passes to a unit.

  // By micro-batch: what the next unit takes in.
  std::vector<Held> flow_;
  // By unit and micro-batch.
  std::vector<std::vector<Held>> inputs_;
  std::vector<std::vector<KeptActivations>> kept_;
  std::vector<double> losses_;
};

absl::Status Pass::Name(const absl::Status& status, uint32_t unit) const {
  if (status.code() != absl::StatusCode::kResourceExhausted) {
    return status;
  }
  return absl::Status(status.code(),
                      absl::StrCat("unit ", family_.layout().units[unit].name,
                                   ": ", status.message()));
}

absl::StatusOr<DeviceBuffer> Pass::Load(Held* held) {
  if (held->device) {
    return std::move(held->device);
  }
  BALLAST_ASSIGN_OR_RETURN(DeviceBuffer value,
                           device_.Allocate(row_bytes_, "activations"));
  device_.CopyIn(device_.Mark(), held->host.data(), row_bytes_, value.data());
  return value;
}

absl::StatusOr<ArenaBuffer> Pass::CopyToHost(const DeviceBuffer& value) {
  BALLAST_ASSIGN_OR_RETURN(ArenaBuffer copy,
                           host_.Allocate(row_bytes_, "activations"));
  device_.CopyOut(value.data(), row_bytes_, copy.data());
  return copy;
}

absl::StatusOr<Held> Pass::Store(DeviceBuffer value) {
  Held held;
  if (policy_.flow_on_device) {
    held.device = std::move(value);
  } else {
    BALLAST_ASSIGN_OR_RETURN(held.host, CopyToHost(value));
  }
  return held;
}

absl::StatusOr<DeviceBuffer> Pass::LoadIds(const std::vector<uint32_t>& ids) {
  const uint64_t bytes = family_.rows() * sizeof(uint32_t);
  BALLAST_ASSIGN_OR_RETURN(DeviceBuffer value,
                           device_.Allocate(bytes, "token ids"));
  if (value.data() != nullptr) {  // Null in a planning run.
    BALLAST_CHECK(ids.size() == family_.rows());
    device_.CopyIn(device_.Mark(), ids.data(), bytes, value.data());
  }
  return value;
}

absl::Status Pass::ForwardUnit(uint32_t unit,
                               absl::Span<const void* const> weights,
                               bool train) {
  const bool keep = train && Among(unit, policy_.kept_units);
  for (size_t m = 0; m < batches_.size(); ++m) {
    BALLAST_RETURN_IF_ERROR(observer_.OnUnit(
        train ? PassPhase::kForward : PassPhase::kEvaluate, unit));
    UnitArgs args = {.device = &device_, .weights = weights};
    Held input = std::move(flow_[m]);
    DeviceBuffer x;
    if (unit == 0) {
      BALLAST_ASSIGN_OR_RETURN(x, LoadIds(batches_[m].ids));
      args.ids = x.as<uint32_t>();
    } else {
      BALLAST_ASSIGN_OR_RETURN(x, Load(&input));
      args.x = x.as<float>();
    }
    BALLAST_ASSIGN_OR_RETURN(
        DeviceBuffer y,
        family_.unit(unit).Forward(args, keep ? &kept_[unit][m] : nullptr));
    if (train && unit > 0) {
      if (Among(unit, policy_.device_inputs)) {
        input.host.reset();
        input.device = std::exchange(x, DeviceBuffer());
      } else if (!input.host) {
        BALLAST_ASSIGN_OR_RETURN(input.host, CopyToHost(x));
      }
      inputs_[unit][m] = std::move(input);
    }
    x.reset();
    BALLAST_ASSIGN_OR_RETURN(flow_[m], Store(std::move(y)));
  }
  return absl::OkStatus();
}

absl::Status Pass::LossUnitPass(absl::Span<const void* const> weights,
                                GradientSums* sums) {
  losses_.assign(batches_.size(), 0.0);
  for (size_t m = 0; m < batches_.size(); ++m) {
    BALLAST_RETURN_IF_ERROR(observer_.OnUnit(
        sums == nullptr ? PassPhase::kEvaluate : PassPhase::kBackward, last_));
    Held input = std::move(flow_[m]);
    BALLAST_ASSIGN_OR_RETURN(const DeviceBuffer x, Load(&input));
    input.host.reset();
    BALLAST_ASSIGN_OR_RETURN(const DeviceBuffer targets,
                             LoadIds(batches_[m].targets));
    if (sums != nullptr) {
      sums->StartLeaf();
    }
    BALLAST_ASSIGN_OR_RETURN(
        DeviceBuffer dx,
        family_.loss_unit().Run({.device = &device_,
                                 .weights = weights,
                                 .x = x.as<float>(),
                                 .ids = targets.as<uint32_t>()},
                                &losses_[m], sums));
    if (sums != nullptr) {
      BALLAST_ASSIGN_OR_RETURN(flow_[m], Store(std::move(dx)));
    }
  }
  return absl::OkStatus();
}

absl::Status Pass::BackwardUnit(uint32_t unit,
                                absl::Span<const void* const> weights,
                                GradientSums* sums) {
  for (size_t m = 0; m < batches_.size(); ++m) {
    BALLAST_RETURN_IF_ERROR(observer_.OnUnit(PassPhase::kBackward, unit));
    UnitArgs args = {.device = &device_, .weights = weights};
    Held gradient = std::move(flow_[m]);
    BALLAST_ASSIGN_OR_RETURN(DeviceBuffer dy, Load(&gradient));
    gradient.host.reset();
    DeviceBuffer x;
    if (unit == 0) {
      BALLAST_ASSIGN_OR_RETURN(x, LoadIds(batches_[m].ids));
      args.ids = x.as<uint32_t>();
    } else {
      Held input = std::move(inputs_[unit][m]);
      BALLAST_ASSIGN_OR_RETURN(x, Load(&input));
      args.x = x.as<float>();
    }
    sums->StartLeaf();
    BALLAST_ASSIGN_OR_RETURN(
        DeviceBuffer dx,
        family_.unit(unit).Backward(args, std::move(kept_[unit][m]),
                                    std::move(dy), sums));
    x.reset();
    if (unit > 0) {
      BALLAST_ASSIGN_OR_RETURN(flow_[m], Store(std::move(dx)));
    }
  }
  return absl::OkStatus();
}

std::vector<WeightStream::Stop> Pass::TrainStops() const {
  std::vector<WeightStream::Stop> stops;
  for (uint32_t unit = 0; unit <= last_; ++unit) {
    // A unit whose backward is so near that its fetch would start as soon as
    // its weights were given back just keeps them.
    const uint32_t distance = 2 * (last_ - unit);
    const bool near = distance <= policy_.prefetch + 1;
    const bool again =
        unit < last_ && family_.unit(unit).backward_reads_weights();
    stops.push_back(
        {.unit = unit,
         .keep = again && (near || Among(unit, policy_.resident_units))});
  }
  for (uint32_t unit = last_; unit-- > 0;) {
    stops.push_back(
        {.unit = unit,
         .needs_weights = family_.unit(unit).backward_reads_weights()});
  }
  return stops;
}

absl::StatusOr<TrainResult> Pass::Train(const Assignment& assignment,
                                        WeightSource* source,
                                        GradientSink* sink) {
  inputs_.resize(last_ + 1);
  kept_.resize(last_ + 1);
  for (uint32_t unit = 0; unit <= last_; ++unit) {
    inputs_[unit].resize(batches_.size());
    kept_[unit].resize(batches_.size());
  }
  const std::vector<WeightStream::Stop> stops = TrainStops();
  WeightStream weights(&family_.layout(), &device_, source, assignment.version,
                       stops, policy_.prefetch);
  TrainResult result;
  absl::Time begin = MonotonicNow();
  absl::Duration waited;
  for (size_t stop = 0; stop < stops.size(); ++stop) {
    const uint32_t unit = stops[stop].unit;
    auto tensors = weights.Enter(stop);
    absl::Status status = tensors.status();
    if (status.ok() && stop < last_) {
      status = ForwardUnit(unit, *tensors, /*train=*/true);
    } else if (status.ok()) {
      GradientSums sums({.layout = &family_.layout(),
                         .unit = unit,
                         .assignment = &assignment,
                         .host_sums_from = policy_.host_sums_from,
                         .device = &device_,
                         .host = &host_,
                         .sink = sink,
                         .losses = unit == last_ ? &losses_ : nullptr});
      status = unit == last_ ? LossUnitPass(*tensors, &sums)
                             : BackwardUnit(unit, *tensors, &sums);
    }
    BALLAST_RETURN_IF_ERROR(Name(status, unit));
    weights.Leave(stop);
    if (stop + 1 == last_ || stop + 1 == stops.size()) {
      const absl::Duration took =
          MonotonicNow() - begin - (weights.waited() - waited);
      (stop + 1 == stops.size() ? result.times.backward
                                : result.times.forward) = took;
      begin = MonotonicNow();
      waited = weights.waited();
    }
  }
  result.times.fetch_wait = weights.waited();
  size_t first = 0;
  for (const Span& node : assignment.nodes) {
    result.losses.push_back(
        TreeSum(node, absl::MakeConstSpan(losses_).subspan(first, node.count),
                node.first));
    first += node.count;
  }
  return result;
}

absl::StatusOr<std::vector<double>> Pass::Evaluate(uint64_t version,
                                                   WeightSource* source) {
  std::vector<WeightStream::Stop> stops;
  for (uint32_t unit = 0; unit <= last_; ++unit) {
    stops.push_back({.unit = unit});
  }
  WeightStream weights(&family_.layout(), &device_, source, version, stops,
                       policy_.prefetch);
  for (uint32_t unit = 0; unit <= last_; ++unit) {
    auto tensors = weights.Enter(unit);
    absl::Status status = tensors.status();
    if (status.ok()) {
      status = unit < last_ ? ForwardUnit(unit, *tensors, /*train=*/false)
                            : LossUnitPass(*tensors, nullptr);
    }
    BALLAST_RETURN_IF_ERROR(Name(status, unit));
    weights.Leave(unit);
  }
  return std::move(losses_);
}

}  // namespace

absl::StatusOr<TrainResult> StepExecutor::Train(
    const Assignment& assignment, absl::Span<const MicroBatch> batches,
    WeightSource* source, GradientSink* sink, PassObserver* observer) {
  BALLAST_CHECK(assignment.micro_batches() == batches.size());
  return Pass(&family_, &device_, &host_, policy_, batches, observer)
      .Train(assignment, source, sink);
}

absl::StatusOr<std::vector<double>> StepExecutor::Evaluate(
    uint64_t version, absl::Span<const MicroBatch> batches,
    WeightSource* source, PassObserver* observer) {
  return Pass(&family_, &device_, &host_, policy_, batches, observer)
      .Evaluate(version, source);
}

}  // namespace ballast
