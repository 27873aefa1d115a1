// SPDX-License-Identifier: Apache-2.0
// One way through the model by a simulated worker: fetches every unit at the
// version asked for, twice, "computes", and pushes gradients under the server's
// credit until all are acknowledged. The streams carry the product's messages;
// what a worker must check of them (worker/client) is checked here too.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/layout.h"
#include "proto/ballast.pb.h"
#include "proto/bulk.h"
#include "rpc/bulk_message.h"
#include "tests/sim/network.h"
#include "tests/sim/sim_job.h"
#include "tests/sim/twin.h"
#include "worker/worker_core.h"

namespace ballast::sim {

// Not thread-safe. shared: events under way outlive it and then do nothing.
class SimPass : public std::enable_shared_from_this<SimPass> {
 public:
  struct Options {
    World* world = nullptr;  // Not owned, as below.
    Network* network = nullptr;
    LifePointer life;
    const SimJob* job = nullptr;
    const Twin* twin = nullptr;
    std::shared_ptr<const ChunkTable> table;  // shared with later passes.
    v1::Placement placement;  // The one that pass.view was made of.
    WorkerCore::Pass pass;
    absl::Duration silence_max;
    absl::Duration unit_time;  // Of one micro-batch in one unit.
    uint64_t staging_bytes = 0;
    std::function<void()> progress;
    std::function<void()> all_pushed;
    std::function<void(WorkerCore::PassEnd)> ended;
  };
  explicit SimPass(Options options) : options_(std::move(options)) {}

  void Start();
  // It ends soon, as every pass does.
  void CallOff();
  // The worker is gone: nothing is told to anyone any more.
  void Abandon();
  // "server-1: unit h.0"; empty: it computes.
  const std::string& waits_for() const { return waits_for_; }
  uint64_t units_done() const { return units_done_; }

 private:
  struct Piece {
    BulkItem item;
    std::shared_ptr<const std::vector<float>> data;
    size_t part = 0;
  };
  struct Link {
    std::shared_ptr<SimStream> stream;
    bool ended = false;
  };
  struct FetchLink : Link {
    uint64_t next_sequence = 1;
    std::deque<BulkHeader> outstanding;  // Requests; items not yet answered.
    std::deque<uint32_t> units;          // Of them.
  };
  struct PushLink : Link {
    bool greeted = false;
    uint64_t credit = 0;
    uint64_t next_sequence = 1;
    std::deque<Piece> queue;
    std::map<uint64_t, std::vector<Piece>> unacknowledged;
  };
  // What must be acknowledged of one part by one server.
  struct Debt {
    uint64_t pieces = 0;
    bool all_queued = false;
    uint64_t life = 0;
  };

  void OpenLinks();
  void RequestUnit(uint32_t unit);
  void OnFetched(uint32_t server, const grpc::ByteBuffer& buffer);
  absl::Status TakeFetched(uint32_t server, const grpc::ByteBuffer& buffer);
  void StorePayload(const BulkMessage& message, size_t index);
  bool UnitThere(uint32_t unit) const;
  // Goes on as far as what is there allows.
  void Advance();
  void ComputeUnit();
  void CheckWeights(uint32_t unit);
  void PushUnit(uint32_t unit);
  void QueuePart(size_t part, const TensorUse& use, bool carries_loss);
  void SendPieces(uint32_t server);
  void OnAcknowledged(uint32_t server, const grpc::ByteBuffer& buffer);
  absl::Status TakeAcknowledged(uint32_t server,
                                const grpc::ByteBuffer& buffer);
  void OnLinkEnd(Link* link, const std::string& server,
                 const absl::Status& why);
  void MaybeFinish();
  void Touch();
  void WatchSilence();
  void End(const absl::Status& status);
  std::string NameOf(uint32_t server) const;

  const Options options_;
  bool over_ = false;
  bool finishing_ = false;
  bool told_pushed_ = false;
  absl::Time heard_;
  std::string waits_for_;
  uint64_t units_done_ = 0;

  std::vector<FetchLink> fetch_;  // By server.
  std::vector<PushLink> push_;
  Weights weights_;
  std::map<uint32_t, uint64_t> missing_;  // Items of units under way.
  // Position on the way: units 0..n-1 forward, then n-1..0 backward.
  uint32_t next_request_ = 0;
  uint32_t place_ = 0;
  bool computing_ = false;
  Hash128 weights_hash_;
  std::deque<std::function<void()>> staged_;  // Parts that wait for room.
  uint64_t staged_bytes_ = 0;
  std::map<std::pair<size_t, uint32_t>, Debt> debts_;
  std::vector<v1::MicroBatchLoss> losses_;
  uint64_t pushed_bytes_ = 0;
};

}  // namespace ballast::sim
