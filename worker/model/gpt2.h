// SPDX-License-Identifier: Apache-2.0
// The GPT-2 family (Radford et al. 2019): token and position embeddings,
// pre-norm blocks of attention and a GELU layer, a head that may share the
// token embedding. Tensor names and storage are those of the published files.

#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/model/family.h"

namespace ballast {

absl::StatusOr<std::unique_ptr<ModelFamily>> MakeGpt2(const Job& job);

}  // namespace ballast
