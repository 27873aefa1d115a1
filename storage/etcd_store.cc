// SPDX-License-Identifier: Apache-2.0
#include "storage/etcd_store.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/status_macros.h"
#include "storage/etcd_client.h"
#include "storage/etcd_lease.h"
#include "storage/etcd_watch.h"

namespace ballast {
namespace {

namespace pb = ::etcdserverpb;

// etcd takes 128 operations in a transaction unless told otherwise.
constexpr uint64_t kBatchMax = 120;
constexpr int64_t kPageMax = 1000;

class EtcdStateStore final : public SharedStateStore {
 public:
  explicit EtcdStateStore(EtcdOptions options)
      : options_(std::move(options)),
        client_(options_.endpoints, options_.call_timeout) {}

  absl::StatusOr<std::string> Get(absl::string_view key) override {
    pb::RangeRequest request;
    request.set_key(Name(key));
    pb::RangeResponse reply;
    BALLAST_RETURN_IF_ERROR(Read(request, &reply));
    if (reply.kvs().empty()) {
      return absl::NotFoundError(absl::StrCat("no key '", Name(key), "'"));
    }
    return reply.kvs(0).value();
  }

  absl::Status CompareAndSwap(
      absl::string_view key, const std::optional<std::string>& expected,
      const std::vector<StateChange>& changes) override {
    pb::TxnRequest request;
    BALLAST_RETURN_IF_ERROR(AddChanges(changes, &request));
    pb::Compare* compare = request.add_compare();
    compare->set_key(Name(key));
    if (expected.has_value()) {
      compare->set_target(pb::Compare::VALUE);
      compare->set_value(*expected);
    } else {
      compare->set_target(pb::Compare::VERSION);
      compare->set_version(0);
    }
    request.add_failure()->mutable_request_range()->set_key(Name(key));
    pb::TxnResponse reply;
    BALLAST_RETURN_IF_ERROR(Commit(request, &reply));
    if (reply.succeeded()) {
      return absl::OkStatus();
    }
    const bool exists = reply.responses_size() > 0 &&
                        reply.responses(0).response_range().kvs_size() > 0;
    return absl::AbortedError(absl::StrCat(
        "key '", key, "' ", exists ? "holds another value" : "does not exist",
        "; read it again"));
  }

  absl::Status Apply(const std::vector<StateChange>& changes) override {
    pb::TxnRequest request;
    BALLAST_RETURN_IF_ERROR(AddChanges(changes, &request));
    pb::TxnResponse reply;
    return Commit(request, &reply);
  }

  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Range(
      absl::string_view begin, absl::string_view end, uint64_t limit) override {
    std::vector<std::pair<std::string, std::string>> pairs;
    if (begin >= end) {
      return pairs;
    }
    pb::RangeRequest request;
    request.set_key(Name(begin));
    request.set_range_end(Name(end));
    bool more = true;
    while (more && pairs.size() < limit) {
      request.set_limit(static_cast<int64_t>(
          std::min<uint64_t>(limit - pairs.size(), kPageMax)));
      pb::RangeResponse reply;
      BALLAST_RETURN_IF_ERROR(Read(request, &reply));
      for (pb::KeyValue& kv : *reply.mutable_kvs()) {
        pairs.emplace_back(kv.key().substr(options_.prefix.size()),
                           std::move(*kv.mutable_value()));
      }
      more = reply.more() && !reply.kvs().empty();
      if (more) {  // All pages show the store as the first one saw it.
        request.set_revision(reply.header().revision());
        request.set_key(reply.kvs().rbegin()->key() + '\0');
      }
    }
    return pairs;
  }

  absl::StatusOr<std::unique_ptr<StoreWatch>> Watch(
      absl::string_view begin, absl::string_view end,
      OnChange on_change) override {
    return StartEtcdWatch(&client_, options_.prefix, Name(begin), Name(end),
                          std::move(on_change));
  }

