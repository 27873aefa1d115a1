// SPDX-License-Identifier: Apache-2.0
// absl::Status over gRPC and back; the codes are the same numbers.

#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace ballast {

grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace ballast
