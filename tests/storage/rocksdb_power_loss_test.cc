// SPDX-License-Identifier: Apache-2.0
// RocksDB on the simulated disk: the index's own writes and syncs are cut too,
// not only ours around them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rocksdb/env.h>
#include <rocksdb/file_system.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "storage/embedded_store.h"
#include "tests/storage/scripted_server.h"
#include "tests/testing/sim_disk.h"

namespace ballast::testing {
namespace {

using rocksdb::FileOptions;
using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;
using rocksdb::Slice;

IOStatus ToIo(const absl::Status& status) {
  const std::string text(status.message());
  if (status.ok()) {
    return IOStatus::OK();
  }
  if (absl::IsNotFound(status)) {
    return IOStatus::PathNotFound(text);
  }
  if (absl::IsResourceExhausted(status)) {
    return IOStatus::NoSpace(text);
  }
  return IOStatus::IOError(text);
}

// RocksDB writes "folder/", "folder//file" too.
std::string Clean(const std::string& path) {
  std::string clean;
  for (const char c : path) {
    if (c != '/' || clean.empty() || clean.back() != '/') {
      clean += c;
    }
  }
  if (clean.size() > 1 && clean.back() == '/') {
    clean.pop_back();
  }
  return clean;
}

// At most `bytes` from `offset`, fewer at the end of the file.
IOStatus ReadSome(const DiskFile& file, uint64_t offset, size_t bytes,
                  Slice* result, char* scratch) {
  const auto size = file.Bytes();
  if (!size.ok()) {
    return ToIo(size.status());
  }
  const size_t count =
      offset >= *size ? 0 : std::min<uint64_t>(bytes, *size - offset);
  *result = Slice(scratch, count);
  return ToIo(
      file.Read(offset, {reinterpret_cast<std::byte*>(scratch), count}));
}

class SequentialFile final : public rocksdb::FSSequentialFile {
 public:
  explicit SequentialFile(std::unique_ptr<DiskFile> file)
      : file_(std::move(file)) {}
  IOStatus Read(size_t n, const IOOptions&, Slice* result, char* scratch,
                IODebugContext*) override {
    const IOStatus status = ReadSome(*file_, at_, n, result, scratch);
    at_ += status.ok() ? result->size() : 0;
    return status;
  }
  IOStatus Skip(uint64_t n) override {
    at_ += n;
    return IOStatus::OK();
  }

 private:
  const std::unique_ptr<DiskFile> file_;
  uint64_t at_ = 0;
};

class RandomAccessFile final : public rocksdb::FSRandomAccessFile {
 public:
  explicit RandomAccessFile(std::unique_ptr<DiskFile> file)
      : file_(std::move(file)) {}
  IOStatus Read(uint64_t offset, size_t n, const IOOptions&, Slice* result,
                char* scratch, IODebugContext*) const override {
    return ReadSome(*file_, offset, n, result, scratch);
  }

 private:
  const std::unique_ptr<DiskFile> file_;
};

class WritableFile final : public rocksdb::FSWritableFile {
 public:
  explicit WritableFile(std::unique_ptr<SimFile> file)
      : file_(std::move(file)) {}
  using FSWritableFile::Append;
  IOStatus Append(const Slice& data, const IOOptions&,
                  IODebugContext*) override {
    return ToIo(file_->Append({data.data(), data.size()}));
  }
  IOStatus Truncate(uint64_t, const IOOptions&, IODebugContext*) override {
    return IOStatus::OK();  // To the length that it has.
  }
  IOStatus Close(const IOOptions&, IODebugContext*) override {
    return IOStatus::OK();
  }
  IOStatus Flush(const IOOptions&, IODebugContext*) override {
    return IOStatus::OK();
  }
  IOStatus Sync(const IOOptions&, IODebugContext*) override {
    return ToIo(file_->Sync());
  }
  uint64_t GetFileSize(const IOOptions&, IODebugContext*) override {
    return file_->Bytes().value_or(0);
  }

