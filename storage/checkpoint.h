// SPDX-License-Identifier: Apache-2.0
// A checkpoint as the run folder describes it: a manifest that names tensors,
// element ranges and the extents that hold them, never a number of servers or
// workers. With the manifest alone any range of any field can be read back from
// the slabs, by whoever needs it: a resume with another number of servers,
// `ballast checkpoint verify` and `export`.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/hash.h"
#include "common/job.h"
#include "common/layout.h"
#include "storage/disk.h"
#include "storage/record.h"
#include "storage/slab_store.h"

namespace ballast {

struct ManifestRecord {
  uint32_t tensor = 0;  // Index into layout.tensors.
  uint64_t begin = 0;   // Elements.
  uint64_t end = 0;
  uint64_t version = 0;
  uint64_t timeline = 0;
  uint32_t directory = 0;  // Index into directories.
  Extent extent;
};

struct CheckpointManifest {
  uint32_t format_version = 1;
  Hash128 run;
  std::string run_name;
  uint64_t timeline = 0;
  uint64_t step = 0;              // Version of the parameters.
  uint64_t optimizer_step = 0;    // Updates applied (skipped steps are not).
  uint64_t samples_consumed = 0;  // The data position.
  std::string decision;           // The step's log record, encoded.
  std::string config;             // The effective job file.
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  ModelLayout layout;
  std::vector<std::string> directories;  // Data directories, absolute.
  std::vector<ManifestRecord> records;   // Cover every element once.

  // JSON for people and programs: one tensor, unit and record a line, closed by
  // a checksum of everything in front of it (docs/FORMATS.md).
  std::string ToJson() const;
  // Errors: DATA_LOSS  not a whole manifest (checksum line, missing field,
  //         ranges that overlap or leave a gap), naming what.
  static absl::StatusOr<CheckpointManifest> FromJson(absl::string_view json);
};

// "<checkpoints_dir>/step-00000800/manifest.json", written to a temporary
// name, synced and renamed.
absl::Status WriteManifest(const std::string& checkpoints_dir,
                           const CheckpointManifest& manifest,
                           Disk* disk = PosixDisk());
// A folder or file name as the user gives it, or the newest in a checkpoints
// folder. Errors: NOT_FOUND, DATA_LOSS.
absl::StatusOr<CheckpointManifest> ReadManifest(const std::string& path,
                                                Disk* disk = PosixDisk());
// A checkpoint's folder, whole or damaged.
struct CheckpointFolder {
  uint64_t step = 0;
  std::string path;
};
// All "step-N" folders of a checkpoints folder, ascending by step, the damaged
// ones too.
std::vector<CheckpointFolder> FindCheckpoints(
    const std::string& checkpoints_dir, Disk* disk = PosixDisk());
// Steps of the manifests in a checkpoints folder, ascending; partial or
// damaged ones are left out and logged by name.
std::vector<uint64_t> ListManifests(const std::string& checkpoints_dir,
                                    Disk* disk = PosixDisk());

// Reads and checks ranges of a checkpoint. Thread-compatible.
class CheckpointReader {
 public:
  // Opens the slabs read-only; takes no lock.
  // Errors: NOT_FOUND or DATA_LOSS  a slab is missing or shorter than an
  //         extent; the message names path and tensor.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(
      const CheckpointManifest& manifest, Disk* disk = PosixDisk());
  virtual ~CheckpointReader() = default;

  // Elements [begin, begin + out.size()) of a field of fp32; begin and end must
  // lie on block boundaries or the tensor's end; every block is verified.
  // Errors: DATA_LOSS         names slab, tensor, field and block.
  //         INVALID_ARGUMENT  no such range, or a field that the checkpoint
  //                           does not have or that is not fp32 (kServed).
  virtual absl::Status Read(uint32_t tensor, Field field, uint64_t begin,
                            absl::Span<float> out) = 0;
  // Reads everything, kServed too; returns the state hash.
  virtual absl::StatusOr<Hash128> Verify() = 0;
};

// Copies the digests of the record of elements [begin, ..) of a tensor to their
// places in the list of the whole tensor, which StateHash takes; kServed is
// left out. `whole` is made long enough. `begin` lies on a block boundary.
void PlaceDigests(const TensorSpec& tensor, uint64_t begin,
                  const RecordLayout& record, const BlockDigests& digests,
                  BlockDigests* whole);

// state_hash: tensors in the order of their names; for each its name, then for
// param, slot 0, slot 1 the digests of all its blocks. `digests[t]` holds those
// of tensor t as (field-major over its whole length).
Hash128 StateHash(const ModelLayout& layout,
                  const std::vector<BlockDigests>& digests);

}  // namespace ballast
