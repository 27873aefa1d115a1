// SPDX-License-Identifier: Apache-2.0
// Job files: YAML in, a checked Job out, and back. One file configures every
// role; each process loads the same effective file, so what a run was told can
// be read from its folder.
//
// Nothing is ignored silently: an unknown or repeated key, a value of the wrong
// kind or out of range, a broken relation between keys and a key that has no
// effect are errors that name file, line, value and fix.

#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/hash.h"
#include "common/job.h"

namespace ballast {

// One key of the effective configuration.
struct ConfigEntry {
  std::string key;     // "worker.memory".
  std::string value;   // As a job file would say it.
  std::string source;  // "default", "FILE:LINE" or "--set".
};

struct JobFile {
  Job job;
  // Every key that has an effect, in the order of the job file's sections.
  std::vector<ConfigEntry> entries;
};

// Reads `path`, then applies `overrides` ("worker.memory=4MiB"; the value is
// YAML; the last one of a key holds), checks everything and fills in run.dir
// and server.data_dir.
// Errors: INVALID_ARGUMENT  whatever is wrong, the unreadable file included.
absl::StatusOr<JobFile> LoadJobFile(const std::string& path,
                                    const std::vector<std::string>& overrides);

// A job file that says every entry and loads to the same Job.
std::string EffectiveYaml(const JobFile& file);

// Entries as (key, value), split into what decides bits (all members agree, a
// resume keeps them) and the rest (budgets, counts, folders, ports).
std::vector<std::pair<std::string, std::string>> NumericsFields(const Job& job);
std::vector<std::pair<std::string, std::string>> OperationsFields(
    const Job& job);

// Of NumericsFields.
Hash128 NumericsHash(const Job& job);

}  // namespace ballast
