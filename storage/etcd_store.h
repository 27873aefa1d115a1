// SPDX-License-Identifier: Apache-2.0
// A state store in etcd (v3 over gRPC), for coordinators on several machines:
// durable before it answers, as the embedded one is, and shared. It is also the
// only clock that decides who leads: leases end by etcd's time.
//
// Keys are bounded by what the coordinator keeps; etcd keeps what they held
// before as well, so the store has etcd forget that now and then. An etcd that
// serves others too loses their old revisions with it.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "storage/state_store.h"

namespace ballast {

struct EtcdOptions {
  std::vector<std::string> endpoints;  // host:port; tried in turn.
  std::string prefix;                  // Of every key: "ballast/<run>/".
  // Longest wait of one call; then it is UNAVAILABLE.
  absl::Duration call_timeout = absl::Seconds(3);
  // Revisions after which the older ones are forgotten.
  int64_t history = 2000;
};

// The endpoints of "etcd://host:port[,host:port...]".
// Errors: INVALID_ARGUMENT  it is none; says what was wanted.
absl::StatusOr<std::vector<std::string>> ParseEtcdUrl(absl::string_view url);

// Does not connect: calls do, and return UNAVAILABLE when no endpoint answers.
// Values are bounded by etcd's own limit, 1.5 MiB for a whole batch.
// Errors: INVALID_ARGUMENT  there is no endpoint.
absl::StatusOr<std::unique_ptr<SharedStateStore>> OpenEtcdStateStore(
    EtcdOptions options);

}  // namespace ballast
