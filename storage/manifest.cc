// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "storage/checkpoint.h"

namespace ballast {
namespace {

using Json = nlohmann::ordered_json;

constexpr absl::string_view kFormat = "ballast-checkpoint";
constexpr uint32_t kFormatVersion = 1;
constexpr absl::string_view kFileName = "manifest.json";
constexpr absl::string_view kFolderPrefix = "step-";
// Some two million records: far above what a checkpoint has, far below what
// would hurt to read by mistake.
constexpr uint64_t kManifestBytesMax = 256 << 20;

constexpr absl::string_view kInitNames[] = {"zeros", "ones", "normal"};
constexpr absl::string_view kDTypeNames[] = {"fp32", "bf16"};
constexpr absl::string_view kOptimizerNames[] = {"adamw", "sgd"};

std::string ToString(absl::string_view text) { return std::string(text); }

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::ignore);
}

// JSON text is UTF-8; a path or a comment in a job file need not be. What is
// not is written as {"hex": ...}, so that every string comes back as it was.
Json EncodeText(const std::string& text) {
  const Json plain(text);
  const Json back = Json::parse(Dump(plain), nullptr, false);
  if (back.is_string() && back.get_ref<const std::string&>() == text) {
    return plain;
  }
  return Json{{"hex", absl::BytesToHexString(text)}};
}

std::optional<std::string> DecodeHex(const std::string& hex) {
  std::string bytes = absl::HexStringToBytes(hex.size() % 2 == 0 ? hex : "");
  if (absl::BytesToHexString(bytes) != hex) {
    return std::nullopt;
  }
  return bytes;
}

// Reads the members of an object. After the first that is missing or of
// another type, status() says which, and everything reads as empty.
class ObjectReader {
 public:
  ObjectReader(const Json& json, std::string where)
      : json_(json), where_(std::move(where)) {
    if (!json.is_object()) {
      Fail("", "is no object");
    }
  }

  template <typename T>
  T Number(const char* key) {
    const Json* member = Find(key);
    if (member == nullptr || !member->is_number_unsigned() ||
        member->get<uint64_t>() > std::numeric_limits<T>::max()) {
      Fail(key, "is no number in range");
      return 0;
    }
    return static_cast<T>(member->get<uint64_t>());
  }
  double Real(const char* key) {
    const Json* member = Find(key);
    if (member == nullptr || !member->is_number()) {
      Fail(key, "is no number");
      return 0;
    }
    return member->get<double>();
  }
  bool Flag(const char* key) {
    const Json* member = Find(key);
    if (member == nullptr || !member->is_boolean()) {
      Fail(key, "is neither true nor false");
      return false;
    }
    return member->get<bool>();
  }
  std::string Text(const char* key) {
    const Json* member = Find(key);
    std::optional<std::string> text;
    if (member != nullptr) {
      text = DecodeText(*member);
    }
    if (!text) {
      Fail(key, "is no text");
    }
    return text.value_or("");
  }
  Hash128 Hash(const char* key) {
    const std::optional<Hash128> hash = ParseHashHex(Text(key));
    if (!hash) {
      Fail(key, "is no hash");
    }
    return hash.value_or(Hash128{});
  }
  // One of `names`, as its index.
  template <size_t N>
  size_t Choice(const char* key, const absl::string_view (&names)[N]) {
    const std::string text = Text(key);
    for (size_t i = 0; i < N; ++i) {
      if (names[i] == text) {
        return i;
      }
    }
    Fail(key, absl::StrCat("is '", text, "', which is unknown"));
    return 0;
  }
  const Json& Array(const char* key) {
    static const Json kEmpty = Json::array();
    const Json* member = Find(key);
    if (member == nullptr || !member->is_array()) {
      Fail(key, "is no list");
      return kEmpty;
    }
    return *member;
  }

  static std::optional<std::string> DecodeText(const Json& json) {
    if (json.is_string()) {
      return json.get<std::string>();
    }
    if (json.is_object() && json.size() == 1 && json.contains("hex") &&
        json["hex"].is_string()) {
      return DecodeHex(json["hex"].get<std::string>());
    }
    return std::nullopt;
  }

  void Fail(absl::string_view key, absl::string_view what) {
    if (status_.ok()) {
      status_ = absl::DataLossError(
          absl::StrCat("the manifest is damaged: ", where_,
                       key.empty() ? "" : ".", key, " ", what));
    }
  }
  const absl::Status& status() const { return status_; }

 private:
  const Json* Find(const char* key) {
    if (!status_.ok()) {
      return nullptr;
    }
    const auto it = json_.find(key);
    return it == json_.end() ? nullptr : &*it;
  }

  const Json& json_;
  const std::string where_;
  absl::Status status_;
};

