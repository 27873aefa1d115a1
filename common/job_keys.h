// SPDX-License-Identifier: Apache-2.0
// The table of job keys: each key of a job file is declared here once, with how
// it is read, printed and bounded, whether it decides bits, and when it has no
// effect. The parser (common/job_file.h), `--print-config`, the run's numerics
// hash and the comparison at join all walk this table.

#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/job.h"

namespace ballast {

// Numerics decide the bits of a run: all members must agree on them, and a
// resume may not change them. Operations say where and with how much.
enum class KeyGroup { kNumerics, kOperations };

struct JobKey {
  std::string name;  // "section.field", as users write it.
  KeyGroup group = KeyGroup::kOperations;
  bool required = false;
  // Sets the field from a scalar's text.
  // Errors: INVALID_ARGUMENT  "is X; want Y" (the caller puts the key before).
  std::function<absl::Status(const std::string& text, Job* job)> parse;
  // Text that `parse` reads back to the same value.
  std::function<std::string(const Job& job)> print;
  // Why the key has no effect in this job, and the fix; empty: it has one.
  std::function<std::string(const Job& job)> idle;
};

// In the order in which an effective job file lists them; keys of a section are
// neighbours. Built on each call.
std::vector<JobKey> JobKeys();

// A relation between keys that does not hold: the key to look at, and what is
// wrong with its value ("is 3, which ..."; the caller puts the key before).
struct BrokenRelation {
  std::string key;
  std::string message;
};

// The first broken relation of a job whose keys are each in range, or one with
// an empty key.
BrokenRelation FindBrokenRelation(const Job& job);

}  // namespace ballast
