// SPDX-License-Identifier: Apache-2.0
// Which gradients of one chunk are there, which can be added, and when the
// chunk is complete (docs/PROTOCOL.md, section 2). Names only: the bytes are
// the caller's, which adds what NextMerge says and nothing else, so the sum has
// the same bits whatever arrived in whatever order.
//
// Every use of the tensor has its own span tree; siblings are added left to
// right. Complete uses are added in the order of their numbers into the root of
// use 0, which is in the end the only node left.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "common/span.h"

namespace ballast {

// A node: one span of one use.
struct SpanKey {
  uint32_t use = 0;
  Span span;
  friend bool operator==(const SpanKey&, const SpanKey&) = default;
  friend bool operator<(const SpanKey& a, const SpanKey& b) {
    return a.use != b.use ? a.use < b.use : a.span < b.span;
  }
};

// Pure; thread-compatible.
class SpanBook {
 public:
  // `micro_batches` >= 1 is the length of the tree, `uses` >= 1.
  SpanBook(uint32_t micro_batches, uint32_t uses)
      : root_{0, micro_batches}, uses_(uses) {}

  // Whether a node would bring nothing new: it is inside one that is there, or
  // its use is added already.
  bool IsKnown(const SpanKey& key) const;

  // Puts a node in and returns the nodes that it replaces, which are gone.
  // `key` must be a node of the tree, of a use that exists, and not IsKnown.
  // `loss` belongs to the node when it carries one.
  std::vector<SpanKey> Insert(const SpanKey& key, std::optional<double> loss);

  // right is to be added to left, which then is the node `sum`.
  struct Merge {
    SpanKey left;
    SpanKey right;
    SpanKey sum;
    friend bool operator==(const Merge&, const Merge&) = default;
  };
  // The addition that `key`, taken as being there, and a node that is there
  // allow; nullopt: it waits.
  std::optional<Merge> MergeOf(const SpanKey& key) const;
  // Any addition that is possible.
  std::optional<Merge> NextMerge() const;
  // The addition was done. Both nodes must be there.
  void Merged(const Merge& merge);

  bool Contains(const SpanKey& key) const { return nodes_.contains(key); }
  // The only node is the whole sum: key {0, root}.
  bool IsComplete() const;
  SpanKey RootKey() const { return {0, root_}; }
  // Of the whole sum; nullopt before it is complete, and when no push had one.
  std::optional<double> Loss() const;
  // Nodes that are there, in order of (use, span).
  std::vector<SpanKey> Nodes() const;

 private:
  std::optional<Merge> MergeOfRoot(uint32_t use) const;

  const Span root_;
  const uint32_t uses_;
  // Uses whose sums are in {0, root}, once that is there.
  uint32_t added_uses_ = 1;
  std::map<SpanKey, std::optional<double>> nodes_;
};

}  // namespace ballast
