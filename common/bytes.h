// SPDX-License-Identifier: Apache-2.0
// Little-endian encoding with bounds checks. Every format of ours (messages,
// records, log) is written and read through these two classes.

#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "absl/strings/string_view.h"

namespace ballast {

// Appends to a string. The machine must be little-endian (checked below).
class ByteWriter {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_arithmetic_v<T>);
    char raw[sizeof(T)];
    std::memcpy(raw, &value, sizeof(T));
    out_.append(raw, sizeof(T));
  }
  // Length (u32) then bytes.
  void PutString(absl::string_view text) {
    Put(static_cast<uint32_t>(text.size()));
    out_.append(text.data(), text.size());
  }
  const std::string& bytes() const { return out_; }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads from a view it does not own. After the first short read ok() is false
// and every further read returns zero; nothing is read out of bounds.
class ByteReader {
 public:
  explicit ByteReader(absl::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T Get() {
    static_assert(std::is_arithmetic_v<T>);
    T value{};
    if (!ok_ || rest_.size() < sizeof(T)) {
      ok_ = false;
      return T{};
    }
    std::memcpy(&value, rest_.data(), sizeof(T));
    rest_.remove_prefix(sizeof(T));
    return value;
  }
  std::string GetString() {
    const auto size = Get<uint32_t>();
    if (!ok_ || rest_.size() < size) {
      ok_ = false;
      return {};
    }
    std::string text(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return text;
  }
  bool ok() const { return ok_; }
  uint64_t remaining() const { return rest_.size(); }

 private:
  absl::string_view rest_;
  bool ok_ = true;
};

static_assert(std::endian::native == std::endian::little);

}  // namespace ballast