  absl::StatusOr<std::unique_ptr<StoreLease>> Lease(
      absl::string_view key, absl::string_view value,
      absl::Duration ttl) override {
    return TakeEtcdLease(&client_, Name(key), std::string(value), ttl);
  }

  uint64_t batch_max() const override { return kBatchMax; }

 private:
  std::string Name(absl::string_view key) const {
    return absl::StrCat(options_.prefix, key);
  }

  absl::Status Read(const pb::RangeRequest& request, pb::RangeResponse* reply) {
    const absl::Status status = client_.CallAny(
        [&](const EtcdClient::Server& server, grpc::ClientContext* context) {
          return server.kv->Range(context, request, reply);
        });
    if (absl::IsOutOfRange(status)) {  // Pages of a revision forgotten since.
      return absl::UnavailableError(
          absl::StrCat(status.message(), "; read it again"));
    }
    return status;
  }

  absl::Status AddChanges(const std::vector<StateChange>& changes,
                          pb::TxnRequest* request) const {
    if (changes.size() > kBatchMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("a batch of ", changes.size(),
                       " changes; etcd takes at most ", kBatchMax));
    }
    // etcd refuses a batch that names a key twice; the last one counts.
    std::map<absl::string_view, const StateChange*> last;
    for (const StateChange& change : changes) {
      last[change.key] = &change;
    }
    for (const auto& [key, change] : last) {
      pb::RequestOp* op = request->add_success();
      if (change->value.has_value()) {
        op->mutable_request_put()->set_key(Name(key));
        op->mutable_request_put()->set_value(*change->value);
      } else {
        op->mutable_request_delete_range()->set_key(Name(key));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Commit(const pb::TxnRequest& request, pb::TxnResponse* reply) {
    BALLAST_RETURN_IF_ERROR(client_.Call(
        [&](const EtcdClient::Server& server, grpc::ClientContext* context) {
          return server.kv->Txn(context, request, reply);
        }));
    Forget(reply->header().revision());
    return absl::OkStatus();
  }

  // Keeps etcd's own history bounded. Its failure costs only space: a later
  // call repeats it.
  void Forget(int64_t revision) {
    int64_t done = forgotten_.load(std::memory_order_relaxed);
    if (revision < done + 2 * options_.history ||
        !forgotten_.compare_exchange_strong(done, revision - options_.history,
                                            std::memory_order_relaxed)) {
      return;
    }
    pb::CompactionRequest request;
    request.set_revision(revision - options_.history);
    client_
        .Call([&](const EtcdClient::Server& server,
                  grpc::ClientContext* context) {
          pb::CompactionResponse reply;
          return server.kv->Compact(context, request, &reply);
        })
        .IgnoreError();
  }

  const EtcdOptions options_;
  EtcdClient client_;
  // Of one store alone; another's compaction makes ours a refused no-op.
  std::atomic<int64_t> forgotten_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseEtcdUrl(absl::string_view url) {
  const std::string wanted = absl::StrCat(
      "'", url, "' is no state store; want etcd://host:port[,host:port]");
  absl::string_view rest = url;
  if (!absl::ConsumePrefix(&rest, "etcd://")) {
    return absl::InvalidArgumentError(wanted);
  }
  std::vector<std::string> endpoints;
  for (const absl::string_view part : absl::StrSplit(rest, ',')) {
    const size_t colon = part.rfind(':');
    uint32_t port = 0;
    if (colon == absl::string_view::npos || colon == 0 ||
        part.find('/') != absl::string_view::npos ||
        !absl::SimpleAtoi(part.substr(colon + 1), &port) || port == 0 ||
        port > 65535) {
      return absl::InvalidArgumentError(wanted);
    }
    endpoints.emplace_back(part);
  }
  return endpoints;
}

absl::StatusOr<std::unique_ptr<SharedStateStore>> OpenEtcdStateStore(
    EtcdOptions options) {
  if (options.endpoints.empty()) {
    return absl::InvalidArgumentError("no endpoint of etcd is named");
  }
  return std::make_unique<EtcdStateStore>(std::move(options));
}

}  // namespace ballast
