// SPDX-License-Identifier: Apache-2.0
#include "tests/testing/sim_disk.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "storage/file.h"
#include "tests/testing/sim_machine.h"

namespace ballast::testing {

// Shares a machine's random order with its other queues.
class SimQueue final : public IoQueue {
 public:
  explicit SimQueue(SimMachine* machine) : machine_(machine) {
    MutexLock lock(&machine_->mutex);
    life_ = machine_->life;
    machine_->queues.push_back(this);
  }
  ~SimQueue() override {
    while (true) {
      std::optional<IoRequest> request;
      {
        MutexLock lock(&machine_->mutex);
        if (requests_.empty()) {
          std::erase(machine_->queues, this);
          return;
        }
        request = Take(machine_->random() % requests_.size());
      }
      Do(*std::move(request));
    }
  }
  void Submit(IoRequest request) override {
    BALLAST_CHECK(request.bytes % kPageBytes == 0);
    BALLAST_CHECK(request.offset % kPageBytes == 0);
    BALLAST_CHECK(reinterpret_cast<uintptr_t>(request.data) % kPageBytes == 0);
    MutexLock lock(&machine_->mutex);
    requests_.push_back(std::move(request));
  }

  // Under the machine's lock.
  size_t size() const { return requests_.size(); }
  IoRequest Take(size_t at) {
    IoRequest request = std::move(requests_[at]);
    requests_.erase(requests_.begin() + static_cast<ptrdiff_t>(at));
    return request;
  }
  void StopInPart() {
    for (const IoRequest& request : requests_) {
      if (request.kind == IoKind::kWrite && request.bytes > 0) {
        const auto* file = static_cast<const SimFile*>(request.file);
        machine_->WriteInPart(file->node_.get(), request.offset,
                              {request.data, request.bytes});
      }
    }
  }

  // Not under it: runs the completion.
  void Do(IoRequest request) { request.done(Transfer(request)); }

 private:
  absl::Status Transfer(const IoRequest& request) {
    auto* file = static_cast<SimFile*>(request.file);
    if (request.kind == IoKind::kSync) {
      return file->Sync();
    }
    if (request.bytes == 0) {
      MutexLock lock(&machine_->mutex);
      return machine_->Alive(life_);
    }
    if (request.kind == IoKind::kRead) {
      return file->Read(request.offset, {request.data, request.bytes});
    }
    MutexLock lock(&machine_->mutex);
    BALLAST_RETURN_IF_ERROR(machine_->Alive(file->life_));
    return machine_->WriteNode(file->node_.get(), file->path(), request.offset,
                               {request.data, request.bytes});
  }

  SimMachine* const machine_;
  uint64_t life_ = 0;
  std::deque<IoRequest> requests_;
};

namespace {

class SimLock final : public DiskLock {
 public:
  SimLock(SimMachine* machine, std::string path)
      : machine_(machine), path_(std::move(path)), life_(machine->life) {}
  ~SimLock() override {
    MutexLock lock(&machine_->mutex);
    if (machine_->life == life_) {
      machine_->locks.erase(path_);
    }
  }

 private:
  SimMachine* const machine_;
  const std::string path_;
  const uint64_t life_;
};

absl::Span<const std::byte> AsBytes(absl::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

}  // namespace

SimFile::SimFile(SimMachine* machine, std::shared_ptr<SimNode> node,
                 std::string path, bool direct)
    : DiskFile(std::move(path)),
      machine_(machine),
      node_(std::move(node)),
      direct_(direct),
      life_(machine->life) {}

SimFile::~SimFile() = default;

absl::StatusOr<uint64_t> SimFile::Bytes() const {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(life_));
  return node_->bytes;
}

absl::Status SimFile::Preallocate(uint64_t from, uint64_t to) {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(life_));
  BALLAST_CHECK(from <= node_->bytes && from <= to);
  BALLAST_RETURN_IF_ERROR(
      machine_->TakeFault(SimDisk::Operation::kPreallocate, path()));
  BALLAST_RETURN_IF_ERROR(machine_->CheckRoom(to - from, path()));
  const bool cut = machine_->CutsNow();
  if (!cut || machine_->Flip()) {
    node_->Resize(std::max(to, node_->bytes));
  }
  return machine_->Alive(life_);
}

