// SPDX-License-Identifier: Apache-2.0
// A small model whose state lies in the slabs of some servers, and its
// manifest: what the manifest and reader tests read back.

#pragma once

#include <bit>
#include <memory>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/layout.h"
#include "storage/checkpoint.h"
#include "storage/slab_store.h"
#include "tests/storage/storage_testing.h"

namespace ballast::testing {

inline ModelLayout SampleLayout() {
  TensorSpec table;
  table.name = "wte";
  table.shape = {300, 700};  // Blocks of 93 rows; the last has 21.
  table.init = Init::kNormal;
  table.init_std = 0.02;
  table.by_rows = true;
  table.use_count = 2;
  TensorSpec matrix;
  matrix.name = "h.0.w";
  matrix.shape = {400, 500};  // 3 blocks and 3392 elements.
  matrix.init = Init::kNormal;
  matrix.init_std = 1.0 / 3.0;
  matrix.decay = true;
  matrix.served = DType::kBF16;
  TensorSpec bias;
  bias.name = "a.bias";
  bias.shape = {10};
  bias.init = Init::kOnes;
  return {{table, matrix, bias},
          {{"embedding", {{0, 0}}},
           {"block", {{1, 0}, {2, 0}}},
           {"head", {{0, 1}}}}};
}

// The value of an element of a field: any function that tells them apart.
inline float SampleValue(uint32_t tensor, Field field, uint64_t elem) {
  return static_cast<float>(elem) + 0.25f * static_cast<float>(field) +
         1e6f * static_cast<float>(tensor);
}

class SampleCheckpoint {
 public:
  explicit SampleCheckpoint(uint64_t servers, uint64_t chunk_elems = 70'000,
                            OptimizerKind optimizer = OptimizerKind::kAdamW) {
    manifest.run = kRun;
    manifest.run_name = "austen";
    manifest.timeline = 2;
    manifest.step = 800;
    manifest.optimizer_step = 799;
    manifest.samples_consumed = 123456;
    manifest.decision = std::string("\x00\xff\x7f decided", 11);
    manifest.config = "run:\n  name: austen  # \xc3\xa9\n";
    manifest.optimizer = optimizer;
    manifest.layout = SampleLayout();
    const ChunkTable table = *ChunkTable::Build(manifest.layout, chunk_elems);
    for (uint64_t s = 0; s < servers; ++s) {
      WriteServer(table, s, servers);
    }
  }

  CheckpointManifest manifest;
  TempDir dir;

 private:
  void WriteServer(const ChunkTable& table, uint64_t server, uint64_t servers) {
    SlabStore::Options options;
    options.dir = dir.path(absl::StrCat("ps-", server));
    options.run = kRun;
    options.owner = "test";
    const auto store = *SlabStore::Open(options);
    StoredCheckpoint stored = {2, 800, {}};
    for (const Chunk& chunk : table.chunks()) {
      if (chunk.id % servers != server) {
        continue;
      }
      // An unchanged chunk keeps its old version.
      const uint64_t version = chunk.id == 1 ? 640 : 800;
      const Extent extent = WriteChunk(store.get(), table, chunk, version);
      stored.entries.push_back({chunk.id, version, 2, extent});
      manifest.records.push_back({chunk.tensor, chunk.begin, chunk.end, version,
                                  2, static_cast<uint32_t>(server), extent});
    }
    BALLAST_CHECK(store->Commit(stored).ok());
    manifest.directories.push_back(options.dir);
  }

  Extent WriteChunk(SlabStore* store, const ChunkTable& table,
                    const Chunk& chunk, uint64_t version) {
    const TensorSpec& tensor = table.tensor_of(chunk.id);
    const RecordLayout layout =
        RecordLayout::For(tensor, chunk, manifest.optimizer);
    AlignedBuffer image(layout.total_bytes);
    for (const Field field : {Field::kParam, Field::kSlot0, Field::kSlot1}) {
      auto* values =
          reinterpret_cast<float*>(image.data() + layout.at(field).offset);
      for (uint64_t i = 0; i < layout.at(field).bytes / 4; ++i) {
        values[i] = SampleValue(chunk.tensor, field, chunk.begin + i);
      }
    }
    auto* served = reinterpret_cast<uint16_t*>(
        image.data() + layout.at(Field::kServed).offset);
    for (uint64_t i = 0; i < layout.at(Field::kServed).bytes / 2; ++i) {
      served[i] =
          ToBF16(SampleValue(chunk.tensor, Field::kParam, chunk.begin + i));
    }
    SealRecord(
        layout,
        {kRun, 2, version, HashBytes(tensor.name), chunk.begin, chunk.end},
        image.span());
    const Extent extent = *store->Allocate(layout.total_bytes);
    BALLAST_CHECK(Await([&](auto done) {
                    store->Write(extent, image.data(), std::move(done));
                  }).ok());
    return extent;
  }
};

}  // namespace ballast::testing
