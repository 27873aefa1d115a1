// SPDX-License-Identifier: Apache-2.0
// The lease of the etcd store: a key that etcd deletes when nobody renews it.

#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "storage/etcd_client.h"
#include "storage/state_store.h"

namespace ballast {

// See SharedStateStore::Lease; `key` is whole. A third of the time passes
// between two renewals. `client` is not owned and outlives the lease.
absl::StatusOr<std::unique_ptr<StoreLease>> TakeEtcdLease(
    EtcdClient* client, const std::string& key, const std::string& value,
    absl::Duration ttl);

}  // namespace ballast