absl::Status SimFile::Read(uint64_t offset, absl::Span<std::byte> out) const {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(life_));
  BALLAST_CHECK(!direct_ ||
                (offset % kPageBytes == 0 && out.size() % kPageBytes == 0 &&
                 reinterpret_cast<uintptr_t>(out.data()) % kPageBytes == 0));
  BALLAST_RETURN_IF_ERROR(
      machine_->TakeFault(SimDisk::Operation::kRead, path()));
  if (out.size() > node_->bytes || offset > node_->bytes - out.size()) {
    return absl::DataLossError(absl::StrCat(path(), " ends at ", node_->bytes,
                                            "; want bytes [", offset, ", ",
                                            offset + out.size(), ")"));
  }
  node_->Read(offset, out);
  return absl::OkStatus();
}

absl::Status SimFile::Sync() {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(life_));
  return machine_->SyncNode(node_.get(), path());
}

absl::Status SimFile::Append(absl::string_view bytes) {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(life_));
  return machine_->WriteNode(node_.get(), path(), node_->bytes, AsBytes(bytes));
}

SimDisk::SimDisk(uint64_t seed) : machine_(std::make_unique<SimMachine>(seed)) {
  machine_->stops_queues = [machine = machine_.get()] {
    for (SimQueue* queue : machine->queues) {
      queue->StopInPart();
    }
  };
}
SimDisk::~SimDisk() = default;

absl::StatusOr<std::unique_ptr<DiskFile>> SimDisk::OpenDirect(
    const std::string& path, bool create) {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(machine_->life));
  auto node = machine_->Find(path);
  if (!node.ok() && create) {
    node = std::make_shared<SimNode>();
    BALLAST_RETURN_IF_ERROR(machine_->ChangeName("", path, *node));
  }
  BALLAST_RETURN_IF_ERROR(node.status());
  return std::unique_ptr<DiskFile>(
      std::make_unique<SimFile>(machine_.get(), *node, path, true));
}

absl::StatusOr<std::unique_ptr<DiskFile>> SimDisk::OpenForRead(
    const std::string& path) {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(machine_->life));
  BALLAST_ASSIGN_OR_RETURN(auto node, machine_->Find(path));
  return std::unique_ptr<DiskFile>(
      std::make_unique<SimFile>(machine_.get(), node, path, false));
}

absl::StatusOr<std::unique_ptr<SimFile>> SimDisk::Create(
    const std::string& path) {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(machine_->life));
  auto node = std::make_shared<SimNode>();
  BALLAST_RETURN_IF_ERROR(machine_->ChangeName("", path, node));
  return std::make_unique<SimFile>(machine_.get(), node, path, false);
}

bool SimDisk::Exists(const std::string& path) {
  MutexLock lock(&machine_->mutex);
  return machine_->names.count(path) != 0;
}

absl::StatusOr<std::string> SimDisk::ReadFile(const std::string& path,
                                              uint64_t bytes_max) {
  BALLAST_ASSIGN_OR_RETURN(const auto file, OpenForRead(path));
  BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, file->Bytes());
  if (bytes > bytes_max) {
    return absl::DataLossError(absl::StrCat(
        path, " is ", bytes, " bytes long; want at most ", bytes_max));
  }
  std::string text(bytes, '\0');
  BALLAST_RETURN_IF_ERROR(
      file->Read(0, {reinterpret_cast<std::byte*>(text.data()), text.size()}));
  return text;
}