Json EncodeTensor(const TensorSpec& tensor) {
  return Json{
      {"name", EncodeText(tensor.name)},
      {"shape", tensor.shape},
      {"init", ToString(kInitNames[static_cast<size_t>(tensor.init)])},
      {"init_std", tensor.init_std},
      {"decay", tensor.decay},
      {"by_rows", tensor.by_rows},
      {"use_count", tensor.use_count},
      {"served", ToString(DTypeName(tensor.served))},
  };
}

absl::StatusOr<TensorSpec> DecodeTensor(const Json& json, size_t index) {
  ObjectReader reader(json, absl::StrCat("tensors[", index, "]"));
  TensorSpec tensor;
  tensor.name = reader.Text("name");
  for (const Json& dim : reader.Array("shape")) {
    if (!dim.is_number_unsigned()) {
      reader.Fail("shape", "holds something else than numbers");
      break;
    }
    tensor.shape.push_back(dim.get<uint64_t>());
  }
  tensor.init = static_cast<Init>(reader.Choice("init", kInitNames));
  tensor.init_std = reader.Real("init_std");
  tensor.decay = reader.Flag("decay");
  tensor.by_rows = reader.Flag("by_rows");
  tensor.use_count = reader.Number<uint32_t>("use_count");
  tensor.served = static_cast<DType>(reader.Choice("served", kDTypeNames));
  BALLAST_RETURN_IF_ERROR(reader.status());
  return tensor;
}

Json EncodeUnit(const UnitSpec& unit) {
  Json uses = Json::array();
  for (const TensorUse& use : unit.tensors) {
    uses.push_back(Json{{"tensor", use.tensor}, {"use", use.use}});
  }
  return Json{{"name", EncodeText(unit.name)}, {"tensors", uses}};
}

absl::StatusOr<UnitSpec> DecodeUnit(const Json& json, size_t index) {
  const std::string where = absl::StrCat("units[", index, "]");
  ObjectReader reader(json, where);
  UnitSpec unit;
  unit.name = reader.Text("name");
  for (const Json& item : reader.Array("tensors")) {
    ObjectReader use(item, absl::StrCat(where, ".tensors"));
    unit.tensors.push_back(
        {use.Number<uint32_t>("tensor"), use.Number<uint32_t>("use")});
    BALLAST_RETURN_IF_ERROR(use.status());
  }
  BALLAST_RETURN_IF_ERROR(reader.status());
  return unit;
}

Json EncodeRecord(const ManifestRecord& record) {
  return Json{{"tensor", record.tensor},
              {"begin", record.begin},
              {"end", record.end},
              {"version", record.version},
              {"timeline", record.timeline},
              {"directory", record.directory},
              {"offset", record.extent.offset},
              {"bytes", record.extent.bytes}};
}

absl::StatusOr<ManifestRecord> DecodeRecord(const Json& json, size_t index) {
  ObjectReader reader(json, absl::StrCat("records[", index, "]"));
  ManifestRecord record;
  record.tensor = reader.Number<uint32_t>("tensor");
  record.begin = reader.Number<uint64_t>("begin");
  record.end = reader.Number<uint64_t>("end");
  record.version = reader.Number<uint64_t>("version");
  record.timeline = reader.Number<uint64_t>("timeline");
  record.directory = reader.Number<uint32_t>("directory");
  record.extent.offset = reader.Number<uint64_t>("offset");
  record.extent.bytes = reader.Number<uint64_t>("bytes");
  BALLAST_RETURN_IF_ERROR(reader.status());
  return record;
}

// "name": [one item a line],
template <typename Item, typename Encode>
void AppendList(absl::string_view name, const std::vector<Item>& items,
                const Encode& encode, std::string* text) {
  absl::StrAppend(text, "\"", name, "\": [");
  for (size_t i = 0; i < items.size(); ++i) {
    absl::StrAppend(text, i == 0 ? "\n  " : ",\n  ", Dump(encode(items[i])));
  }
  absl::StrAppend(text, "\n],\n");
}

template <typename Item, typename Decode>
absl::Status DecodeList(const Json& array, const Decode& decode,
                        std::vector<Item>* items) {
  for (const Json& json : array) {
    BALLAST_ASSIGN_OR_RETURN(Item item, decode(json, items->size()));
    items->push_back(std::move(item));
  }
  return absl::OkStatus();
}

std::string ChecksumLine(absl::string_view body) {
  return absl::StrCat("\"checksum\": \"", HashHex(HashBytes(body)), "\"\n}\n");
}

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("the manifest is damaged: ", what));
}

