// SPDX-License-Identifier: Apache-2.0
#include "common/job_file.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>
#include <numeric>
#include <sstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/job_keys.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

using Table = std::vector<JobKey>;

// What a file or a --set says of one key.
struct Given {
  std::string text;
  std::string source;  // As in ConfigEntry.
  std::string where;   // In front of an error: "job.yaml:7", "--set a.b=c".
};
using GivenMap = std::map<std::string, Given>;

absl::Status Wrong(absl::string_view where, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", what));
}

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

absl::string_view FieldOf(absl::string_view key) {
  return key.substr(key.find('.') + 1);
}

// The key that was probably meant; a bare field ("steps") finds its section,
// a field in the wrong section the right one.
std::string NearestKey(const Table& table, absl::string_view name) {
  const std::string* nearest = nullptr;
  size_t least = 0;
  for (const JobKey& key : table) {
    const size_t whole = EditDistance(name, key.name);
    const size_t field = EditDistance(FieldOf(name), FieldOf(key.name)) + 1;
    const size_t distance = std::min(whole, field);
    if (nearest == nullptr || distance < least) {
      nearest = &key.name;
      least = distance;
    }
  }
  return *nearest;
}

std::string NearestSection(const Table& table, absl::string_view name) {
  std::string nearest;
  size_t least = 0;
  for (const JobKey& key : table) {
    const std::string section = key.name.substr(0, key.name.find('.'));
    const size_t distance = EditDistance(name, section);
    if (nearest.empty() || distance < least) {
      nearest = section;
      least = distance;
    }
  }
  return nearest;
}

bool IsSection(const Table& table, absl::string_view name) {
  return NearestSection(table, name) == name;
}

bool IsKey(const Table& table, absl::string_view name) {
  return std::any_of(table.begin(), table.end(),
                     [name](const JobKey& key) { return key.name == name; });
}

// Where a key stands in the file or on the command line.
struct Place {
  std::string path;  // Of the file; empty: `set` below.
  std::string set;   // "worker.memory=4MiB".

  std::string Where(const YAML::Node& node) const {
    return path.empty() ? absl::StrCat("--set ", set)
                        : absl::StrCat(path, ":", node.Mark().line + 1);
  }
  std::string Source(const YAML::Node& node) const {
    return path.empty() ? "--set" : Where(node);
  }
};

absl::Status TakeValue(const Table& table, const Place& place,
                       const std::string& name, const YAML::Node& at,
                       const YAML::Node& value, GivenMap* given) {
  const std::string where = place.Where(at);
  if (!IsKey(table, name)) {
    return Wrong(where, absl::StrCat(name, " is not a key; did you mean ",
                                     NearestKey(table, name), "?"));
  }
  if (!value.IsScalar()) {
    return Wrong(where, absl::StrCat(name, value.IsDefined() && !value.IsNull()
                                               ? " is a list or a map; want "
                                                 "one value"
                                               : " has no value; give it one "
                                                 "or remove the line"));
  }
  const auto [it, added] =
      given->insert({name, Given{value.Scalar(), place.Source(at), where}});
  if (!added) {
    if (!place.path.empty()) {
      return Wrong(where,
                   absl::StrCat(name, " is given twice, first at ",
                                it->second.where, "; remove one of them"));
    }
    it->second = Given{value.Scalar(), place.Source(at), where};
  }
  return absl::OkStatus();
}

absl::Status TakeSection(const Table& table, const Place& place,
                         const std::string& section, const YAML::Node& at,
                         const YAML::Node& body, GivenMap* given) {
  if (!IsSection(table, section)) {
    return Wrong(
        place.Where(at),
        body.IsMap()
            ? absl::StrCat(section, " is not a section; did you mean ",
                           NearestSection(table, section), "?")
            : absl::StrCat(section, " is not a section; did you mean the key ",
                           NearestKey(table, section), "?"));
  }
  if (body.IsNull()) return absl::OkStatus();  // "eval:" and nothing below.
  if (!body.IsMap()) {
    return Wrong(place.Where(at),
                 absl::StrCat(section, " is a section; want `", section,
                              ":` and its keys below, indented"));
  }
  for (const auto& field : body) {
    BALLAST_RETURN_IF_ERROR(
        TakeValue(table, place,
                  absl::StrCat(section, ".",
                               field.first.IsScalar() ? field.first.Scalar()
                                                      : std::string("?")),
                  field.first, field.second, given));
  }
  return absl::OkStatus();
}