absl::Status SimDisk::ReplaceFile(const std::string& path,
                                  absl::string_view bytes) {
  const std::string temporary = absl::StrCat(path, ".tmp");
  BALLAST_ASSIGN_OR_RETURN(const auto file, Create(temporary));
  absl::Status status = file->Append(bytes);
  if (status.ok()) {
    status = file->Sync();
  }
  if (status.ok()) {
    status = Rename(temporary, path);
  }
  if (!status.ok()) {
    Unlink(temporary).IgnoreError();  // The first error says more.
    return status;
  }
  return SyncDirectory(ParentDirectory(path));
}

absl::Status SimDisk::Rename(const std::string& from, const std::string& to) {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(machine_->life));
  BALLAST_CHECK(ParentDirectory(from) == ParentDirectory(to));
  BALLAST_ASSIGN_OR_RETURN(auto node, machine_->Find(from));
  return machine_->ChangeName(from, to, node);
}

absl::Status SimDisk::Unlink(const std::string& path) {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(machine_->life));
  BALLAST_RETURN_IF_ERROR(machine_->Find(path).status());
  return machine_->ChangeName(path, "", nullptr);
}

absl::StatusOr<std::vector<std::string>> SimDisk::List(
    const std::string& path) {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(machine_->life));
  BALLAST_ASSIGN_OR_RETURN(const auto node, machine_->Find(path));
  if (!node->folder) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot list ", path, ": Not a directory"));
  }
  std::vector<std::string> found;
  const std::string prefix = path + "/";
  for (auto it = machine_->names.lower_bound(prefix);
       it != machine_->names.end(); ++it) {
    absl::string_view name = it->first;
    if (!absl::ConsumePrefix(&name, prefix)) {
      break;
    }
    if (!absl::StrContains(name, '/')) {
      found.emplace_back(name);
    }
  }
  return found;
}

absl::Status SimDisk::MakeDirectories(const std::string& path) {
  const std::string parent = ParentDirectory(path);
  if (path == "/" || path == ".") {
    return absl::OkStatus();
  }
  if (!Exists(path)) {
    BALLAST_RETURN_IF_ERROR(MakeDirectories(parent));
    MutexLock lock(&machine_->mutex);
    BALLAST_RETURN_IF_ERROR(machine_->Alive(machine_->life));
    auto node = std::make_shared<SimNode>();
    node->folder = true;
    BALLAST_RETURN_IF_ERROR(machine_->ChangeName("", path, node));
  }
  return SyncDirectory(parent);
}

absl::Status SimDisk::SyncDirectory(const std::string& path) {
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(machine_->life));
  if (path != "/") {
    BALLAST_RETURN_IF_ERROR(machine_->Find(path).status());
  }
  return machine_->SyncFolder(path);
}

absl::StatusOr<std::unique_ptr<DiskLock>> SimDisk::Lock(
    const std::string& path, const std::string& owner) {
  if (!Exists(path)) {
    BALLAST_RETURN_IF_ERROR(Create(path).status());
  }
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(machine_->life));
  const auto [it, taken] = machine_->locks.emplace(path, owner);
  if (!taken) {
    return absl::AbortedError(it->second);
  }
  return std::unique_ptr<DiskLock>(
      std::make_unique<SimLock>(machine_.get(), path));
}

absl::StatusOr<std::unique_ptr<IoQueue>> SimDisk::StartQueue(
    const IoQueue::Options& /*options*/) {
  return std::unique_ptr<IoQueue>(std::make_unique<SimQueue>(machine_.get()));
}

