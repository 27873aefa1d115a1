// SPDX-License-Identifier: Apache-2.0
#include "rpc/status.h"

#include <string>

namespace ballast {

grpc::Status ToGrpcStatus(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()),
          std::string(status.message())};
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  return {static_cast<absl::StatusCode>(status.error_code()),
          status.error_message()};
}

}  // namespace ballast
