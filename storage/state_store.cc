// SPDX-License-Identifier: Apache-2.0
#include "storage/state_store.h"

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "common/log.h"
#include "common/mutex.h"
#include "common/status_macros.h"
#include "storage/disk.h"
#include "storage/embedded_store.h"
#include "storage/watch_hub.h"

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

// Keeps RocksDB from recovering from a full disk in a thread of its own: it
// would write on behind the torn end of its log. It does not try where the free
// space is unknown; the store below opens it anew instead.
class UnknownSpaceEnv final : public rocksdb::EnvWrapper {
 public:
  explicit UnknownSpaceEnv(rocksdb::Env* env) : rocksdb::EnvWrapper(env) {}
  const char* Name() const override { return "UnknownSpaceEnv"; }
  rocksdb::Status GetFreeSpace(const std::string& /*path*/,
                               uint64_t* /*bytes*/) override {
    return rocksdb::Status::NotSupported();
  }
};

// The file WITNESS holds a sequence number that the store had reached. RocksDB
// takes a damaged end of its manifest for a write that was cut short and would
// open without everything behind it, which then shows here.
class Witness {
 public:
  Witness(Disk* disk, const std::string& dir)
      : disk_(disk), path_(dir + "/WITNESS") {}

  absl::Status Check(uint64_t sequence) const {
    const absl::StatusOr<std::string> text = disk_->ReadFile(path_, 4096);
    if (absl::IsNotFound(text.status())) {
      return absl::OkStatus();  // The first open was cut short.
    }
    BALLAST_RETURN_IF_ERROR(text.status());
    uint64_t witnessed = 0;
    if (!absl::SimpleAtoi(text->substr(0, text->find(' ')), &witnessed) ||
        *text != Line(witnessed)) {
      return absl::DataLossError(absl::StrCat(path_, " is damaged"));
    }
    if (sequence < witnessed) {
      return absl::DataLossError(absl::StrCat(
          path_, " has seen update ", witnessed, ", but the store ends at ",
          sequence, ": its manifest or log has lost its end"));
    }
    return absl::OkStatus();
  }

  absl::Status Record(uint64_t sequence) const {
    return disk_->ReplaceFile(path_, Line(sequence));
  }

 private:
  static std::string Line(uint64_t sequence) {
    const std::string number = absl::StrCat(sequence);
    return absl::StrCat(number, " ", HashHex(HashBytes(number)), "\n");
  }
  Disk* const disk_;
  const std::string path_;
};