absl::StatusOr<std::unique_ptr<StateStore>> SimDisk::OpenStateStore(
    const std::string& dir, const EmbeddedStoreOptions& options) {
  if (options.create) {
    BALLAST_RETURN_IF_ERROR(MakeDirectories(dir));
  }
  MutexLock lock(&machine_->mutex);
  BALLAST_RETURN_IF_ERROR(machine_->Alive(machine_->life));
  auto& contents = machine_->stores[dir];
  if (contents == nullptr) {
    if (!options.create) {
      machine_->stores.erase(dir);
      return absl::DataLossError(
          absl::StrCat(dir, " has lost its file CURRENT; want a store"));
    }
    contents = std::make_shared<SimStoreContents>();
  }
  // What an earlier life wrote, and only the page cache may have.
  const bool happens = machine_->Syncs(Sync::Of::kStore, dir, /*wrote=*/false);
  if (const bool cut = machine_->CutsNow();
      happens && (!cut || machine_->Flip())) {
    contents->disk = contents->now;
    contents->unsynced.clear();
  }
  BALLAST_RETURN_IF_ERROR(machine_->Alive(machine_->life));
  return MakeSimStateStore(machine_.get(), dir, contents);
}

uint64_t SimDisk::pending() const {
  MutexLock lock(&machine_->mutex);
  uint64_t count = 0;
  for (const SimQueue* queue : machine_->queues) {
    count += queue->size();
  }
  return count;
}

bool SimDisk::PumpOne() {
  SimQueue* chosen = nullptr;
  IoRequest request;
  {
    MutexLock lock(&machine_->mutex);
    uint64_t count = 0;
    for (const SimQueue* queue : machine_->queues) {
      count += queue->size();
    }
    if (count == 0) {
      return false;
    }
    uint64_t at = machine_->random() % count;
    for (SimQueue* queue : machine_->queues) {
      if (at < queue->size()) {
        request = queue->Take(at);
        chosen = queue;
        break;
      }
      at -= queue->size();
    }
  }
  chosen->Do(std::move(request));
  return true;
}

void SimDisk::Pump() {
  while (PumpOne()) {
  }
}

uint64_t SimDisk::changes() const {
  MutexLock lock(&machine_->mutex);
  return machine_->changes;
}

void SimDisk::CutAfter(uint64_t n) {
  MutexLock lock(&machine_->mutex);
  machine_->cut_at = machine_->changes + n;
}

void SimDisk::Stop() {
  MutexLock lock(&machine_->mutex);
  machine_->Stop();
}

bool SimDisk::stopped() const {
  MutexLock lock(&machine_->mutex);
  return machine_->stopped;
}

void SimDisk::Restart(End end) {
  MutexLock lock(&machine_->mutex);
  if (end == End::kPower) {
    machine_->CutPower();
  }
  machine_->locks.clear();
  machine_->newest_names.clear();
  machine_->cut_at.reset();
  machine_->stopped = false;
  ++machine_->life;
}

void SimDisk::Fail(Operation operation, const std::string& part,
                   absl::Status status, uint32_t skip, uint32_t times) {
  MutexLock lock(&machine_->mutex);
  machine_->faults.push_back({operation, part, std::move(status), skip, times});
}

void SimDisk::set_capacity(uint64_t bytes) {
  MutexLock lock(&machine_->mutex);
  machine_->capacity = bytes;
}

uint64_t SimDisk::used_bytes() const {
  MutexLock lock(&machine_->mutex);
  return machine_->UsedBytes();
}

void SimDisk::FlipBit(const std::string& path, uint64_t offset) {
  MutexLock lock(&machine_->mutex);
  const auto node = machine_->Find(path);
  BALLAST_CHECK(node.ok() && offset < (*node)->bytes);
  SimPage& page = (*node)->pages[offset / kPageBytes];
  if (page.now == nullptr) {
    page.now = std::make_unique<std::byte[]>(kPageBytes);
  }
  page.now[offset % kPageBytes] ^= std::byte{0x10};
  if (page.disk != nullptr) {
    page.disk[offset % kPageBytes] ^= std::byte{0x10};
  }
}

void SimDisk::SkipSyncs(std::function<bool(const Sync&)> skips) {
  MutexLock lock(&machine_->mutex);
  machine_->skips = std::move(skips);
}

void SimDisk::OnSync(std::function<void(const Sync&)> hears) {
  MutexLock lock(&machine_->mutex);
  machine_->hears = std::move(hears);
}

}  // namespace ballast::testing
