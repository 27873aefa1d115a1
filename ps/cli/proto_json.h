// SPDX-License-Identifier: Apache-2.0
// A protobuf message as JSON for scripts: field names of the .proto, integers
// as numbers (protobuf's own printer quotes 64-bit ones), every field present,
// enums by name, NaN and infinities as null, bytes left out.

#pragma once

#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>

namespace ballast {

nlohmann::ordered_json MessageToJson(const google::protobuf::Message& message);

}  // namespace ballast
