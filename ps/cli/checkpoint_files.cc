// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/checkpoint_files.h"

#include <algorithm>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "storage/safetensors.h"

namespace ballast {
namespace {

// What one entry of the export is made of.
struct Origin {
  uint32_t tensor = 0;
  Field field = Field::kParam;
};

// Fills `out` from element `begin` on. A reader wants whole blocks, a writer
// asks for any range, so the first and last block pass through a buffer.
absl::Status ReadRange(CheckpointReader* reader, const TensorSpec& tensor,
                       const Origin& origin, uint64_t begin,
                       absl::Span<float> out) {
  const uint64_t block = tensor.block_elems();
  const uint64_t total = tensor.elem_count();
  std::vector<float> buffer;
  uint64_t done = 0;
  while (done < out.size()) {
    const uint64_t at = begin + done;
    const uint64_t first = at / block * block;
    const uint64_t last = std::min(first + block, total);
    const uint64_t count = std::min(last - at, out.size() - done);
    buffer.resize(last - first);
    BALLAST_RETURN_IF_ERROR(reader->Read(origin.tensor, origin.field, first,
                                         absl::MakeSpan(buffer)));
    std::copy_n(buffer.begin() + static_cast<ptrdiff_t>(at - first), count,
                out.begin() + done);
    done += count;
  }
  return absl::OkStatus();
}

std::vector<Field> FieldsToExport(OptimizerKind optimizer, bool full) {
  std::vector<Field> fields = {Field::kParam};
  if (full) {
    fields.push_back(Field::kSlot0);
    if (optimizer == OptimizerKind::kAdamW) {
      fields.push_back(Field::kSlot1);
    }
  }
  return fields;
}

}  // namespace

absl::StatusOr<CheckpointFolder> ChooseCheckpoint(
    const std::string& checkpoints_dir, std::optional<uint64_t> step) {
  const std::vector<CheckpointFolder> found = FindCheckpoints(checkpoints_dir);
  if (found.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no checkpoint in ", checkpoints_dir,
                     "; name the run's folder with --run-dir"));
  }
  if (!step.has_value()) {
    return found.back();
  }
  for (const CheckpointFolder& folder : found) {
    if (folder.step == *step) {
      return folder;
    }
  }
  return absl::NotFoundError(absl::StrCat(
      "no checkpoint of step ", *step, " in ", checkpoints_dir,
      "; there are those of ",
      absl::StrJoin(found, ", ",
                    [](std::string* out, const CheckpointFolder& folder) {
                      absl::StrAppend(out, folder.step);
                    })));
}

absl::StatusOr<Hash128> VerifyCheckpoint(const std::string& path) {
  BALLAST_ASSIGN_OR_RETURN(const CheckpointManifest manifest,
                           ReadManifest(path));
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                           CheckpointReader::Open(manifest));
  return reader->Verify();
}

absl::Status ExportCheckpoint(const CheckpointManifest& manifest,
                              const ExportOptions& options) {
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                           CheckpointReader::Open(manifest));
  const std::vector<TensorSpec>& tensors = manifest.layout.tensors;
  std::vector<SafetensorsEntry> entries;
  std::vector<Origin> origins;
  for (const Field field : FieldsToExport(manifest.optimizer, options.full)) {
    for (uint32_t i = 0; i < tensors.size(); ++i) {
      SafetensorsEntry entry;
      entry.name = field == Field::kParam
                       ? tensors[i].name
                       : absl::StrCat(FieldName(field, manifest.optimizer), ".",
                                      tensors[i].name);
      entry.shape = tensors[i].shape;
      entries.push_back(std::move(entry));
      origins.push_back({i, field});
    }
  }
  const std::map<std::string, std::string> metadata = {
      {"format", "pt"},
      {"ballast_run", manifest.run_name},
      {"ballast_step", absl::StrCat(manifest.step)},
      {"ballast_optimizer_step", absl::StrCat(manifest.optimizer_step)}};
  return WriteSafetensors(
      options.output, entries, metadata, options.force,
      [&](size_t index, uint64_t begin, absl::Span<float> out) {
        return ReadRange(reader.get(), tensors[origins[index].tensor],
                         origins[index], begin, out);
      });
}

}  // namespace ballast
