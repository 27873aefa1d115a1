// SPDX-License-Identifier: Apache-2.0
// A shard server's process: the product's ShardEngine over a simulated disk,
// stepped whenever something may have changed, behind simulated streams.

#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "proto/ballast.pb.h"
#include "ps/shard/bulk_stream.h"
#include "ps/shard/mailbox.h"
#include "ps/shard/replica_dialer.h"
#include "ps/shard/shard_engine.h"
#include "ps/shard/shard_session.h"
#include "tests/sim/member_link.h"
#include "tests/sim/network.h"
#include "tests/sim/sim_job.h"
#include "tests/testing/sim_disk.h"

namespace ballast::sim {

// Not thread-safe.
class SimServer final : public StreamAcceptor,
                        public ShardSession,
                        public ReplicaDialer {
 public:
  struct Options {
    World* world = nullptr;  // Not owned, as below.
    Network* network = nullptr;
    LifePointer life;
    const SimJob* job = nullptr;
    Job own_job;  // With its own operations fields (budgets).
    std::string address;
    std::string data_dir;
    testing::SimDisk* sim_disk = nullptr;
    Disk* disk = nullptr;  // Over sim_disk, and whatever else it can read.
    std::function<CoordinatorCalls*()> coordinator;
    // Sees each report as it is posted.
    std::function<void(const v1::ReportRequest&)> posted;
    std::function<void(const absl::Status&)> exited;
  };
  explicit SimServer(const Options& options);
  // The process is gone; its disk is stopped already.
  ~SimServer() override;

  void Start();
  void Terminate();  // SIGTERM.
  v1::MemberStats stats() const { return engine_->stats(); }
  size_t queued() const { return link_ ? link_->queued() : 0; }

  // StreamAcceptor.
  void Accept(int kind, std::shared_ptr<SimStream> stream) override;
  // ReplicaDialer.
  void Dial(const std::string& address, uint64_t id,
            BulkStreamHandler* handler) override;
  // ShardSession.
  const v1::JoinReply& admission() const override { return link_->admission(); }
  void Post(v1::ReportRequest request) override;
  void AskPlacement(
      std::function<void(absl::StatusOr<v1::Placement>)> done) override;

 private:
  bool Alive();  // Notices a disk that was cut in the middle of something.
  void Join();
  void Step();
  void StepSoon();
  void WatchTime();
  void PumpSoon();
  void RunBlocking(std::function<void()> task);
  void BlockingSoon();
  void SayFarewell();
  void WaitForFarewell(const absl::Status& status, absl::Time deadline);

  const Options options_;
  const std::shared_ptr<Mailbox> mailbox_;  // Of the engine.
  std::deque<std::function<void()>> blocking_;
  std::unique_ptr<ShardEngine> engine_;
  std::shared_ptr<MemberLink> link_;
  uint64_t next_stream_ = 1;
  bool step_scheduled_ = false;
  bool pump_scheduled_ = false;
  bool blocking_scheduled_ = false;
  bool started_ = false;
  bool over_ = false;
};

}  // namespace ballast::sim
