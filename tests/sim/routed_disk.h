// SPDX-License-Identifier: Apache-2.0
// One file system over the disks of several machines, as a cluster with shared
// folders has it: each path belongs to the machine whose folder it lies in. A
// process writes on its own machine and may read on others.

#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "storage/disk.h"

namespace ballast::sim {

class RoutedDisk final : public Disk {
 public:
  // `own` takes what no folder claims, and all queues.
  explicit RoutedDisk(Disk* own) : own_(own) {}
  // "/data/server-1": everything below is on `disk`, which is not owned.
  void Mount(const std::string& folder, Disk* disk) { disks_[folder] = disk; }

  absl::StatusOr<std::unique_ptr<DiskFile>> OpenDirect(const std::string& path,
                                                       bool create) override {
    return Of(path)->OpenDirect(path, create);
  }
  absl::StatusOr<std::unique_ptr<DiskFile>> OpenForRead(
      const std::string& path) override {
    return Of(path)->OpenForRead(path);
  }
  bool Exists(const std::string& path) override {
    return Of(path)->Exists(path);
  }
  absl::StatusOr<std::string> ReadFile(const std::string& path,
                                       uint64_t bytes_max) override {
    return Of(path)->ReadFile(path, bytes_max);
  }
  absl::Status ReplaceFile(const std::string& path,
                           absl::string_view bytes) override {
    return Of(path)->ReplaceFile(path, bytes);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Of(from)->Rename(from, to);
  }
  absl::Status Unlink(const std::string& path) override {
    return Of(path)->Unlink(path);
  }
  absl::StatusOr<std::vector<std::string>> List(
      const std::string& path) override {
    return Of(path)->List(path);
  }
  absl::Status MakeDirectories(const std::string& path) override {
    return Of(path)->MakeDirectories(path);
  }
  absl::Status SyncDirectory(const std::string& path) override {
    return Of(path)->SyncDirectory(path);
  }
  absl::StatusOr<std::unique_ptr<DiskLock>> Lock(
      const std::string& path, const std::string& owner) override {
    return Of(path)->Lock(path, owner);
  }
  absl::StatusOr<std::unique_ptr<IoQueue>> StartQueue(
      const IoQueue::Options& options) override {
    return own_->StartQueue(options);
  }
  absl::StatusOr<std::unique_ptr<StateStore>> OpenStateStore(
      const std::string& dir, const EmbeddedStoreOptions& options) override {
    return Of(dir)->OpenStateStore(dir, options);
  }

 private:
  Disk* Of(const std::string& path) const {
    for (const auto& [folder, disk] : disks_) {
      if (path == folder ||
          (path.starts_with(folder) && path[folder.size()] == '/')) {
        return disk;
      }
    }
    return own_;
  }

  Disk* const own_;
  std::map<std::string, Disk*> disks_;
};

}  // namespace ballast::sim
