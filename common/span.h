// SPDX-License-Identifier: Apache-2.0
// Spans of micro-batches and the fixed binary tree over them (docs/PROTOCOL.md,
// section 2). Every sum of gradients or losses follows this tree, so its bits
// do not depend on who computed which part.
//
// The root is [0, total). A node of more than one micro-batch splits at the
// largest power of two below its length. So two nodes are nested or disjoint.

#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

namespace ballast {

// Micro-batches [first, first + count).
struct Span {
  uint32_t first = 0;
  uint32_t count = 0;
  uint32_t end() const { return first + count; }
  bool Contains(const Span& other) const {
    return first <= other.first && other.end() <= end();
  }
  friend bool operator==(const Span&, const Span&) = default;
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 misreads <=>.
  friend auto operator<=>(const Span&, const Span&) = default;
};

// The two children of a node with count > 1.
Span LeftChild(const Span& node);
Span RightChild(const Span& node);

// Whether `span` is a node of the tree over [0, total).
bool IsNode(const Span& span, uint32_t total);

// The parent of a node; nullopt for the root. `node` must be a node.
std::optional<Span> Parent(const Span& node, uint32_t total);

// The fewest nodes whose disjoint union is [first, first + count), ascending.
std::vector<Span> Cover(const Span& range, uint32_t total);

// Micro-batches 0..total-1 dealt to `workers` ranges that differ in length by
// at most one, in order. Entry w is the range of worker w; 1 <= workers <=
// total.
std::vector<Span> DealSpans(uint32_t total, uint32_t workers);

}  // namespace ballast