// yaml-cpp reads other bytes and writes them as question marks.
bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const auto lead = static_cast<uint8_t>(text[0]);
    const size_t bytes = lead < 0x80   ? 1
                         : lead < 0xe0 ? 2
                         : lead < 0xf0 ? 3
                                       : 4;
    if (bytes > text.size() || (lead >= 0x80 && lead < 0xc0)) {
      return false;
    }
    uint32_t point = bytes == 1 ? lead : lead & (0x7fu >> bytes);
    for (size_t i = 1; i < bytes; ++i) {
      const auto next = static_cast<uint8_t>(text[i]);
      if ((next & 0xc0) != 0x80) {
        return false;
      }
      point = (point << 6) | (next & 0x3f);
    }
    // The least value that needs so many bytes; surrogates; the last value.
    static constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
    if (lead >= 0xf8 || point < kLeast[bytes] || point > 0x10ffff ||
        (point >= 0xd800 && point < 0xe000)) {
      return false;
    }
    text.remove_prefix(bytes);
  }
  return true;
}

// Whether a document marker stands after something that is not a comment.
bool HasSecondDocument(absl::string_view text) {
  bool content = false;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::ConsumePrefix(&line, "---") ||
        absl::ConsumePrefix(&line, "...")) {
      if (content) {
        return true;
      }
    }
    line = absl::StripAsciiWhitespace(line);
    content = content || (!line.empty() && line[0] != '#' && line[0] != '%');
  }
  return false;
}

absl::Status TakeFile(const Table& table, const std::string& path,
                      GivenMap* given) {
  errno = 0;
  std::ifstream file(path);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) {
    const std::string why =
        errno != 0 ? std::generic_category().message(errno) : "it is empty";
    return Wrong(path, absl::StrCat("cannot read the job file: ", why));
  }
  if (!IsUtf8(text.str())) {
    return Wrong(path, "is not UTF-8 text");
  }
  // YAML::LoadAll never ends on a text that starts with a comma, so the one
  // document is loaded alone.
  const YAML::Node document =
      HasSecondDocument(text.str()) ? YAML::Node() : YAML::Load(text.str());
  if (!document.IsMap()) {
    return Wrong(path,
                 "is not a job file; want one YAML map with the sections run, "
                 "model, data, batch, worker, server, ...");
  }
  const Place place = {path, ""};
  std::map<std::string, std::string> sections;  // To where it stands.
  for (const auto& entry : document) {
    const std::string name =
        entry.first.IsScalar() ? entry.first.Scalar() : std::string("?");
    const std::string where = place.Where(entry.first);
    const auto [it, added] = sections.insert({name, where});
    if (!added) {
      return Wrong(where, absl::StrCat(name, " is given twice, first at ",
                                       it->second, "; join the two sections"));
    }
    BALLAST_RETURN_IF_ERROR(
        TakeSection(table, place, name, entry.first, entry.second, given));
  }
  return absl::OkStatus();
}

absl::Status TakeOverride(const Table& table, const std::string& text,
                          GivenMap* given) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    return Wrong(absl::StrCat("--set ", text),
                 "want section.key=value, such as worker.memory=64MiB");
  }
  if (!IsUtf8(text)) {
    return Wrong(absl::StrCat("--set ", text), "is not UTF-8 text");
  }
  const std::string name = text.substr(0, equals);
  const YAML::Node value = YAML::Load(text.substr(equals + 1));
  return TakeValue(table, Place{"", text}, name, value, value, given);
}

// The one place where yaml-cpp may throw. `where` names what is being read.
template <typename Read>
absl::Status CatchYaml(const std::string& where, Read read) {
  try {
    return read();
  } catch (const YAML::ParserException& error) {
    return Wrong(error.mark.is_null()
                     ? where
                     : absl::StrCat(where, ":", error.mark.line + 1),
                 absl::StrCat("is not YAML: ", error.msg));
  } catch (const YAML::Exception& error) {
    return Wrong(where, absl::StrCat("is not YAML: ", error.msg));
  }
}

