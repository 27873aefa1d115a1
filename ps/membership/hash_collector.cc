// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/hash_collector.h"

#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/status_macros.h"

namespace ballast {

void HashCollector::Begin(uint64_t step, const ChunkTable* table,
                          uint32_t fields) {
  step_ = step;
  table_ = table;
  fields_ = fields;
  digests_.clear();
  for (const TensorSpec& tensor : table->layout().tensors) {
    digests_.emplace_back(tensor.block_count() * fields);
  }
  missing_ = table->chunks().size();
  seen_.assign(missing_, false);
}

absl::Status HashCollector::Add(const v1::StateDigests& report) {
  if (step_ != report.step()) {
    return absl::OkStatus();
  }
  for (const v1::ChunkDigests& entry : report.chunks()) {
    if (entry.chunk() >= seen_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("digests of chunk ", entry.chunk(), "; the model has ",
                       seen_.size()));
    }
    const Chunk& chunk = table_->chunk(entry.chunk());
    const TensorSpec& tensor = table_->tensor_of(entry.chunk());
    const uint64_t block = tensor.block_elems();
    const uint64_t blocks = (chunk.elem_count() + block - 1) / block;
    if (entry.digests().size() != blocks * fields_ * sizeof(Hash128)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "digests of chunk ", entry.chunk(), " have ", entry.digests().size(),
          " bytes; want ", blocks * fields_ * sizeof(Hash128)));
    }
    if (seen_[entry.chunk()]) {
      continue;
    }
    ByteReader reader(entry.digests());
    for (uint64_t field = 0; field < fields_; ++field) {
      const uint64_t first = field * tensor.block_count() + chunk.begin / block;
      for (uint64_t i = 0; i < blocks; ++i) {
        Hash128& digest = digests_[chunk.tensor][first + i];
        digest.high = reader.Get<uint64_t>();
        digest.low = reader.Get<uint64_t>();
      }
    }
    seen_[entry.chunk()] = true;
    --missing_;
  }
  return absl::OkStatus();
}

std::string HashCollector::Hash() const {
  return HashHex(StateHash(table_->layout(), digests_));
}

}  // namespace ballast