rocksdb::Options StoreOptions(const EmbeddedStoreOptions& wanted,
                              rocksdb::Env* env) {
  const uint64_t memory = std::max<uint64_t>(wanted.memory_bytes, 256 << 10);
  rocksdb::Options options;
  options.env = env;
  options.create_if_missing = wanted.create;
  options.paranoid_checks = true;
  options.paranoid_file_checks = true;
  // The sectors of a batch that was cut short reach the disk in any order, so
  // its bad record may stand in front of a good one; nothing of it was told to
  // anyone. Where damage ends the log early instead, WITNESS shows it, or who
  // asks for what is missing.
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kPointInTimeRecovery;
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
absl::Status CheckFolder(Disk* disk, const std::string& dir, bool create) {
  if (disk->Exists(dir + "/CURRENT")) {
    return absl::OkStatus();
  }
  if (!create) {
    return absl::DataLossError(
        absl::StrCat(dir, " has lost its file CURRENT; want a store"));
  }
  BALLAST_RETURN_IF_ERROR(disk->MakeDirectories(dir));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           disk->List(dir));
  for (const std::string& name : names) {
    if (name == "WITNESS" || absl::EndsWith(name, ".sst") ||
        absl::EndsWith(name, ".log")) {
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
  return absl::OkStatus();
}

// Besides its memtables, which go to tables, this many bytes must be free
// before a store that met a full disk is opened again (manifest, new log).
constexpr uint64_t kReopenBytes = 512 << 10;

class EmbeddedStateStore final : public SharedStateStore {
 public:
  EmbeddedStateStore(Disk* disk, rocksdb::Env* env, std::string dir,
                     const EmbeddedStoreOptions& options)
      : dir_(std::move(dir)),
        witness_(disk, dir_),
        env_(env),
        options_(options) {}

  ~EmbeddedStateStore() override {
    MutexLock lock(&mutex_);
    Close();
  }

  absl::Status Open() {
    MutexLock lock(&mutex_);
    return OpenLocked();
  }

  absl::StatusOr<std::string> Get(absl::string_view key) override {
    MutexLock lock(&mutex_);
    return GetLocked(key);
  }

  absl::Status CompareAndSwap(
      absl::string_view key, const std::optional<std::string>& expected,
      const std::vector<StateChange>& changes) override {
    MutexLock lock(&mutex_);
    const absl::StatusOr<std::string> found = GetLocked(key);
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
    MutexLock lock(&mutex_);
    return Write(changes);
  }

  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Range(
      absl::string_view begin, absl::string_view end, uint64_t limit) override {
    MutexLock lock(&mutex_);
    BALLAST_RETURN_IF_ERROR(OpenLocked());
    std::map<std::string, std::string> found;
    for (const auto& [key, leased] : leased_) {
      if (key >= begin && key < end) {
        found.emplace(key, leased.value);
      }
    }
    const std::unique_ptr<rocksdb::Iterator> it(
        db_->NewIterator(rocksdb::ReadOptions()));
    uint64_t read = 0;
    for (it->Seek(ToSlice(begin));
         it->Valid() && read < limit && it->key().compare(ToSlice(end)) < 0;
         it->Next(), ++read) {
      found.emplace(it->key().ToString(), it->value().ToString());
    }
    BALLAST_RETURN_IF_ERROR(ToStatus(it->status(), dir_));
    std::vector<std::pair<std::string, std::string>> pairs(found.begin(),
                                                           found.end());
    pairs.resize(std::min<uint64_t>(pairs.size(), limit));
    return pairs;
  }

  absl::StatusOr<std::unique_ptr<StoreWatch>> Watch(
      absl::string_view begin, absl::string_view end,
      OnChange on_change) override {
    return hub_.Add(begin, end, std::move(on_change));
  }

  absl::StatusOr<std::unique_ptr<StoreLease>> Lease(
      absl::string_view key, absl::string_view value,
      absl::Duration /*ttl*/) override {
    MutexLock lock(&mutex_);
    const absl::StatusOr<std::string> found = GetLocked(key);
    if (found.ok()) {
      return absl::AbortedError(
          absl::StrCat("key '", key, "' exists; whoever made it may be alive"));
    }
    if (!absl::IsNotFound(found.status())) {
      return found.status();
    }
    leased_[std::string(key)] = {std::string(value), ++last_lease_};
    hub_.Publish({{std::string(key), std::string(value)}});
    return std::make_unique<ProcessLease>(this, std::string(key), last_lease_);
  }

  uint64_t batch_max() const override { return UINT64_MAX; }

 private:
  struct Leased {
    std::string value;
    uint64_t id = 0;
  };

  // Nobody else can open the store while this process lives.
  class ProcessLease final : public StoreLease {
   public:
    ProcessLease(EmbeddedStateStore* store, std::string key, uint64_t id)
        : store_(store), key_(std::move(key)), id_(id) {}
    ~ProcessLease() override { store_->Release(key_, id_); }
    bool held() const override { return true; }

   private:
    EmbeddedStateStore* const store_;
    const std::string key_;
    const uint64_t id_;
  };

  void Release(const std::string& key, uint64_t id) {
    MutexLock lock(&mutex_);
    const auto place = leased_.find(key);
    if (place != leased_.end() && place->second.id == id) {
      leased_.erase(place);
      hub_.Publish({{key, std::nullopt}});
    }
  }

  absl::Status OpenLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (db_ != nullptr) {
      return absl::OkStatus();
    }
    rocksdb::DB* opened = nullptr;
    // Recovery ends with a flush of what the log held into synced tables.
    BALLAST_RETURN_IF_ERROR(ToStatus(
        rocksdb::DB::Open(StoreOptions(options_, &env_), dir_, &opened), dir_));
    std::unique_ptr<rocksdb::DB> db(opened);
    const uint64_t sequence = db->GetLatestSequenceNumber();
    BALLAST_RETURN_IF_ERROR(witness_.Check(sequence));
    BALLAST_RETURN_IF_ERROR(witness_.Record(sequence));
    db_ = std::move(db);
    options_.create = false;  // From now on a missing store is a loss.
    return absl::OkStatus();
  }

  void Close() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (db_ == nullptr) {
      return;
    }
    const absl::Status status = witness_.Record(db_->GetLatestSequenceNumber());
    if (!status.ok()) {  // The older witness stands; nothing is lost.
      LogEvent(Severity::kWarn, "witness_not_written",
               {{"error", std::string(status.message())}});
    }
    db_.reset();
  }

  absl::StatusOr<std::string> GetLocked(absl::string_view key)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto leased = leased_.find(std::string(key));
    if (leased != leased_.end()) {
      return leased->second.value;
    }
    BALLAST_RETURN_IF_ERROR(OpenLocked());
    std::string value;
    BALLAST_RETURN_IF_ERROR(
        ToStatus(db_->Get(rocksdb::ReadOptions(), ToSlice(key), &value), dir_));
    return value;
  }

  // After a full disk RocksDB has a log with a torn end, behind which nothing
  // may be written: the store is opened anew once there is space.
  absl::Status Recover(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::error_code error;
    const auto space = std::filesystem::space(dir_, error);
    if (error || space.available <
                     kReopenBytes + options_.memory_bytes / 2 + 2 * bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          dir_, ": the disk is full (", error ? 0 : space.available,
          " bytes left); free some space"));
    }
    Close();
    out_of_space_ = false;
    return absl::OkStatus();
  }

  absl::Status Write(const std::vector<StateChange>& changes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (changes.empty()) {
      return absl::OkStatus();
    }
    rocksdb::WriteBatch batch;
    for (const StateChange& change : changes) {
      const rocksdb::Status added = change.value
                                        ? batch.Put(change.key, *change.value)
                                        : batch.Delete(change.key);
      BALLAST_RETURN_IF_ERROR(ToStatus(added, dir_));
    }
    if (out_of_space_) {
      BALLAST_RETURN_IF_ERROR(Recover(batch.GetDataSize()));
    }
    BALLAST_RETURN_IF_ERROR(OpenLocked());
    rocksdb::WriteOptions options;
    options.sync = true;
    const rocksdb::Status status = db_->Write(options, &batch);
    out_of_space_ = status.IsNoSpace();
    BALLAST_RETURN_IF_ERROR(ToStatus(status, dir_));
    for (const StateChange& change : changes) {
      leased_.erase(change.key);
    }
    hub_.Publish(changes);
    return absl::OkStatus();
  }

  const std::string dir_;
  const Witness witness_;
  UnknownSpaceEnv env_;
  // Held across the disk: a compare-and-swap is one step, a store that is
  // opened anew has no readers, and nobody reads here in a hurry.
  Mutex mutex_;
  EmbeddedStoreOptions options_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<rocksdb::DB> db_ ABSL_GUARDED_BY(mutex_);
  bool out_of_space_ ABSL_GUARDED_BY(mutex_) = false;
  // Kept in memory alone: the next process must not find them.
  std::map<std::string, Leased> leased_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_lease_ ABSL_GUARDED_BY(mutex_) = 0;
  WatchHub hub_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SharedStateStore>> OpenEmbeddedStateStoreOn(
    Disk* disk, rocksdb::Env* env, const std::string& dir,
    const EmbeddedStoreOptions& options) {
  BALLAST_RETURN_IF_ERROR(CheckFolder(disk, dir, options.create));
  auto store = std::make_unique<EmbeddedStateStore>(disk, env, dir, options);
  BALLAST_RETURN_IF_ERROR(store->Open());
  return std::unique_ptr<SharedStateStore>(std::move(store));
}

absl::StatusOr<std::unique_ptr<SharedStateStore>> OpenEmbeddedStateStore(
    const std::string& dir, const EmbeddedStoreOptions& options) {
  return OpenEmbeddedStateStoreOn(PosixDisk(), rocksdb::Env::Default(), dir,
                                  options);
}

}  // namespace ballast