 private:
  const std::unique_ptr<SimFile> file_;
};

class Directory final : public rocksdb::FSDirectory {
 public:
  Directory(SimDisk* disk, std::string path)
      : disk_(disk), path_(std::move(path)) {}
  IOStatus Fsync(const IOOptions&, IODebugContext*) override {
    return ToIo(disk_->SyncDirectory(path_));
  }
  IOStatus Close(const IOOptions&, IODebugContext*) override {
    return IOStatus::OK();
  }

 private:
  SimDisk* const disk_;
  const std::string path_;
};

class Lock final : public rocksdb::FileLock {
 public:
  explicit Lock(std::unique_ptr<DiskLock> lock) : lock_(std::move(lock)) {}

 private:
  const std::unique_ptr<DiskLock> lock_;
};

class SimFileSystem final : public rocksdb::FileSystem {
 public:
  explicit SimFileSystem(SimDisk* disk) : disk_(disk) {}
  const char* Name() const override { return "SimFileSystem"; }

  IOStatus NewSequentialFile(const std::string& path, const FileOptions&,
                             std::unique_ptr<rocksdb::FSSequentialFile>* result,
                             IODebugContext*) override {
    auto file = disk_->OpenForRead(Clean(path));
    if (file.ok()) {
      *result = std::make_unique<SequentialFile>(*std::move(file));
    }
    return ToIo(file.status());
  }
  IOStatus NewRandomAccessFile(
      const std::string& path, const FileOptions&,
      std::unique_ptr<rocksdb::FSRandomAccessFile>* result,
      IODebugContext*) override {
    auto file = disk_->OpenForRead(Clean(path));
    if (file.ok()) {
      *result = std::make_unique<RandomAccessFile>(*std::move(file));
    }
    return ToIo(file.status());
  }
  IOStatus NewWritableFile(const std::string& path, const FileOptions&,
                           std::unique_ptr<rocksdb::FSWritableFile>* result,
                           IODebugContext*) override {
    auto file = disk_->Create(Clean(path));
    if (file.ok()) {
      *result = std::make_unique<WritableFile>(*std::move(file));
    }
    return ToIo(file.status());
  }
  IOStatus NewDirectory(const std::string& path, const IOOptions&,
                        std::unique_ptr<rocksdb::FSDirectory>* result,
                        IODebugContext*) override {
    *result = std::make_unique<Directory>(disk_, Clean(path));
    return IOStatus::OK();
  }
  IOStatus FileExists(const std::string& path, const IOOptions&,
                      IODebugContext*) override {
    return disk_->Exists(Clean(path)) ? IOStatus::OK() : IOStatus::NotFound();
  }
  IOStatus GetChildren(const std::string& path, const IOOptions&,
                       std::vector<std::string>* result,
                       IODebugContext*) override {
    auto names = disk_->List(Clean(path));
    *result = names.value_or(std::vector<std::string>());
    return ToIo(names.status());
  }
  IOStatus DeleteFile(const std::string& path, const IOOptions&,
                      IODebugContext*) override {
    return ToIo(disk_->Unlink(Clean(path)));
  }
  IOStatus CreateDir(const std::string& path, const IOOptions&,
                     IODebugContext*) override {
    return ToIo(disk_->MakeDirectories(Clean(path)));
  }
  IOStatus CreateDirIfMissing(const std::string& path, const IOOptions&,
                              IODebugContext*) override {
    return ToIo(disk_->MakeDirectories(Clean(path)));
  }
  IOStatus DeleteDir(const std::string& path, const IOOptions&,
                     IODebugContext*) override {
    return ToIo(disk_->Unlink(Clean(path)));
  }
  IOStatus GetFileSize(const std::string& path, const IOOptions&,
                       uint64_t* bytes, IODebugContext*) override {
    const auto file = disk_->OpenForRead(Clean(path));
    if (!file.ok()) {
      return ToIo(file.status());
    }
    const auto size = (*file)->Bytes();
    *bytes = size.value_or(0);
    return ToIo(size.status());
  }
  IOStatus GetFileModificationTime(const std::string&, const IOOptions&,
                                   uint64_t* time, IODebugContext*) override {
    *time = 0;
    return IOStatus::OK();
  }
  IOStatus RenameFile(const std::string& from, const std::string& to,
                      const IOOptions&, IODebugContext*) override {
    return ToIo(disk_->Rename(Clean(from), Clean(to)));
  }
  IOStatus LockFile(const std::string& path, const IOOptions&,
                    rocksdb::FileLock** lock, IODebugContext*) override {
    auto taken = disk_->Lock(Clean(path), "rocksdb");
    if (taken.ok()) {
      *lock = new Lock(*std::move(taken));
    }
    return ToIo(taken.status());
  }
  IOStatus UnlockFile(rocksdb::FileLock* lock, const IOOptions&,
                      IODebugContext*) override {
    delete static_cast<Lock*>(lock);
    return IOStatus::OK();
  }
  IOStatus GetTestDirectory(const IOOptions&, std::string* path,
                            IODebugContext*) override {
    *path = "/test";
    return IOStatus::OK();
  }
  IOStatus GetAbsolutePath(const std::string& path, const IOOptions&,
                           std::string* absolute, IODebugContext*) override {
    *absolute = path;
    return IOStatus::OK();
  }
  IOStatus IsDirectory(const std::string& path, const IOOptions&, bool* is,
                       IODebugContext*) override {
    *is = disk_->List(Clean(path)).ok();
    return IOStatus::OK();
  }

