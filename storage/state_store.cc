// SPDX-License-Identifier: Apache-2.0
#include "storage/state_store.h"

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "common/status_macros.h"
#include "storage/file.h"

namespace ballast {
namespace {

rocksdb::Slice ToSlice(absl::string_view text) {
  return {text.data(), text.size()};
}

absl::Status ToStatus(const rocksdb::Status& status, const std::string& dir) {
  const std::string text = absl::StrCat(dir, ": ", status.ToString());
  if (status.ok()) {
    return absl::OkStatus();
  }
  if (status.IsNoSpace()) {
    return absl::ResourceExhaustedError(text);
  }
  if (status.IsIOError() && (absl::StrContains(text, "lock hold by") ||
                             absl::StrContains(text, "While lock file"))) {
    return absl::FailedPreconditionError(
        absl::StrCat(dir, " is in use by another process (", status.ToString(),
                     "); stop it or name another folder"));
  }
  if (status.IsIOError() && absl::StrContains(text, "Permission denied")) {
    return absl::FailedPreconditionError(text);
  }
  if (status.IsNotFound()) {
    return absl::NotFoundError(text);
  }
  // What else RocksDB says (corruption, a file that is gone, an unknown
  // version) means that the store cannot be read as it was written.
  return absl::DataLossError(text);
}

// Errors are returned to the caller with their text; a second copy in files
// of its own would only grow.
class SilentLogger final : public rocksdb::Logger {
 public:
  using rocksdb::Logger::Logv;
  void Logv(const char* /*format*/, va_list /*arguments*/) override {}
};

rocksdb::Options StoreOptions(const EmbeddedStoreOptions& wanted) {
  const uint64_t memory = std::max<uint64_t>(wanted.memory_bytes, 256 << 10);
  rocksdb::Options options;
  options.create_if_missing = wanted.create;
  options.paranoid_checks = true;
  options.paranoid_file_checks = true;
  // A torn tail is a crash in a write that nobody was told of; a bad record in
  // front of good ones is damage and must not pass for the end.
  options.wal_recovery_mode =
      rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords;
  options.compression = rocksdb::kNoCompression;
  options.write_buffer_size = memory / 4;
  options.max_write_buffer_number = 2;
  options.db_write_buffer_size = memory / 2;
  options.max_total_wal_size = memory;
  options.writable_file_max_buffer_size = 64 << 10;
  options.manifest_preallocation_size = 64 << 10;
  options.max_manifest_file_size = 1 << 20;
  options.max_open_files = 32;
  options.max_file_opening_threads = 1;
  options.max_background_jobs = 2;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  options.info_log = std::make_shared<SilentLogger>();
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(memory / 4, /*num_shard_bits=*/0);
  table.cache_index_and_filter_blocks = true;
  table.verify_compression = false;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

// A store without CURRENT is new, somebody else's folder, or damaged: RocksDB
// itself would take all three for new.
absl::Status CheckFolder(const std::string& dir, bool create) {
  std::error_code error;
  if (std::filesystem::exists(dir + "/CURRENT", error)) {
    return absl::OkStatus();
  }
  if (!create) {
    return absl::DataLossError(
        absl::StrCat(dir, " has lost its file CURRENT; want a store"));
  }
  BALLAST_RETURN_IF_ERROR(MakeDirectories(dir));
  for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
    const std::string name = entry.path().filename().string();
    if (absl::EndsWith(name, ".sst") || absl::EndsWith(name, ".log")) {
      return absl::DataLossError(
          absl::StrCat(dir, " holds ", name, " but has lost its file CURRENT"));
    }
    // These are left by a creation that was cut short.
    if (name != "LOCK" && name != "IDENTITY" &&
        !absl::StartsWith(name, "MANIFEST-") &&
        !absl::EndsWith(name, ".dbtmp")) {
      return absl::FailedPreconditionError(
          absl::StrCat(dir, " is not a state store and not empty (it holds '",
                       name, "'); name an empty or a new folder"));
    }
  }
  return error ? ErrnoError(error.value(), absl::StrCat("cannot list ", dir))
               : absl::OkStatus();
}

class EmbeddedStateStore final : public StateStore {
 public:
  EmbeddedStateStore(std::string dir, std::unique_ptr<rocksdb::DB> db)
      : dir_(std::move(dir)), db_(std::move(db)) {}

