// SPDX-License-Identifier: Apache-2.0
// One line per event on standard error: UTC time, severity, an event name to
// grep, then key=value fields. Printed on change, never per tick.

#pragma once

#include <initializer_list>
#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast {

enum class Severity { kInfo, kWarn, kError };

// A field value; strings with spaces or quotes are printed quoted.
class LogValue {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): reads as {"key", value}.
  LogValue(absl::string_view text);
  LogValue(const char* text)  // NOLINT(google-explicit-constructor)
      : LogValue(absl::string_view(text)) {}
  LogValue(const std::string& text)  // NOLINT(google-explicit-constructor)
      : LogValue(absl::string_view(text)) {}
  template <typename T,
            typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  LogValue(T number)  // NOLINT(google-explicit-constructor)
      : text_(absl::StrCat(number)) {}

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

struct LogField {
  absl::string_view key;
  LogValue value;
};

// Thread-safe; a line is written with one system call.
void LogEvent(Severity severity, absl::string_view event,
              std::initializer_list<LogField> fields = {});

// Appended to every line as `role=name`. Call once, at the top of main.
void SetLogRole(absl::string_view role);

}  // namespace ballast
