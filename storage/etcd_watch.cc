// SPDX-License-Identifier: Apache-2.0
#include "storage/etcd_watch.h"

#include <set>
#include <thread>
#include <utility>

#include "common/clock.h"
#include "common/log.h"
#include "common/mutex.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

namespace pb = ::etcdserverpb;

// Before a broken stream is opened again.
constexpr absl::Duration kRetry = absl::Milliseconds(100);

class EtcdWatch final : public StoreWatch {
 public:
  EtcdWatch(EtcdClient* client, std::string prefix, std::string begin,
            std::string end, SharedStateStore::OnChange on_change)
      : client_(client),
        prefix_(std::move(prefix)),
        begin_(std::move(begin)),
        end_(std::move(end)),
        on_change_(std::move(on_change)) {}

  ~EtcdWatch() override {
    {
      MutexLock lock(&mutex_);
      stopped_ = true;
      changed_.NotifyAll();
      if (call_ != nullptr) {
        call_->TryCancel();
      }
    }
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  absl::Status Start() {
    BALLAST_RETURN_IF_ERROR(Reread(/*tell=*/false));
    thread_ = std::thread([this] { Run(); });
    return absl::OkStatus();
  }

 private:
  void Tell(const std::string& key, std::optional<std::string> value) {
    if (value.has_value()) {
      known_.insert(key);
    } else {
      known_.erase(key);
    }
    on_change_({key.substr(prefix_.size()), std::move(value)});
  }

  // Reads all keys as they are now; later changes are streamed. With `tell`,
  // what changed since the last revision seen is told.
  absl::Status Reread(bool tell) {
    pb::RangeRequest request;
    request.set_key(begin_);
    request.set_range_end(end_);
    pb::RangeResponse reply;
    BALLAST_RETURN_IF_ERROR(client_->CallAny(
        [&](const EtcdClient::Server& server, grpc::ClientContext* context) {
          return server.kv->Range(context, request, &reply);
        }));
    std::set<std::string> gone = std::exchange(known_, {});
    for (const pb::KeyValue& kv : reply.kvs()) {
      gone.erase(kv.key());
      known_.insert(kv.key());
      if (tell && kv.mod_revision() > seen_) {
        Tell(kv.key(), kv.value());
      }
    }
    for (const std::string& key : gone) {
      Tell(key, std::nullopt);
    }
    seen_ = reply.header().revision();
    return absl::OkStatus();
  }

  void Run() {
    bool complained = false;
    while (true) {
      const absl::Status ended = Stream();
      MutexLock lock(&mutex_);
      if (!stopped_ && !complained) {
        LogEvent(Severity::kWarn, "watch_broken",
                 {{"key", begin_}, {"reason", std::string(ended.message())}});
        complained = true;
      }
      const absl::Time until = MonotonicNow() + kRetry;
      while (!stopped_ && MonotonicNow() < until) {
        changed_.WaitFor(&mutex_, until - MonotonicNow());
      }
      if (stopped_) {
        return;
      }
    }
  }

  bool Begin(grpc::ClientContext* context) {
    MutexLock lock(&mutex_);
    call_ = context;
    return !stopped_;
  }
  void Done() {
    MutexLock lock(&mutex_);
    call_ = nullptr;
  }

  // Tells changes until the stream breaks; says why it did.
  absl::Status Stream() {
    BALLAST_ASSIGN_OR_RETURN(const EtcdClient::Server* server,
                             client_->Connected());
    grpc::ClientContext context;  // No deadline: keepalive finds a dead peer.
    if (!Begin(&context)) {
      return absl::CancelledError("stopped");
    }
    const auto stream = server->watch->Watch(&context);
    pb::WatchRequest request;
    pb::WatchCreateRequest* create = request.mutable_create_request();
    create->set_key(begin_);
    create->set_range_end(end_);
    create->set_start_revision(seen_ + 1);
    bool forgotten = false;
    pb::WatchResponse response;
    if (stream->Write(request)) {
      while (stream->Read(&response)) {
        forgotten = forgotten || response.compact_revision() > 0;
        if (response.canceled()) {
          context.TryCancel();
          continue;
        }
        for (const pb::Event& event : response.events()) {
          Tell(event.kv().key(),
               event.type() == pb::Event::PUT
                   ? std::optional<std::string>(event.kv().value())
                   : std::nullopt);
          // Not the header's revision, which may be ahead of what was told.
          seen_ = event.kv().mod_revision();
        }
      }
    }
    const grpc::Status status = stream->Finish();
    Done();
    if (forgotten) {  // etcd no longer knows all that happened since.
      return Reread(/*tell=*/true);
    }
    client_->GoOn(*server);
    return absl::UnavailableError(status.error_message());
  }

  EtcdClient* const client_;
  const std::string prefix_;
  const std::string begin_;
  const std::string end_;
  const SharedStateStore::OnChange on_change_;
  // Of the watch's thread, once it runs.
  int64_t seen_ = 0;             // The last revision told.
  std::set<std::string> known_;  // Keys that stood then.
  Mutex mutex_;
  CondVar changed_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StoreWatch>> StartEtcdWatch(
    EtcdClient* client, const std::string& prefix, const std::string& begin,
    const std::string& end, SharedStateStore::OnChange on_change) {
  auto watch = std::make_unique<EtcdWatch>(client, prefix, begin, end,
                                           std::move(on_change));
  BALLAST_RETURN_IF_ERROR(watch->Start());
  return watch;
}

}  // namespace ballast