  absl::StatusOr<std::string> Get(absl::string_view key) override {
    std::string value;
    BALLAST_RETURN_IF_ERROR(
        ToStatus(db_->Get(rocksdb::ReadOptions(), ToSlice(key), &value), dir_));
    return value;
  }

  absl::Status CompareAndSwap(
      absl::string_view key, const std::optional<std::string>& expected,
      const std::vector<StateChange>& changes) override {
    MutexLock lock(&write_mutex_);
    const absl::StatusOr<std::string> found = Get(key);
    if (!found.ok() && !absl::IsNotFound(found.status())) {
      return found.status();
    }
    if (found.ok() != expected.has_value() ||
        (found.ok() && *found != *expected)) {
      return absl::AbortedError(
          absl::StrCat("key '", key, "' ",
                       found.ok() ? "holds another value" : "does not exist",
                       "; read it again"));
    }
    return Write(changes);
  }

  absl::Status Apply(const std::vector<StateChange>& changes) override {
    MutexLock lock(&write_mutex_);
    return Write(changes);
  }

  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Range(
      absl::string_view begin, absl::string_view end, uint64_t limit) override {
    std::vector<std::pair<std::string, std::string>> pairs;
    const std::unique_ptr<rocksdb::Iterator> it(
        db_->NewIterator(rocksdb::ReadOptions()));
    for (it->Seek(ToSlice(begin)); it->Valid() && pairs.size() < limit &&
                                   it->key().compare(ToSlice(end)) < 0;
         it->Next()) {
      pairs.emplace_back(it->key().ToString(), it->value().ToString());
    }
    BALLAST_RETURN_IF_ERROR(ToStatus(it->status(), dir_));
    return pairs;
  }

 private:
  absl::Status Write(const std::vector<StateChange>& changes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_) {
    if (out_of_space_) {
      // RocksDB refuses writes after such an error until it is told to look
      // again.
      const rocksdb::Status resumed = db_->Resume();
      if (!resumed.ok() && !resumed.IsCorruption()) {
        return absl::ResourceExhaustedError(absl::StrCat(
            dir_,
            " ran out of space and cannot go on yet: ", resumed.ToString()));
      }
      BALLAST_RETURN_IF_ERROR(ToStatus(resumed, dir_));
      out_of_space_ = false;
    }
    rocksdb::WriteBatch batch;
    for (const StateChange& change : changes) {
      const rocksdb::Status added = change.value
                                        ? batch.Put(change.key, *change.value)
                                        : batch.Delete(change.key);
      BALLAST_RETURN_IF_ERROR(ToStatus(added, dir_));
    }
    rocksdb::WriteOptions options;
    options.sync = true;
    const rocksdb::Status status = db_->Write(options, &batch);
    out_of_space_ = status.IsNoSpace();
    return ToStatus(status, dir_);
  }

  const std::string dir_;
  const std::unique_ptr<rocksdb::DB> db_;
  // Held across the disk: a compare-and-swap is one step, and RocksDB would
  // put writers in a row anyway.
  Mutex write_mutex_;
  bool out_of_space_ ABSL_GUARDED_BY(write_mutex_) = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StateStore>> OpenEmbeddedStateStore(
    const std::string& dir, const EmbeddedStoreOptions& options) {
  BALLAST_RETURN_IF_ERROR(CheckFolder(dir, options.create));
  rocksdb::DB* opened = nullptr;
  // Recovery ends with a flush of what the log held into synced tables.
  const rocksdb::Status status =
      rocksdb::DB::Open(StoreOptions(options), dir, &opened);
  std::unique_ptr<rocksdb::DB> db(opened);
  BALLAST_RETURN_IF_ERROR(ToStatus(status, dir));
  return std::unique_ptr<StateStore>(
      std::make_unique<EmbeddedStateStore>(dir, std::move(db)));
}

}  // namespace ballast
