// SPDX-License-Identifier: Apache-2.0
// The storage of a shard server under durability `step`, driven by a script
// instead of a run: real slab, index and gradient log on any disk, chunks whose
// every byte follows from (chunk, version), and a book of what was promised to
// others. After a cut, Recover() must find at least that.

#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/gradient_log.h"
#include "storage/record.h"
#include "storage/slab_store.h"
#include "tests/storage/storage_testing.h"

namespace ballast::testing {

// What was told to others and therefore may not be lost.
struct Promises {
  uint64_t vote = 0;        // The newest step that was voted for.
  uint64_t checkpoint = 0;  // Step of the newest committed checkpoint.
  bool joined = false;      // Its bases were reported as there.
};

// One life of the server. Every call may end in an error when the disk is cut.
class ScriptedServer {
 public:
  static constexpr uint32_t kChunks = 3;
  static constexpr uint64_t kTimeline = 1;
  static constexpr uint64_t kBodyBytes = 2 * kPageBytes;

  // `pump` runs the disk's completions until `done` says so.
  using Pump = std::function<void(const std::function<bool()>& done)>;

  ScriptedServer(Disk* disk, std::string dir, Promises* promises, Pump pump)
      : disk_(disk),
        dir_(std::move(dir)),
        promises_(promises),
        pump_(std::move(pump)) {}

  // Opens what is there and checks it against the promises; DATA_LOSS, with
  // what is missing, when they are broken.
  absl::Status Recover();

  // Step version() + 1 up to its vote.
  absl::Status Vote();

  // Chunk by chunk a base of version(), then the log is not needed.
  absl::Status PassBases();

  absl::Status Checkpoint();

  // Steps, base passes and checkpoints up to version `until`.
  absl::Status Run(uint64_t until);

  uint64_t version() const { return version_; }
  GradientLog* log() { return log_.get(); }
  SlabStore* slab() { return slab_.get(); }

 private:
  static std::string VoteText(uint64_t step) {
    return absl::StrCat("the whole vote of step ", step);
  }
  // Of several sizes, on and off page boundaries.
  static std::unique_ptr<AlignedBuffer> Gradient(uint64_t step,
                                                 uint32_t chunk) {
    auto bytes = std::make_unique<AlignedBuffer>(3000 + 1500 * chunk +
                                                 (step % 2) * 5192);
    std::memset(bytes->data(), static_cast<int>(step * 16 + chunk),
                bytes->size());
    return bytes;
  }
  static void FillBody(uint64_t version, uint32_t chunk, AlignedBuffer* body) {
    std::memset(body->data(), static_cast<int>(128 + version * 8 + chunk),
                body->size());
    std::memcpy(body->data(), &version, sizeof(version));
  }
  absl::Status Await(
      const std::function<void(std::function<void(absl::Status)>)>& start) {
    std::optional<absl::Status> result;
    start([&result](absl::Status status) { result = std::move(status); });
    pump_([&result] { return result.has_value(); });
    return *result;
  }

  absl::StatusOr<Extent> WriteBody(uint32_t chunk);

  absl::Status CheckBody(const CheckpointEntry& entry);

  absl::Status CheckGradient(uint64_t step, uint32_t chunk);

  // Bases, then step after step what has a mark.
  absl::Status Redo();

  absl::Status CheckCheckpoints();

  Disk* const disk_;
  const std::string dir_;
  Promises* const promises_;
  const Pump pump_;
  uint64_t version_ = 0;
  // In this order: the log ends before the slab's lock.
  std::unique_ptr<SlabStore> slab_;
  std::unique_ptr<GradientLog> log_;
};

}  // namespace ballast::testing
