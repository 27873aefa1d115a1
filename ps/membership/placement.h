// SPDX-License-Identifier: Apache-2.0
// Which server owns which chunk. Balanced in bytes of state, and every unit
// spread over the servers, so that a fetch of one unit draws on all of them.
// The same table and count give the same placement, whatever order the servers
// joined in. Stateless; thread-safe.

#pragma once

#include <cstdint>
#include <vector>

#include "common/job.h"
#include "common/layout.h"

namespace ballast {

// Fields of an element that state_hash covers: the master parameter and the
// optimizer's slots.
uint32_t HashedFields(OptimizerKind optimizer);

// Bytes of state of one element of `tensor`: fp32 master, fp32 slots and the
// served copy when workers fetch another type.
uint64_t StateBytesPerElem(const TensorSpec& tensor, OptimizerKind optimizer);

// All tensors of the model.
uint64_t StateBytes(const ModelLayout& layout, OptimizerKind optimizer);

// Entry i is the server, 0..servers-1, of chunk i. The fullest and the emptiest
// server differ by at most 5 % of the mean or by the largest chunk, whichever
// is more. With more servers than chunks some own nothing. servers >= 1.
std::vector<uint32_t> PlaceChunks(const ChunkTable& table,
                                  OptimizerKind optimizer, uint32_t servers);

}  // namespace ballast
