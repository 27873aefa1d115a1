// SPDX-License-Identifier: Apache-2.0
// Several shard engines in one thread, each on a simulated disk of its own,
// joined by streams in memory, under a coordinator and a worker that are plain
// loops: what chunks that move, and servers that die meanwhile, are tried with.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "common/job.h"
#include "common/layout.h"
#include "proto/ballast.pb.h"
#include "ps/shard/replica_dialer.h"
#include "ps/shard/shard_engine.h"
#include "tests/ps/shard/memory_streams.h"
#include "tests/testing/sim_disk.h"

namespace ballast::testing {

struct EngineClusterOptions {
  uint32_t servers = 2;
  std::vector<uint32_t> owner;  // By chunk; empty: dealt in turn.
  Durability durability = Durability::kStep;
  uint64_t memory = 64 << 20;  // 0: the smallest that works.
  uint64_t log_limit = 0;
  uint64_t chunk_elems = 1 << 16;
  uint64_t seed = 1;
};

class EngineCluster {
 public:
  explicit EngineCluster(const EngineClusterOptions& options);
  ~EngineCluster();

  // The next life of a server; its disk has lost what was not synced if the
  // one before ended in a power cut.
  void StartLife(uint32_t server);
  void Kill(uint32_t server, SimDisk::End end);
  bool IsAlive(uint32_t server) const;

  // Chunks are wanted at this server from now on.
  void Want(const std::vector<uint32_t>& chunks, uint32_t server);
  bool IsMoved() const { return owner_ == wanted_; }
  // Durability `replica`: chunks of each server are copied to the next.
  void set_standing(bool standing) { standing_ = standing; }

  // Trains until every server has confirmed `step`; dead ones come back.
  // Fails the test when it does not get there.
  void TrainThrough(uint64_t step);
  // As the worker does: to every server that has not voted.
  bool Push(uint64_t step);

  // Called before each engine step, in all servers.
  std::function<void()> disturb;
  uint64_t engine_steps = 0;  // Of all.
  // Breaks every Replicate stream there is.
  void BreakCopies();

  const ChunkTable& table() const { return *table_; }
  const std::vector<uint32_t>& owner() const { return owner_; }
  uint64_t committed() const { return decisions_.size(); }
  uint64_t placement_version() const { return placement_.placement_version(); }
  uint64_t moves_made() const { return moves_made_; }
  ShardEngine& engine(uint32_t server) { return *nodes_[server].engine; }
  // Of the digests of every chunk at the newest version: a hash, by chunk.
  std::map<uint32_t, std::string> State();
  // A fetch of the served field of `chunk` at `version` from a server by the
  // placement `placement_version`: OK when all of it came.
  absl::Status Fetch(uint32_t server, uint32_t chunk, uint64_t version,
                     uint64_t placement_version);
  // A Replicate stream from nobody that the coordinator knows.
  std::shared_ptr<StreamClient> OpenCopies(uint32_t server);
  bool Await(const std::function<bool()>& done) { return RunUntil(done); }
  // The held chunks of a server's last join.
  const v1::JoinRequest& join(uint32_t server) const {
    return nodes_[server].join;
  }

 private:
  class Session;
  class Dialer;
  struct Node {
    std::unique_ptr<SimDisk> disk;
    std::shared_ptr<Mailbox> mailbox;
    std::unique_ptr<Session> session;
    std::unique_ptr<Dialer> dialer;
    std::unique_ptr<ShardEngine> engine;
    v1::JoinRequest join;
    uint64_t incarnation = 0;
    std::optional<uint64_t> version;  // Loaded or confirmed, of this life.
    bool ever_loaded = false;
    uint64_t voted = 0;                     // The newest step.
    std::vector<v1::ReplicaOrder> in_sync;  // Of that vote.
    std::optional<v1::StateDigests> digests;
    uint64_t directive_number = 0;
  };

  std::string NameOf(uint32_t server) const;
  v1::ServerDirective DirectiveOf(uint32_t server) const;
  void DirectAll();
  void Hear(uint32_t server, const v1::ReportRequest& report);
  // One engine step of every server that lives; true when any was busy.
  bool StepAll();
  bool RunUntil(const std::function<bool()>& done);
  bool AllAlive() const;
  bool PushTo(uint32_t server, uint64_t step);
  bool PushThrough(StreamClient* client, uint32_t server, uint64_t step);
  void Decide(uint64_t step);

  const EngineClusterOptions options_;
  Job job_;
  ModelLayout layout_;
  std::unique_ptr<ChunkTable> table_;
  v1::Placement placement_;
  std::vector<uint32_t> owner_;
  std::vector<uint32_t> wanted_;
  bool standing_ = false;
  std::vector<Node> nodes_;
  std::vector<v1::Decision> decisions_;
  uint64_t incarnations_ = 0;
  uint64_t streams_ = 0;
  uint64_t moves_made_ = 0;
  // Both ends of the Replicate streams, by the servers that they join.
  std::vector<std::weak_ptr<StreamEnd>> ends_;
};

}  // namespace ballast::testing
