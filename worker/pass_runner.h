// SPDX-License-Identifier: Apache-2.0
// Runs the passes that the worker's core asks for, one at a time, on a thread
// of its own: owns the plan, all memory, the data and the links to the servers.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/job.h"
#include "common/mutex.h"
#include "proto/ballast.pb.h"
#include "worker/client/placement_map.h"
#include "worker/client/shard_client.h"
#include "worker/data/loader.h"
#include "worker/model/family.h"
#include "worker/step/executor.h"
#include "worker/step/planner.h"
#include "worker/worker_core.h"

namespace ballast {

// Thread-safe once created.
class PassRunner {
 public:
  // On the runner's thread, in this order; must not block.
  struct Callbacks {
    std::function<void(uint64_t pass)> on_all_pushed;
    std::function<void(WorkerCore::PassEnd end)> on_end;
  };

  // Plans the step, takes all memory and opens the data.
  // Errors: as Worker::Create.
  static absl::StatusOr<std::unique_ptr<PassRunner>> Create(
      const Job& job, const std::string& name, Callbacks callbacks);
  // Calls off what runs and waits for its end.
  ~PassRunner();

  // Begins a pass; the one before must have ended.
  // shared: kept for the passes that follow.
  void Run(WorkerCore::Pass pass,
           std::shared_ptr<const PlacementMap> placement);
  // Makes that pass end soon, if it has not ended.
  void CallOff(uint64_t pass);

  // Grows while a pass gets anywhere.
  uint64_t progress() const {
    // Only compared, so no order with other memory is needed.
    return units_done_.load(std::memory_order_relaxed) + client_->progress();
  }
  // Memory, bytes moved, the phase and what the pass waits for.
  v1::MemberStats Stats() const;
  const ModelLayout& layout() const { return family_->layout(); }
  const v1::WorkerPlan& plan() const { return plan_.report; }
  std::string kernels() const { return device_->kernels().Identity(); }

 private:
  class Observer;

  PassRunner(const Job& job, std::string name, Callbacks callbacks);
  absl::Status Prepare();
  void RunThread();
  WorkerCore::PassEnd RunPass(const WorkerCore::Pass& pass);
  absl::Status Train(const WorkerCore::Pass& pass, v1::WorkerDone* figures);
  absl::Status Evaluate(const WorkerCore::Pass& pass,
                        std::vector<v1::MicroBatchLoss>* losses);
  absl::StatusOr<std::vector<MicroBatch>> TakeBatches(
      const std::vector<Span>& spans, uint64_t step, bool eval);
  bool CalledOff(uint64_t pass) const {
    return called_off_.load(std::memory_order_relaxed) >= pass;
  }

  const Job job_;
  const std::string name_;
  const Callbacks callbacks_;
  uint64_t base_bytes_ = 0;  // Resident before the first budgeted byte.

  std::unique_ptr<ModelFamily> family_;
  StepPlan plan_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> host_;
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<StepExecutor> executor_;
  std::unique_ptr<ShardClient> client_;
  std::unique_ptr<Observer> observer_;

  std::atomic<uint64_t> units_done_ = 0;
  std::atomic<uint64_t> called_off_ = 0;  // This pass and all before.

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<
      std::pair<WorkerCore::Pass, std::shared_ptr<const PlacementMap>>>
      next_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ballast
