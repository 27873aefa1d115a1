// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/proto_json.h"

#include <cmath>
#include <string>

namespace ballast {
namespace {

using Json = nlohmann::ordered_json;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

Json Number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

// The field, or element `index` of a repeated one.
Json Value(const Message& message, const FieldDescriptor* field, int index) {
  const Reflection* reflect = message.GetReflection();
  const bool many = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return many ? reflect->GetRepeatedInt32(message, field, index)
                  : reflect->GetInt32(message, field);
    case FieldDescriptor::CPPTYPE_INT64:
      return many ? reflect->GetRepeatedInt64(message, field, index)
                  : reflect->GetInt64(message, field);
    case FieldDescriptor::CPPTYPE_UINT32:
      return many ? reflect->GetRepeatedUInt32(message, field, index)
                  : reflect->GetUInt32(message, field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return many ? reflect->GetRepeatedUInt64(message, field, index)
                  : reflect->GetUInt64(message, field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return Number(many ? reflect->GetRepeatedDouble(message, field, index)
                         : reflect->GetDouble(message, field));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return Number(static_cast<double>(
          many ? reflect->GetRepeatedFloat(message, field, index)
               : reflect->GetFloat(message, field)));
    case FieldDescriptor::CPPTYPE_BOOL:
      return many ? reflect->GetRepeatedBool(message, field, index)
                  : reflect->GetBool(message, field);
    case FieldDescriptor::CPPTYPE_ENUM:
      return (many ? reflect->GetRepeatedEnum(message, field, index)
                   : reflect->GetEnum(message, field))
          ->name();
    case FieldDescriptor::CPPTYPE_STRING:
      return many ? reflect->GetRepeatedString(message, field, index)
                  : reflect->GetString(message, field);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return MessageToJson(
          many ? reflect->GetRepeatedMessage(message, field, index)
               : reflect->GetMessage(message, field));
  }
  return nullptr;
}

}  // namespace

Json MessageToJson(const Message& message) {
  Json out = Json::object();
  const auto* descriptor = message.GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* field = descriptor->field(i);
    if (field->type() == FieldDescriptor::TYPE_BYTES) continue;
    if (!field->is_repeated()) {
      out[field->name()] = Value(message, field, 0);
      continue;
    }
    Json list = Json::array();
    const int size = message.GetReflection()->FieldSize(message, field);
    for (int j = 0; j < size; ++j) {
      list.push_back(Value(message, field, j));
    }
    out[field->name()] = std::move(list);
  }
  return out;
}

}  // namespace ballast
