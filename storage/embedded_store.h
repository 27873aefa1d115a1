// SPDX-License-Identifier: Apache-2.0
// The embedded state store on a disk of the caller's choice, so that the syncs
// of RocksDB itself can be tested. Others use OpenEmbeddedStateStore.

#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "storage/disk.h"
#include "storage/state_store.h"

namespace rocksdb {
class Env;
}  // namespace rocksdb

namespace ballast {

// `env` gives RocksDB its files, `disk` us ours: the same folder by both. Both
// outlive the store.
absl::StatusOr<std::unique_ptr<SharedStateStore>> OpenEmbeddedStateStoreOn(
    Disk* disk, rocksdb::Env* env, const std::string& dir,
    const EmbeddedStoreOptions& options);

}  // namespace ballast
