// SPDX-License-Identifier: Apache-2.0
// How copies become durable; streams and decisions are in replica_target.cc.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ps/shard/replica_target.h"
#include "storage/file.h"

namespace ballast {
namespace {

bool IsWholePages(uint64_t bytes) { return bytes % kPageBytes == 0; }

}  // namespace

absl::Status ReplicaTarget::CheckPiece(const Stream& stream,
                                       const BulkHeader& header) const {
  const BulkItem& item = header.items[0];
  if (item.chunk >= view_->table->chunks().size() ||
      parts_->chunks->Find(item.chunk) != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", item.chunk, " is ours, or of another model"));
  }
  const Chunk& chunk = view_->table->chunk(item.chunk);
  const uint64_t wanted = RecordLayout::For(view_->table->tensor_of(item.chunk),
                                            chunk, parts_->optimizer)
                              .total_bytes;
  if (item.elem_count != wanted || !IsWholePages(item.elem_begin) ||
      !IsWholePages(item.payload_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes [", item.elem_begin, ", +", item.payload_bytes,
                     ") of a record of ", item.elem_count,
                     " bytes; want whole pages of ", wanted, " bytes"));
  }
  if (item.record_version + 1 < history_) {
    return absl::OutOfRangeError(
        absl::StrCat("a record of version ", item.record_version,
                     "; the decisions at hand begin with step ", history_,
                     ", send a newer one"));
  }
  const Assembly* open =
      stream.assemblies.empty() ? nullptr : stream.assemblies.back().get();
  const bool goes_on = open != nullptr && open->chunk == item.chunk &&
                       open->base == header.step && !open->failed &&
                       open->next == item.elem_begin;
  if (item.elem_begin > 0 && !goes_on) {
    return absl::OutOfRangeError(absl::StrCat("a piece at ", item.elem_begin,
                                              " of chunk ", item.chunk,
                                              " without those in front of it"));
  }
  return absl::OkStatus();
}

bool ReplicaTarget::BeginAssembly(Stream* stream, const BulkHeader& header) {
  const BulkItem& item = header.items[0];
  const auto extent = parts_->slab->Allocate(item.elem_count);
  if (!extent.ok()) {
    parts_->fail(extent.status());
    return false;
  }
  auto assembly = std::make_shared<Assembly>();
  assembly->chunk = item.chunk;
  assembly->base = header.step;
  assembly->entry = {item.chunk, item.record_version, header.record_timeline,
                     *extent};
  assembly->extent = {new Extent(*extent),
                      [slab = parts_->slab](const Extent* held) {
                        slab->Release(*held);
                        delete held;
                      }};
  // One that was broken off is of no use.
  std::erase_if(stream->assemblies,
                [](const auto& old) { return old->next < old->extent->bytes; });
  stream->assemblies.push_back(std::move(assembly));
  return true;
}

bool ReplicaTarget::TakePiece(Stream* stream) {
  const BulkHeader& header = stream->messages.front().header();
  const BulkItem& item = header.items[0];
  if (item.elem_begin == 0 && !BeginAssembly(stream, header)) {
    return false;
  }
  const std::shared_ptr<Assembly> assembly = stream->assemblies.back();
  WritePiece(stream, assembly);
  assembly->next += item.payload_bytes;
  if (assembly->next == assembly->extent->bytes) {
    assembly->last_sequence = header.sequence;
    Copy& copy = copies_[item.chunk];
    copy.source = ordered_.at(item.chunk);
    copy.received = std::max(copy.received, header.step);
  }
  return true;
}

void ReplicaTarget::WritePiece(Stream* stream,
                               const std::shared_ptr<Assembly>& assembly) {
  const BulkMessage& message = stream->messages.front();
  const BulkItem& item = message.header().items[0];
  const bool is_last =
      item.elem_begin + item.payload_bytes == assembly->extent->bytes;
  auto buffer = std::make_shared<AlignedBuffer>(item.payload_bytes);
  message.CopyPayload(0, buffer->data());
  taken_bytes_ += item.payload_bytes;
  ++assembly->writing;
  parts_->slab->WritePiece(
      *assembly->extent, item.elem_begin, item.payload_bytes, buffer->data(),
      Later([this, assembly, buffer, is_last, id = stream->id,
             sequence = message.header().sequence](const absl::Status& status) {
        --assembly->writing;
        if (!status.ok()) {
          assembly->failed = true;
          parts_->fail(status);
        }
        if (!is_last) {
          Settle(id, sequence);
        }
      }));
}

// Reads back what is written and checks all of it: once it is acknowledged, it
// may soon be the only one there is.
void ReplicaTarget::CheckAssemblies(Stream* stream) {
  for (const std::shared_ptr<Assembly>& assembly : stream->assemblies) {
    if (assembly->next < assembly->extent->bytes || assembly->writing > 0 ||
        assembly->image) {
      continue;
    }
    if (assembly->failed) {
      OnChecked(stream->id, assembly,
                absl::OutOfRangeError("it could not be written"));
      return;
    }
    auto image = std::make_shared<Image>();
    image->bytes = assembly->extent->bytes;
    image->buffer = parts_->chunks->TakeWindow(
        image->bytes, "copies being checked", ChunkStore::Need::kSoon);
    if (!image->buffer) {
      return;
    }
    assembly->image = image;
    const Chunk& chunk = view_->table->chunk(assembly->chunk);
    const TensorSpec& tensor = view_->table->tensor_of(assembly->chunk);
    const RecordId id = {parts_->run,
                         assembly->entry.timeline,
                         assembly->entry.version,
                         HashBytes(tensor.name),
                         chunk.begin,
                         chunk.end};
    parts_->slab->Read(
        *assembly->extent, image->bytes, image->buffer.data(),
        Later([this, assembly, id, stream_id = stream->id,
               layout = RecordLayout::For(tensor, chunk, parts_->optimizer)](
                  const absl::Status& status) {
          const absl::Status checked =
              status.ok() ? CheckRecord(layout, id,
                                        {assembly->image->buffer.data(),
                                         assembly->image->bytes},
                                        absl::StrCat("the copy of chunk ",
                                                     assembly->chunk))
                          : status;
          assembly->image.reset();
          OnChecked(stream_id, assembly, checked);
        }));
    return;
  }
}

void ReplicaTarget::OnChecked(uint64_t stream,
                              const std::shared_ptr<Assembly>& assembly,
                              const absl::Status& status) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    return;  // The next stream begins it again.
  }
  std::erase(found->second.assemblies, assembly);
  if (!status.ok()) {
    Refuse(&found->second, assembly->last_sequence, status);
    return;
  }
  to_commit_.emplace_back(stream, assembly);
}

