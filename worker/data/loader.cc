// SPDX-License-Identifier: Apache-2.0
#include "worker/data/loader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

// The text of an errno, thread-safely.
std::string ErrorText(int error) {
  char buffer[128];
  return strerror_r(error, buffer, sizeof(buffer));
}

// A file descriptor that is closed once.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(File&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&&) = delete;
  ~File() {
    if (descriptor_ >= 0) {
      close(descriptor_);
    }
  }
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

struct Text {
  File file;
  uint64_t bytes = 0;
};

absl::StatusOr<Text> OpenText(const std::string& path) {
  File file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.descriptor() < 0) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR) {
      return absl::NotFoundError(
          absl::StrCat("data.path is '", path, "', and there is no such file"));
    }
    return absl::PermissionDeniedError(
        absl::StrCat("data.path is '", path,
                     "', which cannot be opened: ", ErrorText(error)));
  }
  struct stat info = {};
  if (fstat(file.descriptor(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data.path is '", path, "', which is not a file; want a text file"));
  }
  if (info.st_size == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("data.path is '", path, "', which is empty"));
  }
  return Text{std::move(file), static_cast<uint64_t>(info.st_size)};
}

}  // namespace

class Loader::Impl {
 public:
  Impl(const Job& job, Text text, const Sampler& sampler)
      : path_(job.data.path),
        context_(job.model.context),
        vocabulary_(job.model.vocabulary),
        sequences_(job.batch.micro_batch_size),
        text_(std::move(text)),
        sampler_(sampler),
        thread_([this] { Run(); }) {}

  ~Impl() {
    {
      MutexLock lock(&mutex_);
      ending_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }

  void Announce(absl::Span<const BatchName> next) {
    {
      MutexLock lock(&mutex_);
      std::deque<Entry> old = std::move(entries_);
      entries_.clear();
      for (const BatchName& name : next) {
        // What is read or being read stays so if it is wanted again.
        auto known = old.begin();
        while (known != old.end() && !(known->name == name)) {
          ++known;
        }
        if (known == old.end()) {
          entries_.push_back({name, ++last_serial_, false, std::nullopt});
        } else {
          entries_.push_back(std::move(*known));
          old.erase(known);
        }
      }
    }
    changed_.NotifyAll();
  }

  absl::StatusOr<MicroBatch> Take(const BatchName& name) {
    {
      MutexLock lock(&mutex_);
      for (auto entry = Find(name);
           entry != entries_.end() && (entry->in_hand || entry->result);
           entry = Find(name)) {
        if (entry->result) {
          absl::StatusOr<MicroBatch> result = std::move(*entry->result);
          entries_.erase(entry);
          changed_.NotifyAll();
          return result;
        }
        changed_.Wait(&mutex_);
      }
      // Not announced, or not begun: reading it here is the shortest way.
      const auto entry = Find(name);
      if (entry != entries_.end()) {
        entries_.erase(entry);
      }
    }
    changed_.NotifyAll();
    return Read(name);
  }

  const Sampler& sampler() const { return sampler_; }

 private:
  struct Entry {
    BatchName name;
    uint64_t serial = 0;   // Names this announcement of it.
    bool in_hand = false;  // The thread is reading it.
    std::optional<absl::StatusOr<MicroBatch>> result;
  };

  std::deque<Entry>::iterator Find(const BatchName& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    auto entry = entries_.begin();
    while (entry != entries_.end() && !(entry->name == name)) {
      ++entry;
    }
    return entry;
  }

  // The first entry to read, null when all that may be held ready is.
  Entry* NextToRead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (size_t i = 0; i < entries_.size() && i < kAheadMax; ++i) {
      if (!entries_[i].in_hand && !entries_[i].result) {
        return &entries_[i];
      }
    }
    return nullptr;
  }

  void Run() {
    MutexLock lock(&mutex_);
    while (!ending_) {
      Entry* next = NextToRead();
      if (next == nullptr) {
        changed_.Wait(&mutex_);
        continue;
      }
      next->in_hand = true;
      const BatchName name = next->name;
      const uint64_t serial = next->serial;
      mutex_.Unlock();
      absl::StatusOr<MicroBatch> result = Read(name);
      mutex_.Lock();
      // It may have been dropped by a new announcement meanwhile.
      for (Entry& entry : entries_) {
        if (entry.serial == serial) {
          entry.in_hand = false;
          entry.result = std::move(result);
          break;
        }
      }
      changed_.NotifyAll();
    }
  }

  absl::StatusOr<MicroBatch> Read(const BatchName& name) const {
    MicroBatch batch;
    batch.ids.reserve(sequences_ * context_);
    batch.targets.reserve(sequences_ * context_);
    std::string window(context_ + 1, '\0');
    for (uint32_t i = 0; i < sequences_; ++i) {
      const uint64_t offset =
          name.eval ? sampler_.EvalOffset(name.micro_batch, i)
                    : sampler_.TrainOffset(name.step, name.micro_batch, i);
      BALLAST_RETURN_IF_ERROR(ReadWindow(offset, &window));
      for (uint64_t t = 0; t < context_; ++t) {
        batch.ids.push_back(static_cast<unsigned char>(window[t]));
        batch.targets.push_back(static_cast<unsigned char>(window[t + 1]));
      }
    }
    return batch;
  }

  absl::Status ReadWindow(uint64_t offset, std::string* window) const {
    uint64_t filled = 0;
    while (filled < window->size()) {
      const ssize_t count =
          pread(text_.file.descriptor(), window->data() + filled,
                window->size() - filled, static_cast<off_t>(offset + filled));
      if (count < 0 && errno == EINTR) {
        continue;
      }
      if (count <= 0) {
        return absl::FailedPreconditionError(absl::StrCat(
            "data.path '", path_, "' cannot be read at byte ", offset + filled,
            ": ", count < 0 ? ErrorText(errno) : "the file was cut short",
            "; it had ", text_.bytes, " bytes when the run started"));
      }
      filled += static_cast<uint64_t>(count);
    }
    for (uint64_t i = 0; i < window->size(); ++i) {
      const uint32_t byte = static_cast<unsigned char>((*window)[i]);
      if (byte >= vocabulary_) {
        return absl::InvalidArgumentError(absl::StrCat(
            "data.path '", path_, "' has the byte ", byte, " at ", offset + i,
            "; want bytes below model.vocabulary, ", vocabulary_));
      }
    }
    return absl::OkStatus();
  }

  const std::string path_;
  const uint64_t context_;
  const uint32_t vocabulary_;
  const uint32_t sequences_;
  const Text text_;
  const Sampler sampler_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_serial_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // Last: it uses all of the above.
};

absl::StatusOr<std::unique_ptr<Loader>> Loader::Open(const Job& job) {
  BALLAST_ASSIGN_OR_RETURN(Text text, OpenText(job.data.path));
  BALLAST_ASSIGN_OR_RETURN(const Sampler sampler,
                           Sampler::Create(job, text.bytes));
  return std::unique_ptr<Loader>(
      new Loader(std::make_unique<Impl>(job, std::move(text), sampler)));
}

Loader::Loader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Loader::~Loader() = default;

void Loader::Announce(absl::Span<const BatchName> next) {
  impl_->Announce(next);
}

absl::StatusOr<MicroBatch> Loader::Take(const BatchName& name) {
  return impl_->Take(name);
}

const Sampler& Loader::sampler() const { return impl_->sampler(); }

}  // namespace ballast
