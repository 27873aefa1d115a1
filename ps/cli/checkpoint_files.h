// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a run folder, read from their manifests and slabs; no cluster
// needs to be up.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/hash.h"
#include "storage/checkpoint.h"

namespace ballast {

// The one of `step`, or the newest.
// Errors: NOT_FOUND  none, or none of that step; names those that are there.
absl::StatusOr<CheckpointFolder> ChooseCheckpoint(
    const std::string& checkpoints_dir, std::optional<uint64_t> step);

// Reads and checks every byte; returns the state hash.
// Errors: DATA_LOSS  names what is damaged.
absl::StatusOr<Hash128> VerifyCheckpoint(const std::string& path);

struct ExportOptions {
  std::string output;
  bool full = false;   // Optimizer state too, as "<field>.<tensor>".
  bool force = false;  // Replace an existing file.
};

// Writes a checkpoint as safetensors: F32, tensor names as the family's
// Hugging Face files have them.
// Errors: ALREADY_EXISTS, DATA_LOSS, RESOURCE_EXHAUSTED.
absl::Status ExportCheckpoint(const CheckpointManifest& manifest,
                              const ExportOptions& options);

}  // namespace ballast
