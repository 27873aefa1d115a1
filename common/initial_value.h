// SPDX-License-Identifier: Apache-2.0
// The values a run starts from: a pure function of (seed, tensor name,
// element), so that every server fills its own chunks, in any order, and chunk
// size and placement change no bit.

#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "common/layout.h"

namespace ballast {

// Writes the initial values of elements [begin, begin + out.size()) of
// `tensor`, which must lie inside it. Init::kNormal: element i is init_std *
// Normal(seed, stream, i) rounded to fp32, where stream is the low half of
// HashBytes(name). Thread-safe.
void FillInitial(const TensorSpec& tensor, uint64_t seed, uint64_t begin,
                 absl::Span<float> out);

}  // namespace ballast