void ReplicaTarget::CommitBases() {
  if (!committing_.empty() || to_commit_.empty()) {
    return;
  }
  committing_.swap(to_commit_);
  if (!parts_->durable) {
    OnCommit(absl::OkStatus());
    return;
  }
  std::vector<CheckpointEntry> entries;
  for (const auto& [stream, assembly] : committing_) {
    entries.push_back(assembly->entry);
  }
  // The extents stay ours until the index names them, whatever happens here.
  parts_->tasks->Run([slab = parts_->slab, entries,
                      held = committing_] { return slab->CommitBase(entries); },
                     [round = round_, this](const absl::Status& status) {
                       if (round == round_) {
                         OnCommit(status);
                       }
                     });
}

void ReplicaTarget::OnCommit(const absl::Status& status) {
  const auto batch = std::exchange(committing_, {});
  if (!status.ok()) {  // A full disk: tried again.
    to_commit_.insert(to_commit_.begin(), batch.begin(), batch.end());
    parts_->fail(status);
    return;
  }
  for (const auto& [stream, assembly] : batch) {
    OnCommitted(stream, assembly);
  }
}

void ReplicaTarget::OnCommitted(uint64_t stream,
                                const std::shared_ptr<Assembly>& assembly) {
  parts_->book->SetBase(assembly->entry);
  Copy& copy = copies_[assembly->chunk];
  copy.has_base = true;
  copy.base = assembly->base;
  copy.entry = assembly->entry;
  copy.extent = assembly->extent;
  copy.gradients.erase(copy.gradients.begin(),
                       copy.gradients.upper_bound(copy.base));
  Advance(&copy);
  std::erase(to_drop_, assembly->chunk);  // This one has replaced it.
  Settle(stream, assembly->last_sequence);
}

void ReplicaTarget::Advance(Copy* copy) {
  if (!copy->has_base) {
    return;
  }
  copy->through = copy->base;
  while (copy->gradients.contains(copy->through + 1)) {
    ++copy->through;
  }
  copy->received = std::max(copy->received, copy->through);
}

absl::Status ReplicaTarget::CheckGradient(const BulkItem& item,
                                          uint64_t step) const {
  const auto found = copies_.find(item.chunk);
  if (found == copies_.end() || step > found->second.received + 1) {
    return absl::OutOfRangeError(
        absl::StrCat("the gradient of step ", step, " of chunk ", item.chunk,
                     " does not follow what is here (step ",
                     found == copies_.end() ? 0 : found->second.received, ")"));
  }
  const uint64_t elems = view_->table->chunk(item.chunk).elem_count();
  if (item.elem_count != elems || item.span != Span{0, view_->micro_batches}) {
    return absl::InvalidArgumentError(
        absl::StrCat("a gradient of ", item.elem_count, " elements of chunk ",
                     item.chunk, "; want the whole sum of ", elems));
  }
  return absl::OkStatus();
}

