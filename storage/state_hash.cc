// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <vector>

#include "common/bytes.h"
#include "common/check.h"
#include "storage/checkpoint.h"

namespace ballast {
namespace {

// Fields that the state consists of, in the order of their digests.
constexpr Field kStateFields[] = {Field::kParam, Field::kSlot0, Field::kSlot1};

}  // namespace

void PlaceDigests(const TensorSpec& tensor, uint64_t begin,
                  const RecordLayout& record, const BlockDigests& digests,
                  BlockDigests* whole) {
  BALLAST_CHECK(begin % record.block_elems == 0);
  const uint64_t first_block = begin / record.block_elems;
  const uint64_t fields = static_cast<uint64_t>(
      std::count_if(std::begin(kStateFields), std::end(kStateFields),
                    [&](Field field) { return record.at(field).bytes != 0; }));
  whole->resize(fields * tensor.block_count());
  uint64_t place = first_block;
  for (const Field field : kStateFields) {
    if (record.at(field).bytes == 0) {
      continue;
    }
    for (uint64_t b = 0; b < record.block_count(); ++b) {
      (*whole)[place + b] = digests[DigestIndex(record, field, b)];
    }
    place += tensor.block_count();
  }
}

Hash128 StateHash(const ModelLayout& layout,
                  const std::vector<BlockDigests>& digests) {
  BALLAST_CHECK(digests.size() == layout.tensors.size());
  std::vector<size_t> order(layout.tensors.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return layout.tensors[a].name < layout.tensors[b].name;
  });
  ByteWriter writer;
  for (const size_t t : order) {
    writer.PutString(layout.tensors[t].name);
    writer.Put(uint64_t{digests[t].size()});
    for (const Hash128& digest : digests[t]) {
      writer.Put(digest.high);
      writer.Put(digest.low);
    }
  }
  return HashBytes(writer.bytes());
}

}  // namespace ballast
