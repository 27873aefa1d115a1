// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/chunk_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "ps/shard/blocking.h"

namespace ballast {

absl::StatusOr<std::unique_ptr<ChunkStore>> ChunkStore::Create(
    const Options& options, const ChunkTable& table,
    const std::vector<uint32_t>& owned, OptimizerKind optimizer,
    const std::vector<Tier>& tiers) {
  BALLAST_CHECK(owned.size() == tiers.size());
  std::unique_ptr<ChunkStore> store(new ChunkStore(options, table, optimizer));
  store->chunks_.reserve(owned.size());
  for (size_t i = 0; i < owned.size(); ++i) {
    ChunkState state = store->MakeState(owned[i], tiers[i]);
    if (state.tier != Tier::kStreamed) {
      state.resident = std::make_shared<Image>();
      state.resident->bytes = state.tier == Tier::kWhole
                                  ? state.layout.total_bytes
                                  : state.layout.prefix_bytes;
      BALLAST_ASSIGN_OR_RETURN(
          state.resident->buffer,
          options.resident->Allocate(state.resident->bytes,
                                     "chunks kept in memory"));
    }
    store->chunks_.push_back(std::move(state));
  }
  store->Reindex();
  return store;
}

ChunkState ChunkStore::MakeState(uint32_t id, Tier tier) const {
  ChunkState state;
  state.chunk = table_.chunk(id);
  state.tensor = &table_.tensor_of(id);
  state.layout = RecordLayout::For(*state.tensor, state.chunk, optimizer_);
  state.tier = tier;
  return state;
}

void ChunkStore::Reindex() {
  index_.assign(table_.chunks().size(), -1);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    index_[chunks_[i].chunk.id] = static_cast<int64_t>(i);
  }
}

void ChunkStore::Insert(const std::vector<uint32_t>& ids) {
  for (const uint32_t id : ids) {
    BALLAST_CHECK(Find(id) == nullptr);
    ChunkState state = MakeState(id, Tier::kStreamed);
    absl::StatusOr<ArenaBuffer> buffer = options_.resident->Allocate(
        state.layout.total_bytes, "chunks kept in memory");
    if (buffer.ok()) {
      state.tier = Tier::kWhole;
      state.resident = std::make_shared<Image>();
      state.resident->bytes = state.layout.total_bytes;
      state.resident->buffer = *std::move(buffer);
    }
    chunks_.push_back(std::move(state));
  }
  std::sort(chunks_.begin(), chunks_.end(),
            [](const ChunkState& a, const ChunkState& b) {
              return a.chunk.id < b.chunk.id;
            });
  Reindex();
}

void ChunkStore::Erase(const std::vector<uint32_t>& ids) {
  std::erase_if(chunks_, [&ids](const ChunkState& chunk) {
    return std::find(ids.begin(), ids.end(), chunk.chunk.id) != ids.end();
  });
  Reindex();
}

ChunkState* ChunkStore::Find(uint32_t id) {
  if (id >= index_.size() || index_[id] < 0) {
    return nullptr;
  }
  return &chunks_[static_cast<size_t>(index_[id])];
}

std::shared_ptr<Image> ChunkStore::Served(const ChunkState& chunk) const {
  if (chunk.resident && chunk.resident->ready) {
    return chunk.resident;
  }
  return chunk.window && chunk.window->ready ? chunk.window : nullptr;
}

std::shared_ptr<Image> ChunkStore::Whole(const ChunkState& chunk) const {
  for (const auto& image : {chunk.resident, chunk.window}) {
    if (image && image->ready && chunk.is_whole(*image)) {
      return image;
    }
  }
  return nullptr;
}

bool ChunkStore::CanGiveUp(const ChunkState& chunk, Need need) const {
  const Image* image = chunk.window.get();
  if (image == nullptr || !image->ready || image->writing || image->claimed ||
      image->sends > 0 || !chunk.extent) {
    return false;
  }
  switch (need) {
    case Need::kAhead:
      return image->awaited == 0 && image->served >= readers_;
    case Need::kSoon:
      return image->awaited == 0;
    case Need::kNow:
      return true;
  }
  return false;
}

bool ChunkStore::MakeRoom(uint64_t bytes, Need need) {
  // Images that everyone had first, then those whose turn in the cycle is the
  // farthest away.
  ChunkState* victim = nullptr;
  const auto is_better = [this](const ChunkState& a, const ChunkState& b) {
    const auto key = [this](const ChunkState& chunk) {
      return std::pair(
          chunk.window->awaited == 0,
          std::pair(chunk.window->served >= readers_, chunk.chunk.id));
    };
    return key(a) > key(b);
  };
  for (ChunkState& chunk : chunks_) {
    if (CanGiveUp(chunk, need) &&
        (victim == nullptr || is_better(chunk, *victim))) {
      victim = &chunk;
    }
  }
  if (victim == nullptr || bytes > options_.window->budget_bytes()) {
    return false;
  }
  victim->window.reset();
  return true;
}

