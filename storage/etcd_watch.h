// SPDX-License-Identifier: Apache-2.0
// The watch of the etcd store: a stream that is opened again where it broke.

#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "storage/etcd_client.h"
#include "storage/state_store.h"

namespace ballast {

// See SharedStateStore::Watch; `begin` and `end` are whole keys, `prefix` is
// taken off those that are told. `client` is not owned and outlives the watch.
absl::StatusOr<std::unique_ptr<StoreWatch>> StartEtcdWatch(
    EtcdClient* client, const std::string& prefix, const std::string& begin,
    const std::string& end, SharedStateStore::OnChange on_change);

}  // namespace ballast
