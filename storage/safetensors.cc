// SPDX-License-Identifier: Apache-2.0
#include "storage/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "storage/file.h"

namespace ballast {
namespace {

using Json = nlohmann::ordered_json;

uint64_t ElemCount(const SafetensorsEntry& entry) {
  uint64_t elems = 1;
  for (const uint64_t dim : entry.shape) {
    elems *= dim;
  }
  return elems;
}

absl::Status CheckEntries(const std::vector<SafetensorsEntry>& entries) {
  std::set<std::string> names;
  for (const SafetensorsEntry& entry : entries) {
    if (!names.insert(entry.name).second || entry.name == "__metadata__" ||
        entry.piece_elems == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", entry.name,
                       "' is listed twice, has a reserved name, or is to be "
                       "read in pieces of 0 elements"));
    }
  }
  return absl::OkStatus();
}

// The length, the header padded with spaces to 8 bytes; adds up the data.
std::string Header(const std::vector<SafetensorsEntry>& entries,
                   const std::map<std::string, std::string>& metadata,
                   uint64_t* data_bytes) {
  Json header = Json::object();
  if (!metadata.empty()) {
    header["__metadata__"] = metadata;
  }
  *data_bytes = 0;
  for (const SafetensorsEntry& entry : entries) {
    const uint64_t begin = *data_bytes;
    *data_bytes += ElemCount(entry) * DTypeBytes(entry.dtype);
    header[entry.name] = {
        {"dtype", entry.dtype == DType::kF32 ? "F32" : "BF16"},
        {"shape", entry.shape},
        {"data_offsets", {begin, *data_bytes}}};
  }
  std::string json =
      header.dump(-1, ' ', false, Json::error_handler_t::replace);
  json.resize(RoundUp(json.size(), 8), ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) {
    length[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  }
  return length + json;
}

absl::Status WriteData(const StorageFile& file,
                       const std::vector<SafetensorsEntry>& entries,
                       const SafetensorsSource& source) {
  std::vector<float> values;
  std::vector<uint16_t> narrow;
  for (size_t index = 0; index < entries.size(); ++index) {
    const SafetensorsEntry& entry = entries[index];
    const uint64_t elems = ElemCount(entry);
    for (uint64_t begin = 0; begin < elems; begin += entry.piece_elems) {
      values.resize(std::min(entry.piece_elems, elems - begin));
      BALLAST_RETURN_IF_ERROR(source(index, begin, absl::MakeSpan(values)));
      absl::string_view bytes(reinterpret_cast<const char*>(values.data()),
                              values.size() * sizeof(float));
      if (entry.dtype == DType::kBF16) {
        narrow.resize(values.size());
        std::transform(values.begin(), values.end(), narrow.begin(), ToBF16);
        bytes = {reinterpret_cast<const char*>(narrow.data()),
                 narrow.size() * sizeof(uint16_t)};
      }
      BALLAST_RETURN_IF_ERROR(WriteFully(file, bytes));
    }
  }
  return absl::OkStatus();
}

// Renames without replacing, in one step where the file system can.
absl::Status Publish(const std::string& from, const std::string& to,
                     bool overwrite) {
  int error = 0;
  if (!overwrite) {
    error = renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(),
                      RENAME_NOREPLACE) == 0
                ? 0
                : errno;
    if ((error == EINVAL || error == ENOSYS) && access(to.c_str(), F_OK) != 0) {
      overwrite = true;
    }
  }
  if (overwrite) {
    error = rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
  }
  if (error != 0) {
    return ErrnoError(error, absl::StrCat("cannot write ", to));
  }
  return SyncDirectory(ParentDirectory(to));
}

}  // namespace

absl::Status WriteSafetensors(
    const std::string& path, const std::vector<SafetensorsEntry>& entries,
    const std::map<std::string, std::string>& metadata, bool overwrite,
    const SafetensorsSource& source) {
  BALLAST_RETURN_IF_ERROR(CheckEntries(entries));
  struct stat there = {};
  const bool exists = stat(path.c_str(), &there) == 0;
  if (exists && !S_ISREG(there.st_mode)) {
    // The finished file takes the place of a name, which for a device would
    // take the device away from everybody.
    return absl::AlreadyExistsError(
        absl::StrCat(path, " exists and is no file; name another one"));
  }
  if (exists && !overwrite) {
    return absl::AlreadyExistsError(
        absl::StrCat(path, " exists; name another file or ask to overwrite"));
  }
  StorageFile file;
  file.path = path + ".tmp";
  file.fd = UniqueFd(
      open(file.path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file.fd.valid()) {
    return ErrnoError(errno, absl::StrCat("cannot create ", file.path));
  }
  uint64_t data_bytes = 0;
  const std::string header = Header(entries, metadata, &data_bytes);
  // A disk that is too small shows before hours of writing.
  absl::Status status = Preallocate(file, 0, header.size() + data_bytes);
  if (status.ok()) {
    status = WriteFully(file, header);
  }
  if (status.ok()) {
    status = WriteData(file, entries, source);
  }
  if (status.ok() && fsync(file.fd.get()) != 0) {
    status = ErrnoError(errno, absl::StrCat("cannot sync ", file.path));
  }
  if (status.ok()) {
    status = Publish(file.path, path, overwrite);
  }
  if (!status.ok()) {
    unlink(file.path.c_str());
  }
  return status;
}

}  // namespace ballast