bool ReplicaTarget::TakeGradient(Stream* stream) {
  const BulkMessage& message = stream->messages.front();
  const BulkHeader& header = message.header();
  const BulkItem& item = header.items[0];
  Copy& copy = copies_.at(item.chunk);
  if (copy.has_base && header.step <= copy.through) {
    Settle(stream->id, header.sequence);
    return true;
  }
  if (!parts_->may_append(item.payload_bytes)) {
    return false;
  }
  auto buffer = std::make_shared<AlignedBuffer>(item.payload_bytes);
  message.CopyPayload(0, buffer->data());
  ++stream->appending;
  auto entry = std::make_shared<Unsynced>();
  entry->stream = stream->id;
  entry->sequence = header.sequence;
  entry->source = copy.source.name;
  entry->step = header.step;
  entry->chunk = item.chunk;
  const absl::StatusOr<LogPosition> position = parts_->log->Append(
      {view_->timeline, header.step, item.chunk, kAllUses, item.span},
      buffer->data(), item.payload_bytes,
      Later([this, entry, buffer](const absl::Status& status) {
        if (!status.ok()) {
          parts_->fail(status);
          return;
        }
        if (const auto found = streams_.find(entry->stream);
            found != streams_.end()) {
          --found->second.appending;
        }
        unsynced_.push_back(*entry);
      }));
  if (!position.ok()) {  // `done` is not called.
    --*in_flight_;
    --stream->appending;
    parts_->fail(position.status());
    return false;
  }
  entry->position = *position;
  taken_bytes_ += item.payload_bytes;
  copy.received = std::max(copy.received, header.step);
  return true;
}

bool ReplicaTarget::TakeMark(Stream* stream) {
  if (stream->appending > 0) {
    return false;  // It vouches for them.
  }
  const BulkMessage& message = stream->messages.front();
  Unsynced entry;
  entry.stream = stream->id;
  entry.sequence = message.header().sequence;
  entry.step = message.header().step;
  entry.vote = message.text();
  for (const auto& [chunk, source] : ordered_) {
    if (source.incarnation == message.header().incarnation) {
      entry.source = source.name;
    }
  }
  unsynced_.push_back(std::move(entry));
  return true;
}

// One for each source and step, of everything that is there of it.
std::vector<VoteMark> ReplicaTarget::MarksOf(
    const std::vector<Unsynced>& batch) const {
  std::map<std::pair<std::string, uint64_t>, VoteMark> marks;
  for (const Unsynced& entry : batch) {
    const auto [found, is_new] =
        marks.try_emplace({entry.source, entry.step}, VoteMark());
    VoteMark& mark = found->second;
    if (is_new) {
      const VoteMark* before =
          parts_->book->Vote(view_->timeline, entry.step, entry.source);
      if (before != nullptr) {
        mark = *before;
      }
      mark.timeline = view_->timeline;
      mark.step = entry.step;
      mark.owner = entry.source;
    }
    if (!entry.chunk) {
      mark.vote = entry.vote;
      continue;
    }
    std::erase_if(mark.gradients, [&entry](const auto& gradient) {
      return gradient.first == *entry.chunk;
    });
    mark.gradients.emplace_back(*entry.chunk, entry.position);
  }
  std::vector<VoteMark> list;
  for (auto& [key, mark] : marks) {
    std::sort(mark.gradients.begin(), mark.gradients.end());
    list.push_back(std::move(mark));
  }
  return list;
}

// What came while the last sync ran shares the next.
void ReplicaTarget::Sync() {
  if (syncing_ || unsynced_.empty()) {
    return;
  }
  const auto batch = std::make_shared<std::vector<Unsynced>>();
  batch->swap(unsynced_);
  const std::vector<VoteMark> marks = MarksOf(*batch);
  if (!parts_->durable) {
    OnSynced(*batch, marks);
    return;
  }
  for (const VoteMark& mark : marks) {
    const absl::Status status =
        parts_->log->AppendMark(mark, [](const absl::Status&) {});
    if (!status.ok()) {  // Marks are repeated without harm.
      unsynced_.insert(unsynced_.begin(), batch->begin(), batch->end());
      parts_->fail(status);
      return;
    }
  }
  syncing_ = true;
  parts_->log->Sync(Later([this, batch, marks](const absl::Status& status) {
    syncing_ = false;
    if (!status.ok()) {
      parts_->fail(status);
      return;
    }
    OnSynced(*batch, marks);
  }));
}

void ReplicaTarget::OnSynced(const std::vector<Unsynced>& batch,
                             const std::vector<VoteMark>& marks) {
  for (const VoteMark& mark : marks) {
    parts_->book->AddVote(mark);
  }
  for (const Unsynced& entry : batch) {
    if (entry.chunk) {
      if (const auto found = copies_.find(*entry.chunk);
          found != copies_.end()) {
        found->second.gradients[entry.step] = entry.position;
        Advance(&found->second);
      }
    }
    Settle(entry.stream, entry.sequence);
  }
}

}  // namespace ballast
