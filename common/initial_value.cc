// SPDX-License-Identifier: Apache-2.0
#include "common/initial_value.h"

#include <algorithm>

#include "common/check.h"
#include "common/hash.h"
#include "common/random.h"

namespace ballast {

void FillInitial(const TensorSpec& tensor, uint64_t seed, uint64_t begin,
                 absl::Span<float> out) {
  const uint64_t elem_count = tensor.elem_count();
  BALLAST_CHECK(begin <= elem_count && out.size() <= elem_count - begin);
  switch (tensor.init) {
    case Init::kZeros:
      std::fill(out.begin(), out.end(), 0.0f);
      return;
    case Init::kOnes:
      std::fill(out.begin(), out.end(), 1.0f);
      return;
    case Init::kNormal: {
      const uint64_t stream = HashBytes(tensor.name).low;
      for (uint64_t i = 0; i < out.size(); ++i) {
        out[i] = static_cast<float>(tensor.init_std *
                                    Normal(seed, stream, begin + i));
      }
      return;
    }
  }
  BALLAST_CHECK(false);  // Decode admits no other kind.
}

}  // namespace ballast