absl::StatusOr<Job> ParseAll(const Table& table, const std::string& path,
                             const GivenMap& given) {
  Job job;
  for (const JobKey& key : table) {
    const auto it = given.find(key.name);
    if (it == given.end()) {
      if (!key.required) continue;
      return Wrong(path, absl::StrCat(key.name,
                                      " is missing and has no default; add it, "
                                      "or give --set ",
                                      key.name, "=VALUE"));
    }
    const absl::Status status = key.parse(it->second.text, &job);
    if (!status.ok()) {
      return Wrong(it->second.where,
                   absl::StrCat(key.name, " ", status.message()));
    }
  }
  return job;
}

absl::Status CheckAll(const Table& table, const std::string& path,
                      const GivenMap& given, const Job& job) {
  for (const JobKey& key : table) {
    const auto it = given.find(key.name);
    if (it == given.end()) continue;
    const std::string idle = key.idle(job);
    if (!idle.empty()) {
      return Wrong(it->second.where, absl::StrCat(key.name, " ", idle));
    }
  }
  const BrokenRelation broken = FindBrokenRelation(job);
  if (broken.key.empty()) return absl::OkStatus();
  const auto it = given.find(broken.key);
  return Wrong(it == given.end() ? path : it->second.where,
               absl::StrCat(broken.key, " ", broken.message));
}

std::vector<std::pair<std::string, std::string>> Fields(const Job& job,
                                                        KeyGroup group) {
  std::vector<std::pair<std::string, std::string>> fields;
  for (const JobKey& key : JobKeys()) {
    if (key.group == group && key.idle(job).empty()) {
      fields.emplace_back(key.name, key.print(job));
    }
  }
  return fields;
}

}  // namespace

absl::StatusOr<JobFile> LoadJobFile(const std::string& path,
                                    const std::vector<std::string>& overrides) {
  const Table table = JobKeys();
  GivenMap given;
  BALLAST_RETURN_IF_ERROR(
      CatchYaml(path, [&] { return TakeFile(table, path, &given); }));
  for (const std::string& text : overrides) {
    BALLAST_RETURN_IF_ERROR(CatchYaml(absl::StrCat("--set ", text), [&] {
      return TakeOverride(table, text, &given);
    }));
  }
  JobFile file;
  BALLAST_ASSIGN_OR_RETURN(file.job, ParseAll(table, path, given));
  BALLAST_RETURN_IF_ERROR(CheckAll(table, path, given, file.job));
  Job& job = file.job;
  if (job.run.dir.empty()) job.run.dir = absl::StrCat("runs/", job.run.name);
  if (job.server.data_dir.empty()) {
    job.server.data_dir = absl::StrCat(job.run.dir, "/servers");
  }
  for (const JobKey& key : table) {
    if (!key.idle(job).empty()) continue;
    const auto it = given.find(key.name);
    file.entries.push_back({key.name, key.print(job),
                            it == given.end() ? "default" : it->second.source});
  }
  return file;
}

std::string EffectiveYaml(const JobFile& file) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  std::string section;
  for (const ConfigEntry& entry : file.entries) {
    const std::string name = entry.key.substr(0, entry.key.find('.'));
    if (name != section) {
      if (!section.empty()) out << YAML::EndMap;
      section = name;
      out << YAML::Key << section << YAML::Value << YAML::BeginMap;
    }
    out << YAML::Key << std::string(FieldOf(entry.key)) << YAML::Value
        << entry.value;
  }
  if (!section.empty()) out << YAML::EndMap;
  out << YAML::EndMap;
  return absl::StrCat(out.c_str(), "\n");
}

std::vector<std::pair<std::string, std::string>> NumericsFields(
    const Job& job) {
  return Fields(job, KeyGroup::kNumerics);
}

std::vector<std::pair<std::string, std::string>> OperationsFields(
    const Job& job) {
  return Fields(job, KeyGroup::kOperations);
}

Hash128 NumericsHash(const Job& job) {
  std::string text;
  for (const auto& [key, value] : NumericsFields(job)) {
    absl::StrAppend(&text, key, "=", value, "\n");
  }
  return HashBytes(text);
}

}  // namespace ballast