 private:
  SimDisk* const disk_;
};

// A machine whose state stores are RocksDB.
class RocksDisk final : public SimDisk {
 public:
  explicit RocksDisk(uint64_t seed)
      : SimDisk(seed),
        env_(rocksdb::NewCompositeEnv(std::make_shared<SimFileSystem>(this))) {}
  absl::StatusOr<std::unique_ptr<StateStore>> OpenStateStore(
      const std::string& dir, const EmbeddedStoreOptions& options) override {
    return OpenEmbeddedStateStoreOn(this, env_.get(), dir, options);
  }

 private:
  const std::unique_ptr<rocksdb::Env> env_;
};

// What a sync of the index is for: the kind of file.
std::string KindOf(const SimDisk::Sync& sync) {
  std::string kind = sync.path;
  if (!absl::StrContains(kind, "/index")) {
    return "";
  }
  if (sync.of == SimDisk::Sync::Of::kFolder) {
    return sync.wrote ? "folder" : "folder on open";
  }
  for (const char* part : {".log", ".sst", "MANIFEST", ".dbtmp", "WITNESS",
                           "IDENTITY", "OPTIONS"}) {
    if (absl::StrContains(kind, part)) {
      return part;
    }
  }
  return kind;
}

class Machine {
 public:
  Machine(uint64_t seed, const std::string& skipped) : disk_(seed) {
    if (!skipped.empty()) {
      disk_.SkipSyncs([skipped](const SimDisk::Sync& sync) {
        return KindOf(sync) == skipped;
      });
    }
  }
  // One life, as in power_loss_test.cc.
  absl::Status Live(uint64_t until) {
    ScriptedServer server(&disk_, "/data/server-0", &promises_,
                          [this](const std::function<bool()>& done) {
                            while (!done() && disk_.PumpOne()) {
                            }
                          });
    absl::Status status = server.Recover();
    if (status.ok()) {
      status = server.Run(until);
    }
    return disk_.stopped() ? absl::OkStatus() : status;
  }
  void End(SimDisk::End end) {
    disk_.Stop();
    disk_.Restart(end);
  }
  SimDisk* disk() { return &disk_; }
  const Promises& promises() const { return promises_; }

