// SPDX-License-Identifier: Apache-2.0
// The body of one chunk's state, as it stands on disk and in memory: a header
// with a checksum per block, then the fields. Format: docs/FORMATS.md.
//
// The image of a chunk is one buffer of `total_bytes` that starts on a 4 KiB
// boundary. The field that workers fetch comes first, so that a fetch of a
// chunk that is on disk reads a prefix. Stateless; thread-safe.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/hash.h"
#include "common/job.h"
#include "common/layout.h"

namespace ballast {

// Fields of a chunk's state. kServed exists when workers fetch bf16; with fp32
// they fetch kParam itself.
enum class Field : uint8_t {
  kServed = 0,
  kParam = 1,
  kSlot0 = 2,  // exp_avg, or the momentum buffer of SGD.
  kSlot1 = 3,  // exp_avg_sq; AdamW only.
};
inline constexpr int kFieldCount = 4;
inline constexpr uint64_t kPageBytes = 4096;

// "param", "exp_avg", "exp_avg_sq", "momentum_buffer", "served".
absl::string_view FieldName(Field field, OptimizerKind optimizer);

// Where the fields of one chunk lie in its image.
struct RecordLayout {
  struct Place {
    uint64_t offset = 0;  // From the start of the image; a multiple of 64.
    uint64_t bytes = 0;   // 0 when the chunk has no such field.
  };
  std::array<Place, kFieldCount> fields;
  uint64_t header_bytes = 0;  // A multiple of 64.
  uint64_t prefix_bytes = 0;  // Header and first field; a multiple of 4 KiB.
  uint64_t total_bytes = 0;   // A multiple of 4 KiB.
  uint64_t block_elems = 0;
  uint64_t elem_count = 0;

  static RecordLayout For(const TensorSpec& tensor, const Chunk& chunk,
                          OptimizerKind optimizer);
  Field first_field() const {
    return fields[0].bytes != 0 ? Field::kServed : Field::kParam;
  }
  const Place& at(Field field) const {
    return fields[static_cast<size_t>(field)];
  }
  uint64_t block_count() const {
    return (elem_count + block_elems - 1) / block_elems;
  }
};

// What a record says of itself.
struct RecordId {
  Hash128 run;  // The run it belongs to.
  uint64_t timeline = 0;
  uint64_t version = 0;  // Parameters after this step.
  Hash128 tensor;        // Hash of the tensor's name.
  uint64_t begin = 0;    // Elements of the tensor.
  uint64_t end = 0;
  friend bool operator==(const RecordId&, const RecordId&) = default;
};

// Digests of the blocks of every field that exists, in field order, then block
// order: the leaves of state_hash (without kServed).
using BlockDigests = std::vector<Hash128>;

// Computes the digests of the fields in `image` and writes the header in front
// of them; padding becomes zeros. Returns the digests.
// image.size() == layout.total_bytes.
BlockDigests SealRecord(const RecordLayout& layout, const RecordId& id,
                        absl::Span<std::byte> image);

// Digests of the fields alone, without touching the header.
BlockDigests DigestFields(const RecordLayout& layout,
                          absl::Span<const std::byte> image);

// Checks a record, or its prefix (image.size() == layout.prefix_bytes), read
// from `where` against what was expected.
// Errors: DATA_LOSS  names `where`, the field and block, or the difference of
//         identity (an old record in a reused extent, another run).
absl::Status CheckRecord(const RecordLayout& layout, const RecordId& expected,
                         absl::Span<const std::byte> image,
                         absl::string_view where);

// The header alone: identity, layout and its own checksum. image.size() is at
// least layout.header_bytes. Errors: as CheckRecord.
absl::Status CheckHeader(const RecordLayout& layout, const RecordId& expected,
                         absl::Span<const std::byte> image,
                         absl::string_view where);

// The digests that the header of a checked image holds.
BlockDigests ReadDigests(const RecordLayout& layout,
                         absl::Span<const std::byte> image);

// Where in BlockDigests the digest of a block of an existing field stands.
uint64_t DigestIndex(const RecordLayout& layout, Field field, uint64_t block);

}  // namespace ballast
