// SPDX-License-Identifier: Apache-2.0
// Early returns on absl::Status, which Debian's Abseil does not ship.

#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// NOLINTBEGIN(bugprone-macro-parentheses): `lhs` may be a declaration.
#define BALLAST_CONCAT_INNER(a, b) a##b
#define BALLAST_CONCAT(a, b) BALLAST_CONCAT_INNER(a, b)

// Returns from the enclosing function when `expr` is an error status.
#define BALLAST_RETURN_IF_ERROR(expr)     \
  do {                                    \
    absl::Status ballast_status = (expr); \
    if (!ballast_status.ok()) {           \
      return ballast_status;              \
    }                                     \
  } while (false)

// Assigns the value of a StatusOr to `lhs`, or returns its error.
#define BALLAST_ASSIGN_OR_RETURN(lhs, expr)                                   \
  BALLAST_ASSIGN_OR_RETURN_INNER(BALLAST_CONCAT(ballast_statusor_, __LINE__), \
                                 lhs, expr)
#define BALLAST_ASSIGN_OR_RETURN_INNER(statusor, lhs, expr) \
  auto statusor = (expr);                                   \
  if (!statusor.ok()) {                                     \
    return std::move(statusor).status();                    \
  }                                                         \
  lhs = std::move(statusor).value()
// NOLINTEND(bugprone-macro-parentheses)
