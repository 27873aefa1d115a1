// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/span_book.h"

#include "common/check.h"

namespace ballast {

bool SpanBook::IsKnown(const SpanKey& key) const {
  // Uses above 0 leave the book when they are added to use 0.
  if (key.use != 0 && key.use < added_uses_) {
    return true;
  }
  for (auto node = nodes_.lower_bound({key.use, {}});
       node != nodes_.end() && node->first.use == key.use; ++node) {
    if (node->first.span.Contains(key.span)) {
      return true;
    }
  }
  return false;
}

std::vector<SpanKey> SpanBook::Insert(const SpanKey& key,
                                      std::optional<double> loss) {
  BALLAST_CHECK(key.use < uses_ && IsNode(key.span, root_.count));
  BALLAST_CHECK(!IsKnown(key));
  std::vector<SpanKey> replaced;
  auto node = nodes_.lower_bound({key.use, {}});
  while (node != nodes_.end() && node->first.use == key.use) {
    if (key.span.Contains(node->first.span)) {
      replaced.push_back(node->first);
      node = nodes_.erase(node);
    } else {
      ++node;
    }
  }
  nodes_[key] = loss;
  return replaced;
}

std::optional<SpanBook::Merge> SpanBook::MergeOfRoot(uint32_t use) const {
  const Merge merge = {RootKey(), {added_uses_, root_}, RootKey()};
  if (added_uses_ == uses_ || (use != 0 && use != added_uses_)) {
    return std::nullopt;
  }
  if (nodes_.contains(use == 0 ? merge.right : merge.left)) {
    return merge;
  }
  return std::nullopt;
}

std::optional<SpanBook::Merge> SpanBook::MergeOf(const SpanKey& key) const {
  const std::optional<Span> parent = Parent(key.span, root_.count);
  if (!parent) {
    return MergeOfRoot(key.use);
  }
  const Merge merge = {{key.use, LeftChild(*parent)},
                       {key.use, RightChild(*parent)},
                       {key.use, *parent}};
  if (nodes_.contains(key == merge.left ? merge.right : merge.left)) {
    return merge;
  }
  return std::nullopt;
}

std::optional<SpanBook::Merge> SpanBook::NextMerge() const {
  for (const auto& [key, loss] : nodes_) {
    if (const std::optional<Merge> merge = MergeOf(key)) {
      return merge;
    }
  }
  return std::nullopt;
}

void SpanBook::Merged(const Merge& merge) {
  const auto left = nodes_.find(merge.left);
  const auto right = nodes_.find(merge.right);
  BALLAST_CHECK(left != nodes_.end() && right != nodes_.end());
  std::optional<double> loss = left->second;
  if (right->second) {
    loss = loss ? *loss + *right->second : *right->second;
  }
  if (merge.left.use != merge.right.use) {
    ++added_uses_;
  }
  nodes_.erase(right);
  nodes_.erase(merge.left);
  nodes_[merge.sum] = loss;
}

bool SpanBook::IsComplete() const {
  return added_uses_ == uses_ && nodes_.contains(RootKey());
}

std::optional<double> SpanBook::Loss() const {
  return IsComplete() ? nodes_.at(RootKey()) : std::nullopt;
}

std::vector<SpanKey> SpanBook::Nodes() const {
  std::vector<SpanKey> keys;
  for (const auto& [key, loss] : nodes_) {
    keys.push_back(key);
  }
  return keys;
}

}  // namespace ballast
