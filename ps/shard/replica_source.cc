// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/replica_source.h"

#include <algorithm>

#include "common/check.h"

namespace ballast {

void ReplicaSource::Order(const std::set<uint32_t>& chunks) {
  std::erase_if(chunks_, [&chunks](const auto& entry) {
    return !chunks.contains(entry.first);
  });
  for (const uint32_t chunk : chunks) {
    if (const auto [copy, is_new] = chunks_.try_emplace(chunk); is_new) {
      copy->second.epoch = ++epochs_;
    }
  }
}

void ReplicaSource::Forget(const std::vector<uint32_t>& chunks) {
  for (const uint32_t chunk : chunks) {
    chunks_.erase(chunk);
  }
}

void ReplicaSource::Restart(Copy* copy) {
  const std::map<uint64_t, uint64_t> gradients = std::move(copy->gradients);
  *copy = {};
  copy->epoch = ++epochs_;
  copy->gradients = gradients;
}

void ReplicaSource::OnReset() {
  open_ = false;
  credit_ = 0;
  sequence_ = 0;
  in_flight_.clear();
  mark_sent_ = mark_synced_;
  for (auto& [chunk, copy] : chunks_) {
    Restart(&copy);
  }
}

void ReplicaSource::OnHello(
    uint64_t credit_bytes, const std::map<uint32_t, uint64_t>& synced_through) {
  open_ = true;
  credit_ = credit_bytes;
  for (const auto& [chunk, through] : synced_through) {
    const auto found = chunks_.find(chunk);
    if (found == chunks_.end()) {
      continue;
    }
    Copy& copy = found->second;
    // What lies behind must be at hand without a gap, or not exist yet.
    const auto newest =
        copy.gradients.empty() ? through : copy.gradients.rbegin()->first;
    const bool has_next =
        newest <= through || copy.gradients.contains(through + 1);
    if (copy.phase != Phase::kWanted || !has_next || through < dropped_) {
      continue;
    }
    copy.phase = Phase::kFollowing;
    copy.base = through;
    copy.base_synced = true;
    copy.synced = through;
    copy.next = through + 1;
  }
}

void ReplicaSource::OnAck(uint64_t sequence, uint64_t credit_bytes) {
  credit_ += credit_bytes;
  while (!in_flight_.empty() && in_flight_.front().sequence <= sequence) {
    const InFlight done = in_flight_.front();
    in_flight_.pop_front();
    if (done.kind == Kind::kMark) {
      mark_synced_ = std::max(mark_synced_, done.step);
      continue;
    }
    const auto found = chunks_.find(done.chunk);
    if (found == chunks_.end() || found->second.epoch != done.epoch) {
      continue;
    }
    Copy& copy = found->second;
    if (done.kind == Kind::kPiece) {
      if (done.last_piece) {
        copy.base_synced = true;
        copy.synced = copy.base;
      }
    } else {
      copy.synced = std::max(copy.synced, done.step);
    }
  }
}

void ReplicaSource::OnRefused(uint64_t sequence) {
  for (const InFlight& sent : in_flight_) {
    const auto found = chunks_.find(sent.chunk);
    if (sent.sequence == sequence && sent.kind != Kind::kMark &&
        found != chunks_.end() && found->second.epoch == sent.epoch) {
      Restart(&found->second);
    }
  }
}

void ReplicaSource::Withdraw(uint64_t sequence) {
  OnRefused(sequence);
  std::erase_if(in_flight_, [this, sequence](const InFlight& sent) {
    credit_ += sent.sequence == sequence ? sent.bytes : 0;
    return sent.sequence == sequence;
  });
}

void ReplicaSource::OnGradient(uint32_t chunk, uint64_t step, uint64_t bytes) {
  if (const auto found = chunks_.find(chunk); found != chunks_.end()) {
    found->second.gradients[step] = bytes;
  }
}

void ReplicaSource::OnDropped(uint64_t step) {
  dropped_ = std::max(dropped_, step);
  for (auto& [chunk, copy] : chunks_) {
    copy.gradients.erase(copy.gradients.begin(),
                         copy.gradients.upper_bound(step));
    if (Awaits(copy, step)) {  // It lacks what nobody has any more.
      Restart(&copy);
    }
  }
}

void ReplicaSource::OnComplete(uint64_t step) {
  for (auto& [chunk, copy] : chunks_) {
    if (Awaits(copy, step) && !copy.gradients.contains(copy.next)) {
      Restart(&copy);
    }
  }
}

void ReplicaSource::OnVote(uint64_t step, uint64_t bytes) {
  mark_step_ = step;
  mark_bytes_ = bytes;
}

bool ReplicaSource::Take(uint64_t bytes) {
  if (bytes > credit_) {
    return false;
  }
  credit_ -= bytes;
  return true;
}

ReplicaSource::Send ReplicaSource::Record(Kind kind, uint32_t chunk,
                                          uint64_t step, uint64_t bytes,
                                          bool last_piece) {
  const auto found = chunks_.find(chunk);
  in_flight_.push_back({++sequence_, kind, chunk,
                        found == chunks_.end() ? 0 : found->second.epoch, step,
                        bytes, last_piece});
  return {kind, sequence_, chunk, step, 0, bytes};
}

// Oldest step first: votes of both sides wait for it.
std::optional<ReplicaSource::Send> ReplicaSource::NextGradient() {
  std::pair<const uint32_t, Copy>* first = nullptr;
  for (auto& entry : chunks_) {
    Copy& copy = entry.second;
    if (copy.phase == Phase::kFollowing && copy.gradients.contains(copy.next) &&
        (first == nullptr || copy.next < first->second.next)) {
      first = &entry;
    }
  }
  if (first == nullptr) {
    return std::nullopt;
  }
  Copy& copy = first->second;
  const uint64_t bytes = copy.gradients.at(copy.next);
  if (!Take(bytes)) {
    return Send{};
  }
  return Record(Kind::kGradient, first->first, copy.next++, bytes, false);
}

std::optional<ReplicaSource::Send> ReplicaSource::NextMark() {
  const auto is_behind = [this](const auto& entry) {
    return entry.second.phase != Phase::kFollowing ||
           entry.second.next <= mark_step_;
  };
  if (mark_step_ <= mark_sent_ || chunks_.empty() ||
      std::any_of(chunks_.begin(), chunks_.end(), is_behind)) {
    return std::nullopt;
  }
  if (!Take(mark_bytes_)) {
    return Send{};
  }
  mark_sent_ = mark_step_;
  return Record(Kind::kMark, 0, mark_step_, mark_bytes_, false);
}

// One base at a time: what is half sent holds memory at the target.
std::optional<ReplicaSource::Send> ReplicaSource::NextPiece() {
  std::pair<const uint32_t, Copy>* wanted = nullptr;
  for (auto& entry : chunks_) {
    Copy& copy = entry.second;
    if (copy.phase == Phase::kOpening) {
      return std::nullopt;
    }
    if (copy.phase == Phase::kBase) {
      const uint64_t bytes =
          std::min(piece_bytes_, copy.base_bytes - copy.offset);
      if (!Take(bytes)) {
        return Send{};
      }
      const bool is_last = copy.offset + bytes == copy.base_bytes;
      Send send = Record(Kind::kPiece, entry.first, copy.base, bytes, is_last);
      send.offset = copy.offset;
      copy.offset += bytes;
      copy.phase = is_last ? Phase::kFollowing : Phase::kBase;
      return send;
    }
    if (copy.phase == Phase::kWanted && wanted == nullptr) {
      wanted = &entry;
    }
  }
  if (wanted == nullptr) {
    return std::nullopt;
  }
  wanted->second.phase = Phase::kOpening;
  return Send{Kind::kOpenBase, 0, wanted->first, 0, 0, 0};
}

ReplicaSource::Send ReplicaSource::Next() {
  if (!open_) {
    return {};
  }
  if (const auto gradient = NextGradient()) {
    return *gradient;
  }
  if (const auto mark = NextMark()) {
    return *mark;
  }
  return NextPiece().value_or(Send{});
}

void ReplicaSource::OnBase(uint32_t chunk, uint64_t version, uint64_t bytes) {
  const auto found = chunks_.find(chunk);
  if (found == chunks_.end() || found->second.phase != Phase::kOpening) {
    return;  // Withdrawn, or begun again, meanwhile.
  }
  Copy& copy = found->second;
  copy.phase = Phase::kBase;
  copy.base = version;
  copy.base_bytes = bytes;
  copy.offset = 0;
  copy.next = version + 1;
}

void ReplicaSource::OnNoBase(uint32_t chunk) {
  const auto found = chunks_.find(chunk);
  if (found != chunks_.end() && found->second.phase == Phase::kOpening) {
    found->second.phase = Phase::kWanted;
  }
}

std::vector<uint32_t> ReplicaSource::InSync(uint64_t step) const {
  std::vector<uint32_t> chunks;
  for (const auto& [chunk, copy] : chunks_) {
    if (copy.base_synced && copy.synced >= step) {
      chunks.push_back(chunk);
    }
  }
  return chunks;
}

bool ReplicaSource::AllInSync(uint64_t step) const {
  return !chunks_.empty() && InSync(step).size() == chunks_.size();
}

bool ReplicaSource::IsClose(uint64_t step) const {
  return std::any_of(chunks_.begin(), chunks_.end(), [step](const auto& entry) {
    return entry.second.base_synced && entry.second.synced < step;
  });
}

uint64_t ReplicaSource::unacknowledged_bytes() const {
  uint64_t bytes = 0;
  for (const InFlight& sent : in_flight_) {
    bytes += sent.bytes;
  }
  return bytes;
}

}  // namespace ballast