absl::Status CheckRecordFields(const CheckpointManifest& manifest,
                               const ManifestRecord& record) {
  const TensorSpec& tensor = manifest.layout.tensors[record.tensor];
  const std::string what = absl::StrCat("the record of '", tensor.name, "' [",
                                        record.begin, ", ", record.end, ")");
  const uint64_t block = tensor.block_elems();
  if (record.begin >= record.end || record.end > tensor.elem_count() ||
      record.begin % block != 0 ||
      (record.end % block != 0 && record.end != tensor.elem_count())) {
    return Damaged(absl::StrCat(what, " is no range of whole blocks"));
  }
  if (record.directory >= manifest.directories.size()) {
    return Damaged(absl::StrCat(what, " lies in directory ", record.directory,
                                " of ", manifest.directories.size()));
  }
  const RecordLayout layout = RecordLayout::For(
      tensor, {0, record.tensor, record.begin, record.end}, manifest.optimizer);
  if (record.extent.bytes != layout.total_bytes ||
      record.extent.offset % kPageBytes != 0) {
    return Damaged(absl::StrCat(what, " has an extent of ", record.extent.bytes,
                                " bytes at ", record.extent.offset, ", want ",
                                layout.total_bytes, " on a page boundary"));
  }
  return absl::OkStatus();
}

// Every element of every tensor in exactly one record.
absl::Status CheckCoverage(const CheckpointManifest& manifest) {
  const std::vector<TensorSpec>& tensors = manifest.layout.tensors;
  std::vector<std::map<uint64_t, uint64_t>> ranges(tensors.size());
  for (const ManifestRecord& record : manifest.records) {
    if (record.tensor >= tensors.size()) {
      return Damaged(absl::StrCat("a record names tensor ", record.tensor,
                                  " of ", tensors.size()));
    }
    BALLAST_RETURN_IF_ERROR(CheckRecordFields(manifest, record));
    if (!ranges[record.tensor].emplace(record.begin, record.end).second) {
      return Damaged(absl::StrCat("two records of '",
                                  tensors[record.tensor].name,
                                  "' overlap at element ", record.begin));
    }
  }
  for (size_t t = 0; t < tensors.size(); ++t) {
    uint64_t covered = 0;
    for (const auto& [begin, end] : ranges[t]) {
      if (begin != covered) {
        return Damaged(absl::StrCat(
            "records of '", tensors[t].name,
            begin < covered ? "' overlap at element " : "' leave a gap at ",
            std::min(begin, covered)));
      }
      covered = end;
    }
    if (covered != tensors[t].elem_count()) {
      return Damaged(absl::StrCat("records of '", tensors[t].name,
                                  "' end at element ", covered, " of ",
                                  tensors[t].elem_count()));
    }
  }
  return absl::OkStatus();
}

absl::Status DecodeScalars(ObjectReader* reader, CheckpointManifest* manifest) {
  if (reader->Text("format") != kFormat) {
    reader->Fail("format", absl::StrCat("is not ", kFormat));
  }
  manifest->format_version = reader->Number<uint32_t>("format_version");
  manifest->run = reader->Hash("run");
  manifest->run_name = reader->Text("run_name");
  manifest->timeline = reader->Number<uint64_t>("timeline");
  manifest->step = reader->Number<uint64_t>("step");
  manifest->optimizer_step = reader->Number<uint64_t>("optimizer_step");
  manifest->samples_consumed = reader->Number<uint64_t>("samples_consumed");
  const std::optional<std::string> decision =
      DecodeHex(reader->Text("decision_hex"));
  if (!decision) {
    reader->Fail("decision_hex", "is no hex text");
  }
  manifest->decision = decision.value_or("");
  manifest->config = reader->Text("config");
  manifest->optimizer =
      static_cast<OptimizerKind>(reader->Choice("optimizer", kOptimizerNames));
  return reader->status();
}

// The folder of a step, and back.
std::string StepFolder(const std::string& checkpoints_dir, uint64_t step) {
  return absl::StrFormat("%s/%s%08d", checkpoints_dir, kFolderPrefix, step);
}

}  // namespace

std::string CheckpointManifest::ToJson() const {
  std::string text = "{\n";
  const auto add = [&text](absl::string_view key, const Json& value) {
    absl::StrAppend(&text, "\"", key, "\": ", Dump(value), ",\n");
  };
  add("format", ToString(kFormat));
  add("format_version", format_version);
  add("run", HashHex(run));
  add("run_name", EncodeText(run_name));
  add("timeline", timeline);
  add("step", step);
  add("optimizer_step", optimizer_step);
  add("samples_consumed", samples_consumed);
  add("decision_hex", absl::BytesToHexString(decision));
  add("config", EncodeText(config));
  add("optimizer", ToString(kOptimizerNames[static_cast<size_t>(optimizer)]));
  AppendList("tensors", layout.tensors, EncodeTensor, &text);
  AppendList("units", layout.units, EncodeUnit, &text);
  AppendList("directories", directories, EncodeText, &text);
  AppendList("records", records, EncodeRecord, &text);
  return text + ChecksumLine(text);
}