ArenaBuffer ChunkStore::TakeWindow(uint64_t bytes, absl::string_view what,
                                   Need need) {
  do {
    absl::StatusOr<ArenaBuffer> buffer = options_.window->Allocate(bytes, what);
    if (buffer.ok()) {
      return *std::move(buffer);
    }
  } while (MakeRoom(bytes, need));
  return {};
}

bool ChunkStore::Bring(ChunkState* chunk, bool whole, Need need) {
  if (whole ? Whole(*chunk) != nullptr : Served(*chunk) != nullptr) {
    return true;
  }
  if (chunk->window && !chunk->window->ready &&
      (!whole || chunk->is_whole(*chunk->window))) {
    return true;
  }
  BALLAST_CHECK(chunk->extent != nullptr);
  auto image = std::make_shared<Image>();
  image->bytes = whole ? chunk->layout.total_bytes : chunk->layout.prefix_bytes;
  if (whole && chunk->window && chunk->window->sends == 0 &&
      chunk->window->ready) {
    chunk->window.reset();  // The prefix comes again with the rest.
  }
  image->buffer = TakeWindow(image->bytes, "chunks read from disk", need);
  if (!image->buffer) {
    return false;
  }
  chunk->window = image;
  Read(chunk, image);
  return true;
}

void ChunkStore::FillResident(ChunkState* chunk) {
  Read(chunk, chunk->resident);
}

void ChunkStore::Read(ChunkState* chunk, const std::shared_ptr<Image>& image) {
  BALLAST_CHECK(chunk->extent != nullptr);
  ++in_flight_;
  // The extent stays taken until the read is done.
  options_.slab->Read(
      *chunk->extent, image->bytes, image->buffer.data(),
      [this, mailbox = options_.mailbox, id = chunk->chunk.id, image,
       wanted = IdOf(*chunk),
       extent = chunk->extent](const absl::Status& status) {
        mailbox->Post([this, id, image, wanted, extent, status] {
          OnRead(id, image, wanted, status);
        });
      });
}

void ChunkStore::OnRead(uint32_t id, const std::shared_ptr<Image>& image,
                        const RecordId& wanted, const absl::Status& status) {
  --in_flight_;
  ChunkState* chunk = Find(id);
  if (chunk == nullptr) {
    return;  // It went to another server meanwhile.
  }
  absl::Status checked = status;
  if (status.ok()) {
    checked =
        CheckRecord(chunk->layout, wanted, {image->buffer.data(), image->bytes},
                    absl::StrCat(options_.slab->slab_path(), ": record of ",
                                 chunk->tensor->name, " [", chunk->chunk.begin,
                                 ", ", chunk->chunk.end, ")"));
  }
  if (!checked.ok()) {
    options_.fail(Lost(checked));
    return;
  }
  image->ready = true;
}

absl::StatusOr<SharedExtent> ChunkStore::TakeExtent(const ChunkState& chunk) {
  BALLAST_ASSIGN_OR_RETURN(const Extent extent,
                           options_.slab->Allocate(chunk.layout.total_bytes));
  return Share(extent);
}

void ChunkStore::Write(ChunkState* chunk, const std::shared_ptr<Image>& image,
                       SharedExtent extent) {
  BALLAST_CHECK(chunk->is_whole(*image) && !image->writing);
  chunk->digests = SealRecord(chunk->layout, IdOf(*chunk),
                              {image->buffer.data(), image->bytes});
  chunk->extent = std::move(extent);
  image->writing = true;
  ++in_flight_;
  options_.slab->Write(*chunk->extent, image->buffer.data(),
                       [this, mailbox = options_.mailbox, image,
                        held = chunk->extent](const absl::Status& status) {
                         mailbox->Post([this, image, held, status] {
                           --in_flight_;
                           image->writing = false;
                           if (!status.ok()) {
                             options_.fail(Lost(status));
                           }
                         });
                       });
}

absl::Status ChunkStore::Save(ChunkState* chunk) {
  if (chunk->extent) {
    return absl::OkStatus();
  }
  BALLAST_CHECK(chunk->tier == Tier::kWhole);
  BALLAST_ASSIGN_OR_RETURN(SharedExtent extent, TakeExtent(*chunk));
  Write(chunk, chunk->resident, std::move(extent));
  return absl::OkStatus();
}

bool ChunkStore::IsOnDisk(const ChunkState& chunk) const {
  const auto is_writing = [](const std::shared_ptr<Image>& image) {
    return image && image->writing;
  };
  return chunk.extent && !is_writing(chunk.resident) &&
         !is_writing(chunk.window);
}

void ChunkStore::Adopt(ChunkState* chunk, const Extent& extent) {
  options_.slab->Adopt(extent);
  chunk->extent = Share(extent);
}

SharedExtent ChunkStore::Share(const Extent& extent) {
  return {new Extent(extent), [slab = options_.slab](const Extent* held) {
            slab->Release(*held);
            delete held;
          }};
}

RecordId ChunkStore::IdOf(const ChunkState& chunk) const {
  return {options_.run,       chunk.data_timeline,
          chunk.data_version, HashBytes(chunk.tensor->name),
          chunk.chunk.begin,  chunk.chunk.end};
}

}  // namespace ballast
