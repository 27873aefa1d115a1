// SPDX-License-Identifier: Apache-2.0
// One shard engine, life after life on the same disk, under a coordinator and a
// worker that are plain loops in the test's thread. The coordinator keeps what
// a real one keeps (decisions, counted votes) and checks what a life claims to
// hold against it.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/job.h"
#include "common/layout.h"
#include "proto/ballast.pb.h"
#include "ps/shard/shard_engine.h"
#include "storage/disk.h"

namespace ballast::testing {

struct HarnessOptions {
  std::string dir;
  Disk* disk = nullptr;
  // Lets the disk work while the engine has nothing to do; empty: it works by
  // itself.
  std::function<void()> pump;
  Durability durability = Durability::kStep;
  uint64_t memory = 64 << 20;  // 0: the smallest that works.
  uint64_t log_limit = 0;
  uint64_t chunk_elems = 1 << 16;
  bool tiny = false;  // A model of 5 chunks, not of 12.
  std::string run = "00112233445566778899aabbccddeeff";
};

class EngineHarness {
 public:
  explicit EngineHarness(const HarnessOptions& options);
  ~EngineHarness();

  // -- Lives.
  // Opens and joins; the coordinator checks the holdings and orders a load.
  absl::Status StartLife();
  // Drops the engine wherever it is.
  void Kill();
  bool alive() const { return engine_ != nullptr; }
  ShardEngine& engine() { return *engine_; }
  const v1::JoinRequest& join() const { return join_; }

  // -- The run. Everything stops when `steps_left` engine steps are used up.
  // Trains until `step` is confirmed, whatever the life begins with. False: it
  // ran out of engine steps, or the engine is over.
  bool TrainThrough(uint64_t step);
  uint64_t steps_left = UINT64_MAX;
  absl::Duration clock_ahead;  // Of the engine's clock.

  // Pieces of it, for tests that stop in between. All false as above.
  bool WaitLoaded();
  bool Push(uint64_t step);
  bool WaitVote(uint64_t step);
  void Decide(uint64_t step);
  bool WaitConfirm(uint64_t step);
  // Steps until `done` or the engine has nothing to do for `patience`.
  bool RunUntil(const std::function<bool()>& done,
                absl::Duration patience = absl::Seconds(20));

  // A new history from `step` on: what was decided later is forgotten. A life
  // that goes on is told to load when Direct is called.
  void Branch(uint64_t step);
  // The skip of the step's decision.
  void SkipStep(uint64_t step) { skipped_.insert(step); }
  void CheckpointStep(uint64_t step) { checkpointed_.insert(step); }
  // Sends the directive that follows from what is known.
  void Direct();
  v1::ServerDirective MakeDirective() const;
  void Deliver(const v1::ServerDirective& directive);

  // -- What was seen.
  uint64_t committed() const { return decisions_.size(); }
  bool voted(uint64_t step) const { return votes_.contains({timeline_, step}); }
  const std::string& vote(uint64_t step) const {
    return votes_.at({timeline_, step});
  }
  const std::vector<v1::ReportRequest>& reports() const { return reports_; }
  // Streams of `count` workers, of which the server knows; how many got credit.
  int StreamsWithCredit(int count);
  std::optional<v1::Confirm> confirm(uint64_t step) const;
  // Digests of the newest version, in order of chunks.
  std::string StateOf(uint64_t version);
  uint64_t votes_heard = 0;  // In all lives, repeated ones too.

 private:
  class Session;
  class Stream;

  void Hear(const v1::ReportRequest& report);
  // Whether this life holds the vote of the step in flight.
  bool HoldsVote() const;

  const HarnessOptions options_;
  Job job_;
  ModelLayout layout_;
  std::unique_ptr<ChunkTable> table_;
  v1::Placement placement_;

  uint64_t timeline_ = 1;
  uint64_t incarnation_ = 0;
  uint64_t number_ = 0;
  std::vector<v1::Decision> decisions_;  // Of steps 1, 2, ...
  std::map<std::pair<uint64_t, uint64_t>, std::string> votes_;
  std::set<uint64_t> skipped_;
  std::set<uint64_t> checkpointed_;
  int workers_ = 1;
  bool ever_loaded_ = false;

  std::shared_ptr<Mailbox> mailbox_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<ShardEngine> engine_;
  v1::JoinRequest join_;
  std::vector<v1::ReportRequest> reports_;  // Of this life.
  std::optional<uint64_t> version_;         // Loaded or confirmed.
  uint64_t next_stream_ = 1;
};

}  // namespace ballast::testing
