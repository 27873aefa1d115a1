// SPDX-License-Identifier: Apache-2.0
#include "common/log.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/check.h"

namespace ballast {
namespace {

std::string& Role() {
  static std::string* role = new std::string();
  return *role;
}

const char* SeverityName(Severity severity) {
  switch (severity) {
    case Severity::kInfo:
      return "INFO";
    case Severity::kWarn:
      return "WARN";
    case Severity::kError:
      return "ERROR";
  }
  return "?";
}

void WriteLine(const std::string& line) {
  // A log line that cannot be written has nowhere else to go.
  [[maybe_unused]] const ssize_t written =
      write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace

LogValue::LogValue(absl::string_view text) {
  if (text.empty() || text.find_first_of(" \"\n=") != text.npos) {
    text_ = absl::StrCat("\"", absl::CEscape(text), "\"");
  } else {
    text_ = std::string(text);
  }
}

void LogEvent(Severity severity, absl::string_view event,
              std::initializer_list<LogField> fields) {
  std::string line = absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(),
                                      absl::UTCTimeZone());
  absl::StrAppend(&line, " ", SeverityName(severity), " event=", event);
  if (!Role().empty()) {
    absl::StrAppend(&line, " role=", Role());
  }
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=", field.value.text());
  }
  line.push_back('\n');
  WriteLine(line);
}

void SetLogRole(absl::string_view role) { Role() = std::string(role); }

void CheckFailed(const char* file, int line, const char* condition) {
  WriteLine(
      absl::StrCat("check failed at ", file, ":", line, ": ", condition, "\n"));
  std::abort();
}

}  // namespace ballast
