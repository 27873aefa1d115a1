// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/gradient_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/rule.h"
#include "kernels/update.h"
#include "ps/shard/blocking.h"

namespace ballast {
namespace {

// One is written while the next is chosen; more would only hold memory.
constexpr uint32_t kSpillsMax = 2;
// Appends of gradients that need not leave: as many as keep the disk busy.
constexpr uint32_t kLoggingMax = 8;

}  // namespace

StepGradients::StepGradients(GradientPool* pool,
                             const std::vector<GradientShape>& shapes,
                             uint64_t timeline, uint64_t step,
                             uint32_t micro_batches)
    : pool_(pool),
      shapes_(shapes),
      timeline_(timeline),
      step_(step),
      self_(std::make_shared<StepGradients*>(this)) {
  chunks_.reserve(shapes.size());
  for (const GradientShape& shape : shapes) {
    const uint32_t trees = BALLAST_RULE(kUsesHaveTrees) ? shape.uses : 1;
    chunks_.push_back({SpanBook(micro_batches, trees), {}, false});
  }
}

bool StepGradients::Restore(const VoteMark& mark) {
  BALLAST_CHECK(complete_ == 0);
  std::map<uint32_t, LogPosition> places(mark.gradients.begin(),
                                         mark.gradients.end());
  for (const GradientShape& shape : shapes_) {
    if (!places.contains(shape.chunk)) {
      return false;
    }
  }
  for (size_t i = 0; i < shapes_.size(); ++i) {
    const SpanKey root = chunks_[i].book.RootKey();
    auto piece = std::make_shared<Piece>();
    piece->log = places.at(shapes_[i].chunk);
    piece->name = {timeline_, step_, shapes_[i].chunk, kAllUses, root.span};
    chunks_[i].pieces[root] = std::move(piece);
    chunks_[i].complete = true;
  }
  complete_ = logged_ = shapes_.size();
  return true;
}

std::vector<std::pair<uint32_t, LogPosition>> StepGradients::Logged() const {
  BALLAST_CHECK(IsLogged());
  std::vector<std::pair<uint32_t, LogPosition>> places;
  for (size_t i = 0; i < shapes_.size(); ++i) {
    places.emplace_back(shapes_[i].chunk,
                        *chunks_[i].pieces.begin()->second->log);
  }
  std::sort(places.begin(), places.end());
  return places;
}

absl::Span<float> StepGradients::Floats(size_t position,
                                        const Piece& piece) const {
  return {piece.ram.as<float>(), shapes_[position].elem_count};
}

bool StepGradients::TakeRam(size_t position, bool make_room, ArenaBuffer* ram) {
  while (true) {
    absl::StatusOr<ArenaBuffer> buffer =
        pool_->arena->Allocate(Bytes(position), "gradients");
    if (buffer.ok()) {
      *ram = *std::move(buffer);
      return true;
    }
    // A gradient whose copy in the log still holds leaves at once, and then
    // there may be room already.
    const uint64_t used = pool_->arena->used_bytes();
    if (!make_room || !SpillOne() || pool_->arena->used_bytes() == used) {
      return false;
    }
  }
}

StepGradients::Taken StepGradients::Offer(size_t position,
                                          const SpanKey& offered,
                                          std::optional<double> loss,
                                          const GradientSource& source) {
  ChunkGradient& chunk = chunks_[position];
  const SpanKey key =
      BALLAST_RULE(kUsesHaveTrees) ? offered : SpanKey{0, offered.span};
  if (chunk.complete || chunk.book.IsKnown(key)) {
    if (!BALLAST_RULE(kCoveredSpanDropped)) {
      CountTwice(position, key, source);
    }
    return Taken::kKnown;
  }
  const std::optional<SpanBook::Merge> merge = chunk.book.MergeOf(key);
  PiecePointer sibling;
  if (merge) {
    sibling = chunk.pieces.at(merge->left == key ? merge->right : merge->left);
    if (sibling->in_memory() && !sibling->idle()) {
      return Taken::kNoRoom;  // Soon it can be added to.
    }
  }
  auto piece = std::make_shared<Piece>();
  const bool add = sibling != nullptr && sibling->in_memory();
  if (add) {
    source.AddTo(Floats(position, *sibling));
  } else {
    if (!TakeRam(position, /*make_room=*/true, &piece->ram)) {
      return Taken::kNoRoom;
    }
    source.CopyTo(Floats(position, *piece));
  }
  for (const SpanKey& replaced : chunk.book.Insert(key, loss)) {
    if (!BALLAST_RULE(kContainingSpanReplaces) && !add) {
      const PiecePointer& inside = chunk.pieces.at(replaced);
      if (inside->in_memory()) {
        AccumulateCpu(Floats(position, *inside), Floats(position, *piece));
      }
    }
    chunk.pieces.erase(replaced);
  }
  if (add) {
    Join(position, *merge, sibling);
    Climb(position, merge->sum);
  } else {
    chunk.pieces[key] = std::move(piece);
    Climb(position, key);
  }
  return Taken::kTaken;
}

// What a server without the rule would do, for tests that take it away.
void StepGradients::CountTwice(size_t position, const SpanKey& key,
                               const GradientSource& source) {
  for (const auto& [covering, piece] : chunks_[position].pieces) {
    if (covering.use == key.use && covering.span.Contains(key.span) &&
        piece->in_memory() && piece->idle()) {
      source.AddTo(Floats(position, *piece));
      piece->log.reset();
    }
  }
}

void StepGradients::Join(size_t position, const SpanBook::Merge& merge,
                         const PiecePointer& sum) {
  ChunkGradient& chunk = chunks_[position];
  chunk.book.Merged(merge);
  chunk.pieces.erase(merge.left);
  chunk.pieces.erase(merge.right);
  sum->log.reset();  // That was one term.
  sum->kept = false;
  chunk.pieces[merge.sum] = sum;
}

void StepGradients::Climb(size_t position, SpanKey key) {
  ChunkGradient& chunk = chunks_[position];
  while (const auto merge = chunk.book.MergeOf(key)) {
    const PiecePointer left = chunk.pieces.at(merge->left);
    const PiecePointer right = chunk.pieces.at(merge->right);
    if (!left->in_memory() || !right->in_memory() || left->adding ||
        right->adding || (left->writing && right->writing)) {
      additions_.push_back({position, key});
      return;
    }
    // IEEE sums commute, so either may hold the total.
    const PiecePointer& total = left->writing ? right : left;
    const PiecePointer& term = left->writing ? left : right;
    AccumulateCpu(Floats(position, *term), Floats(position, *total));
    Join(position, *merge, total);
    key = merge->sum;
  }
  if (chunk.book.IsComplete()) {
    Completed(position);
  }
}

void StepGradients::Completed(size_t position) {
  ChunkGradient& chunk = chunks_[position];
  chunk.complete = true;
  ++complete_;
  const GradientShape& shape = shapes_[position];
  const absl::Span<const float> gradient =
      Floats(position, *chunk.pieces.begin()->second);
  for (uint64_t begin = 0; begin < shape.elem_count;
       begin += shape.block_elems) {
    const BlockStats stats =
        BlockStatsCpu(gradient.subspan(begin, shape.block_elems));
    sum_squares_.Add(stats.sum_squares);
    if (stats.non_finite > 0) {
      non_finite_[shape.tensor] += stats.non_finite;
    }
  }
  if (pool_->keep_all) {
    unlogged_.push_back(position);
    LogSome();
  }
  if (pool_->completed) {
    pool_->completed(shape.chunk, step_, Bytes(position));
  }
}

bool StepGradients::LogSome() {
  bool worked = false;
  while (!unlogged_.empty() && logging_ < kLoggingMax) {
    const size_t position = unlogged_.front();
    const auto& [key, piece] = *chunks_[position].pieces.begin();
    // Unless it was given to the log before its turn.
    if (!piece->log && !piece->writing &&
        !Append(position, key, piece, /*stay=*/true)) {
      break;
    }
    unlogged_.pop_front();
    worked = true;
  }
  return worked;
}

bool StepGradients::Work() {
  bool worked = LogSome();
  // Each addition once; those that cannot go on yet stay.
  for (size_t n = additions_.size(); n > 0; --n) {
    const Addition addition = additions_.front();
    additions_.pop_front();
    bool over = false;
    worked |= Advance(addition, &over);
    if (!over) {
      additions_.push_back(addition);
    }
  }
  return worked;
}

bool StepGradients::Advance(const Addition& addition, bool* over) {
  const auto [position, key] = addition;
  ChunkGradient& chunk = chunks_[position];
  const auto merge =
      chunk.book.Contains(key) ? chunk.book.MergeOf(key) : std::nullopt;
  if (!merge) {  // A larger span replaced it.
    *over = true;
    return true;
  }
  const PiecePointer left = chunk.pieces.at(merge->left);
  const PiecePointer right = chunk.pieces.at(merge->right);
  if (left->adding || right->adding || left->reading || right->reading) {
    return false;
  }
  if (left->in_memory() && right->in_memory()) {
    *over = !(left->writing && right->writing);
    if (*over) {
      Climb(position, key);
    }
    return *over;
  }
  if (!left->in_memory() && !right->in_memory()) {
    if (!TakeRam(position, /*make_room=*/true, &left->ram)) {
      return false;
    }
    left->kept = true;  // Or it would be the first to go again.
    ReadBack(left);
    return true;
  }
  const PiecePointer& in_ram = left->in_memory() ? left : right;
  if (in_ram->writing || pool_->scratch_taken) {
    return false;
  }
  AddFromLog(position, *merge, in_ram, left->in_memory() ? right : left);
  *over = true;
  return true;
}

void StepGradients::AddFromLog(size_t position, const SpanBook::Merge& merge,
                               const PiecePointer& in_ram,
                               const PiecePointer& in_log) {
  in_ram->adding = true;
  in_log->adding = true;
  pool_->scratch_taken = true;
  ++pool_->in_flight;
  LogOf(*in_log)->Read(
      in_log->name, *in_log->log, pool_->scratch,
      [pool = pool_, mailbox = pool_->mailbox, position, merge, in_ram, in_log,
       self =
           std::weak_ptr<StepGradients*>(self_)](const absl::Status& status) {
        mailbox->Post([pool, position, merge, in_ram, in_log, self, status] {
          --pool->in_flight;
          pool->scratch_taken = false;
          in_ram->adding = false;
          in_log->adding = false;
          const auto alive = self.lock();
          if (!status.ok()) {
            pool->fail(status);
            return;
          }
          if (!alive) {
            return;
          }
          StepGradients& step = **alive;
          // Unless a larger span has replaced a term meanwhile.
          const auto& pieces = step.chunks_[position].pieces;
          const auto is_there = [&pieces](const SpanKey& key,
                                          const PiecePointer& a,
                                          const PiecePointer& b) {
            const auto found = pieces.find(key);
            return found != pieces.end() &&
                   (found->second == a || found->second == b);
          };
          if (is_there(merge.left, in_ram, in_log) &&
              is_there(merge.right, in_ram, in_log)) {
            AccumulateCpu({reinterpret_cast<const float*>(pool->scratch),
                           step.shapes_[position].elem_count},
                          step.Floats(position, *in_ram));
            step.Join(position, merge, in_ram);
            step.Climb(position, merge.sum);
          }
        });
      });
}

bool StepGradients::SpillOne() {
  if (spilling_ >= kSpillsMax) {
    return true;
  }
  // What the update needs last first; before it whatever is complete, because
  // what waits may be added to at any moment.
  for (const bool complete : {true, false}) {
    if (!complete && logging_ > 0) {
      return true;  // Memory that can be given back soon.
    }
    for (size_t position = chunks_.size(); position-- > 0;) {
      if (chunks_[position].complete != complete) {
        continue;
      }
      for (const auto& [key, piece] : chunks_[position].pieces) {
        if (piece->in_memory() && piece->idle() && !piece->kept) {
          return Spill(position, key, piece) || spilling_ > 0;
        }
      }
    }
  }
  return spilling_ > 0;
}

bool StepGradients::Spill(size_t position, const SpanKey& key,
                          const PiecePointer& piece) {
  if (piece->log) {
    piece->ram.reset();
    return true;
  }
  return Append(position, key, piece, /*stay=*/false);
}

bool StepGradients::Append(size_t position, const SpanKey& key,
                           const PiecePointer& piece, bool stay) {
  const bool complete = chunks_[position].complete;
  const uint64_t record_bytes = LogRecordBytes(Bytes(position));
  if (complete) {
    waits_for_log_ = pool_->may_append && !pool_->may_append(record_bytes);
    if (waits_for_log_) {
      return false;
    }
  }
  piece->name = {timeline_, step_, shapes_[position].chunk,
                 complete ? kAllUses : key.use, key.span};
  piece->writing = true;
  uint32_t& going = stay ? logging_ : spilling_;
  ++going;
  ++pool_->in_flight;
  // The position may be read after `done`, which may run before Append is back.
  auto where = std::make_shared<absl::StatusOr<LogPosition>>(
      absl::InternalError("not appended"));
  *where = LogOf(*piece)->Append(
      piece->name, piece->ram.data(), Bytes(position),
      [pool = pool_, mailbox = pool_->mailbox, piece, where, stay, complete,
       self =
           std::weak_ptr<StepGradients*>(self_)](const absl::Status& status) {
        mailbox->Post([pool, piece, where, stay, complete, self, status] {
          --pool->in_flight;
          piece->writing = false;
          const auto alive = self.lock();
          if (alive) {
            --(stay ? (*alive)->logging_ : (*alive)->spilling_);
          }
          if (!status.ok() || !where->ok()) {
            pool->fail(status.ok() ? where->status() : Lost(status));
            return;
          }
          piece->log = **where;
          if (alive && complete) {
            ++(*alive)->logged_;
          }
          if (!stay && !piece->kept) {
            piece->ram.reset();
          }
        });
      });
  if (!where->ok()) {
    // Refused at once: `done` is not called.
    piece->writing = false;
    --going;
    --pool_->in_flight;
    pool_->fail(where->status());
    return false;
  }
  logged_bytes_ += complete ? record_bytes : 0;
  return true;
}

void StepGradients::ReadBack(const PiecePointer& piece) {
  BALLAST_CHECK(piece->log.has_value() && piece->ram);
  piece->reading = true;
  ++pool_->in_flight;
  LogOf(*piece)->Read(piece->name, *piece->log, piece->ram.data(),
                      [pool = pool_, mailbox = pool_->mailbox,
                       piece](const absl::Status& status) {
                        mailbox->Post([pool, piece, status] {
                          --pool->in_flight;
                          piece->reading = false;
                          if (!status.ok()) {
                            pool->fail(status);
                          }
                        });
                      });
}

absl::Span<const float> StepGradients::Ready(size_t position) const {
  const ChunkGradient& chunk = chunks_[position];
  if (!chunk.complete || chunk.pieces.empty()) {
    return {};
  }
  const Piece& piece = *chunk.pieces.begin()->second;
  return piece.in_memory() ? Floats(position, piece)
                           : absl::Span<const float>();
}

bool StepGradients::Bring(size_t position, bool now) {
  ChunkGradient& chunk = chunks_[position];
  BALLAST_CHECK(chunk.complete && !chunk.pieces.empty());
  const PiecePointer piece = chunk.pieces.begin()->second;
  piece->kept |= now;
  if (piece->ram) {
    return true;
  }
  if (!TakeRam(position, now, &piece->ram)) {
    return false;
  }
  ReadBack(piece);
  return true;
}

bool StepGradients::Copy(size_t position, std::byte* out,
                         std::function<void(const absl::Status&)> done) {
  const ChunkGradient& chunk = chunks_[position];
  if (!chunk.complete || chunk.pieces.empty()) {
    return false;
  }
  const PiecePointer piece = chunk.pieces.begin()->second;
  if (piece->in_memory()) {
    std::memcpy(out, piece->ram.data(), Bytes(position));
    done(absl::OkStatus());
    return true;
  }
  BALLAST_CHECK(piece->log.has_value());
  ++pool_->in_flight;
  LogOf(*piece)->Read(piece->name, *piece->log, out,
                      [pool = pool_, mailbox = pool_->mailbox,
                       done = std::move(done)](const absl::Status& status) {
                        mailbox->Post([pool, done, status] {
                          --pool->in_flight;
                          done(status);
                        });
                      });
  return true;
}

void StepGradients::Forget(size_t position) {
  chunks_[position].pieces.clear();
}

std::optional<size_t> StepGradients::FirstIncomplete() const {
  for (size_t position = 0; position < chunks_.size(); ++position) {
    if (!chunks_[position].complete) {
      return position;
    }
  }
  return std::nullopt;
}

}  // namespace ballast