 private:
  RocksDisk disk_;
  Promises promises_;
};

// RocksDB's threads make the number of a change approximate, not the rules.
absl::Status CutAt(uint64_t n, bool kill, uint64_t seed,
                   const std::string& skipped, bool* reached) {
  constexpr uint64_t kVersions = 4;
  Machine machine(seed, skipped);
  machine.disk()->CutAfter(n);
  BALLAST_RETURN_IF_ERROR(machine.Live(kVersions));
  *reached = machine.disk()->stopped();
  if (kill) {
    machine.End(SimDisk::End::kKill);
    BALLAST_RETURN_IF_ERROR(machine.Live(machine.promises().vote + 3));
  }
  machine.End(SimDisk::End::kPower);
  return machine.Live(machine.promises().vote + 1);
}

absl::Status CutEverywhere(const std::string& skipped, uint64_t rounds,
                           uint64_t* cuts) {
  for (uint64_t round = 1; round <= rounds; ++round) {
    bool reached = true;
    for (uint64_t n = 1; reached; ++n, ++*cuts) {
      const absl::Status status =
          CutAt(n, round % 2 == 0, round * 1000 + n, skipped, &reached);
      if (!status.ok()) {
        return absl::Status(status.code(),
                            absl::StrCat("change ", n, ", round ", round, ": ",
                                         status.message()));
      }
    }
  }
  return absl::OkStatus();
}

TEST(RocksDbPowerLossTest, EveryCutIsSurvivedToTheLastVote) {
  uint64_t cuts = 0;
  EXPECT_EQ(CutEverywhere("", 2, &cuts), absl::OkStatus());
  std::printf("%llu cuts\n", static_cast<unsigned long long>(cuts));
  EXPECT_GT(cuts, 200u);
}

TEST(RocksDbPowerLossTest, TakingOutAnySyncOfTheIndexIsNoticed) {
  std::set<std::string> kinds;
  {
    Machine machine(1, "");
    machine.disk()->OnSync(
        [&kinds](const SimDisk::Sync& sync) { kinds.insert(KindOf(sync)); });
    EXPECT_EQ(machine.Live(4), absl::OkStatus());
    machine.End(SimDisk::End::kKill);
    EXPECT_EQ(machine.Live(5), absl::OkStatus());
    kinds.erase("");
  }
  for (const std::string& kind : kinds) {
    uint64_t cuts = 0;
    const absl::Status status = CutEverywhere(kind, 4, &cuts);
    EXPECT_FALSE(status.ok()) << kind;
    std::printf("%-20s %6llu cuts: %s\n", kind.c_str(),
                static_cast<unsigned long long>(cuts),
                std::string(status.message()).c_str());
  }
}

// A batch of many blocks is torn in its middle: that is a tail, and no loss.
TEST(RocksDbPowerLossTest, ALargeBatchIsThereWholeOrNotAtAll) {
  int there = 0;
  int gone = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    RocksDisk disk(seed);
    ASSERT_EQ(disk.MakeDirectories("/s"), absl::OkStatus());
    {
      const auto store = *disk.OpenStateStore("/s/store", {});
      ASSERT_EQ(store->Apply({{"a", "1"}}), absl::OkStatus());
      std::vector<StateChange> batch;
      for (int i = 0; i < 100; ++i) {
        batch.push_back({absl::StrCat("b", i), std::string(2000, 'x')});
      }
      disk.CutAfter(1 + seed % 8);
      store->Apply(batch).IgnoreError();
      disk.Stop();
    }
    disk.Restart(SimDisk::End::kPower);
    const auto store = disk.OpenStateStore("/s/store", {});
    ASSERT_EQ(store.status(), absl::OkStatus()) << "seed " << seed;
    const auto pairs = *(*store)->Range("", "z", 1000);
    EXPECT_TRUE(pairs.size() == 1 || pairs.size() == 101) << pairs.size();
    ++(pairs.size() == 1 ? gone : there);
  }
  EXPECT_GT(gone, 0);
  EXPECT_GT(there, 0);
}

}  // namespace
}  // namespace ballast::testing
