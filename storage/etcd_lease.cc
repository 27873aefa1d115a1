// SPDX-License-Identifier: Apache-2.0
#include "storage/etcd_lease.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/mutex.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

namespace pb = ::etcdserverpb;

constexpr absl::Duration kTtlMin = absl::Seconds(2);
// Between attempts while etcd is silent.
constexpr absl::Duration kRetry = absl::Milliseconds(100);

int64_t Seconds(absl::Duration ttl) {
  return absl::ToInt64Seconds(
      absl::Ceil(std::max(ttl, kTtlMin), absl::Seconds(1)));
}

void Revoke(EtcdClient* client, int64_t id) {
  pb::LeaseRevokeRequest request;
  request.set_id(id);
  client
      ->CallAny(
          [&](const EtcdClient::Server& server, grpc::ClientContext* context) {
            pb::LeaseRevokeResponse reply;
            return server.lease->LeaseRevoke(context, request, &reply);
          })
      .IgnoreError();  // It ends by itself then.
}

// Creates the key under the lease. After an answer that was lost, the key shows
// whether it was: lease ids are never used twice.
absl::Status CreateKey(EtcdClient* client, const std::string& key,
                       const std::string& value, int64_t lease) {
  pb::TxnRequest request;
  pb::Compare* compare = request.add_compare();
  compare->set_key(key);
  compare->set_target(pb::Compare::VERSION);
  compare->set_version(0);
  pb::PutRequest* put = request.add_success()->mutable_request_put();
  put->set_key(key);
  put->set_value(value);
  put->set_lease(lease);
  request.add_failure()->mutable_request_range()->set_key(key);
  pb::TxnResponse reply;
  BALLAST_RETURN_IF_ERROR(client->CallAny(
      [&](const EtcdClient::Server& server, grpc::ClientContext* context) {
        return server.kv->Txn(context, request, &reply);
      }));
  const bool ours =
      reply.succeeded() ||
      (reply.responses_size() > 0 &&
       reply.responses(0).response_range().kvs_size() > 0 &&
       reply.responses(0).response_range().kvs(0).lease() == lease);
  return ours ? absl::OkStatus()
              : absl::AbortedError(absl::StrCat(
                    "key '", key, "' exists; whoever made it may be alive"));
}

class EtcdLease final : public StoreLease {
 public:
  EtcdLease(EtcdClient* client, std::string key, int64_t id, absl::Duration ttl,
            absl::Time renewed_at)
      : client_(client),
        key_(std::move(key)),
        id_(id),
        ttl_(ttl),
        sure_until_(renewed_at + ttl),
        thread_([this] { Renew(); }) {}

  ~EtcdLease() override {
    {
      MutexLock lock(&mutex_);
      stopped_ = true;
      changed_.NotifyAll();
      if (call_ != nullptr) {
        call_->TryCancel();
      }
    }
    thread_.join();
    Revoke(client_, id_);
  }

  bool held() const override {
    MutexLock lock(&mutex_);
    return !lost_ && MonotonicNow() < sure_until_;
  }

 private:
  // Waits; false when the lease is given up.
  bool Pause(absl::Duration wait) {
    const absl::Time until = MonotonicNow() + wait;
    MutexLock lock(&mutex_);
    while (!stopped_ && MonotonicNow() < until) {
      changed_.WaitFor(&mutex_, until - MonotonicNow());
    }
    return !stopped_;
  }

  void Renew() {
    bool silent = false;
    while (Pause(silent ? kRetry : ttl_ / 3)) {
      const absl::Time sent = MonotonicNow();
      const absl::StatusOr<absl::Duration> left = RenewOnce();
      if (left.ok() && *left <= absl::ZeroDuration()) {
        LogEvent(Severity::kWarn, "lease_lost", {{"key", key_}});
        MutexLock lock(&mutex_);
        lost_ = true;
        return;
      }
      if (left.ok()) {
        MutexLock lock(&mutex_);
        sure_until_ = sent + *left;
      } else if (!silent) {
        LogEvent(
            Severity::kWarn, "lease_not_renewed",
            {{"key", key_}, {"reason", std::string(left.status().message())}});
      }
      silent = !left.ok();
    }
  }

  // A stream of its own for each renewal: so it has a deadline.
  absl::StatusOr<absl::Duration> RenewOnce() {
    pb::LeaseKeepAliveRequest request;
    request.set_id(id_);
    pb::LeaseKeepAliveResponse reply;
    BALLAST_RETURN_IF_ERROR(client_->Call(
        [&](const EtcdClient::Server& server, grpc::ClientContext* context) {
          if (!Begin(context)) {
            return grpc::Status::CANCELLED;
          }
          const auto stream = server.lease->LeaseKeepAlive(context);
          const bool read = stream->Write(request) && stream->Read(&reply);
          if (read) {
            context->TryCancel();  // One answer is all that is wanted.
          }
          const grpc::Status status = stream->Finish();
          MutexLock lock(&mutex_);
          call_ = nullptr;
          return read ? grpc::Status::OK : status;
        }));
    return absl::Seconds(reply.ttl());
  }

  bool Begin(grpc::ClientContext* context) {
    MutexLock lock(&mutex_);
    call_ = context;
    return !stopped_;
  }

  EtcdClient* const client_;
  const std::string key_;
  const int64_t id_;
  const absl::Duration ttl_;
  mutable Mutex mutex_;
  CondVar changed_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool lost_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time sure_until_ ABSL_GUARDED_BY(mutex_);
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::thread thread_;  // Last: it uses all of the above.
};

}  // namespace

absl::StatusOr<std::unique_ptr<StoreLease>> TakeEtcdLease(
    EtcdClient* client, const std::string& key, const std::string& value,
    absl::Duration ttl) {
  pb::LeaseGrantRequest request;
  request.set_ttl(Seconds(ttl));
  pb::LeaseGrantResponse granted;
  const absl::Time sent = MonotonicNow();
  BALLAST_RETURN_IF_ERROR(client->CallAny(
      [&](const EtcdClient::Server& server, grpc::ClientContext* context) {
        return server.lease->LeaseGrant(context, request, &granted);
      }));
  const absl::Status created = CreateKey(client, key, value, granted.id());
  if (!created.ok()) {
    Revoke(client, granted.id());
    return created;
  }
  return std::make_unique<EtcdLease>(client, key, granted.id(),
                                     absl::Seconds(granted.ttl()), sent);
}

}  // namespace ballast
