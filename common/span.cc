// SPDX-License-Identifier: Apache-2.0
#include "common/span.h"

#include <bit>

#include "common/check.h"

namespace ballast {
namespace {

void CoverInto(const Span& node, const Span& range, std::vector<Span>* out) {
  if (range.end() <= node.first || node.end() <= range.first) {
    return;
  }
  if (range.Contains(node)) {
    out->push_back(node);
    return;
  }
  CoverInto(LeftChild(node), range, out);
  CoverInto(RightChild(node), range, out);
}

}  // namespace

Span LeftChild(const Span& node) {
  BALLAST_CHECK(node.count > 1);
  return {node.first, std::bit_floor(node.count - 1)};
}

Span RightChild(const Span& node) {
  const Span left = LeftChild(node);
  return {left.end(), node.count - left.count};
}

std::optional<Span> Parent(const Span& node, uint32_t total) {
  Span walk = {0, total};
  if (node == walk) {
    return std::nullopt;
  }
  while (walk.count > 1) {
    const Span left = LeftChild(walk);
    const Span next = left.Contains(node) ? left : RightChild(walk);
    if (next == node) {
      return walk;
    }
    walk = next;
  }
  BALLAST_CHECK(false);
  return std::nullopt;
}

bool IsNode(const Span& span, uint32_t total) {
  if (span.count == 0 || span.first >= total || span.count > total ||
      span.end() > total) {
    return false;
  }
  Span walk = {0, total};
  while (walk != span) {
    if (walk.count <= 1 || walk.count < span.count) {
      return false;
    }
    const Span left = LeftChild(walk);
    walk = span.first < left.end() ? left : RightChild(walk);
  }
  return true;
}

std::vector<Span> Cover(const Span& range, uint32_t total) {
  std::vector<Span> nodes;
  if (total > 0) {
    CoverInto({0, total}, range, &nodes);
  }
  return nodes;
}

std::vector<Span> DealSpans(uint32_t total, uint32_t workers) {
  BALLAST_CHECK(workers >= 1 && workers <= total);
  std::vector<Span> ranges;
  for (uint32_t worker = 0; worker < workers; ++worker) {
    const auto begin =
        static_cast<uint32_t>(uint64_t{total} * worker / workers);
    const auto end =
        static_cast<uint32_t>(uint64_t{total} * (worker + 1) / workers);
    ranges.push_back({begin, end - begin});
  }
  return ranges;
}

}  // namespace ballast