absl::StatusOr<CheckpointManifest> CheckpointManifest::FromJson(
    absl::string_view json) {
  const size_t tail = ChecksumLine("").size();
  const absl::string_view body =
      json.substr(0, json.size() < tail ? 0 : json.size() - tail);
  if (json.size() < tail || json.substr(body.size()) != ChecksumLine(body)) {
    return Damaged("it does not match the checksum in its last line");
  }
  const Json root = Json::parse(json.begin(), json.end(), nullptr, false);
  ObjectReader reader(root, "manifest");
  CheckpointManifest manifest;
  BALLAST_RETURN_IF_ERROR(DecodeScalars(&reader, &manifest));
  if (manifest.format_version != kFormatVersion) {
    return Damaged(absl::StrCat("it has format ", manifest.format_version,
                                ", want ", kFormatVersion));
  }
  BALLAST_RETURN_IF_ERROR(DecodeList(reader.Array("tensors"), DecodeTensor,
                                     &manifest.layout.tensors));
  BALLAST_RETURN_IF_ERROR(
      DecodeList(reader.Array("units"), DecodeUnit, &manifest.layout.units));
  BALLAST_RETURN_IF_ERROR(
      DecodeList(reader.Array("records"), DecodeRecord, &manifest.records));
  for (const Json& item : reader.Array("directories")) {
    const std::optional<std::string> path = ObjectReader::DecodeText(item);
    if (!path) {
      reader.Fail("directories", "holds something else than paths");
      break;
    }
    manifest.directories.push_back(*path);
  }
  BALLAST_RETURN_IF_ERROR(reader.status());
  if (const absl::Status status = manifest.layout.Validate(); !status.ok()) {
    return Damaged(status.message());
  }
  BALLAST_RETURN_IF_ERROR(CheckCoverage(manifest));
  return manifest;
}

absl::Status WriteManifest(const std::string& checkpoints_dir,
                           const CheckpointManifest& manifest, Disk* disk) {
  const std::string folder = StepFolder(checkpoints_dir, manifest.step);
  BALLAST_RETURN_IF_ERROR(disk->MakeDirectories(folder));
  return disk->ReplaceFile(absl::StrCat(folder, "/", kFileName),
                           manifest.ToJson());
}

absl::StatusOr<CheckpointManifest> ReadManifest(const std::string& path,
                                                Disk* disk) {
  std::string file = path;
  if (disk->List(path).ok()) {  // A folder.
    file = absl::StrCat(path, "/", kFileName);
    if (!disk->Exists(file)) {
      const std::vector<uint64_t> steps = ListManifests(path, disk);
      if (steps.empty()) {
        return absl::NotFoundError(absl::StrCat(
            path, " holds no checkpoint; name a step's folder, its ", kFileName,
            " or a folder of whole checkpoints"));
      }
      file = absl::StrCat(StepFolder(path, steps.back()), "/", kFileName);
    }
  }
  BALLAST_ASSIGN_OR_RETURN(const std::string text,
                           disk->ReadFile(file, kManifestBytesMax));
  absl::StatusOr<CheckpointManifest> manifest =
      CheckpointManifest::FromJson(text);
  if (!manifest.ok()) {
    return absl::Status(manifest.status().code(),
                        absl::StrCat(file, ": ", manifest.status().message()));
  }
  return manifest;
}

std::vector<CheckpointFolder> FindCheckpoints(
    const std::string& checkpoints_dir, Disk* disk) {
  std::vector<CheckpointFolder> found;
  for (const std::string& name :
       disk->List(checkpoints_dir).value_or(std::vector<std::string>())) {
    absl::string_view digits = name;
    CheckpointFolder folder;
    if (absl::ConsumePrefix(&digits, kFolderPrefix) &&
        absl::SimpleAtoi(digits, &folder.step)) {
      folder.path = absl::StrCat(checkpoints_dir, "/", name);
      found.push_back(std::move(folder));
    }
  }
  std::sort(found.begin(), found.end(),
            [](const CheckpointFolder& a, const CheckpointFolder& b) {
              return a.step < b.step;
            });
  return found;
}

std::vector<uint64_t> ListManifests(const std::string& checkpoints_dir,
                                    Disk* disk) {
  std::vector<uint64_t> steps;
  for (const CheckpointFolder& folder :
       FindCheckpoints(checkpoints_dir, disk)) {
    const auto manifest =
        ReadManifest(absl::StrCat(folder.path, "/", kFileName), disk);
    if (manifest.ok() && manifest->step == folder.step) {
      steps.push_back(folder.step);
    } else {
      LogEvent(Severity::kWarn, "checkpoint_left_out",
               {{"path", folder.path},
                {"reason", manifest.ok()
                               ? "the folder's name is of another step"
                               : std::string(manifest.status().message())}});
    }
  }
  return steps;
}

}  // namespace ballast
