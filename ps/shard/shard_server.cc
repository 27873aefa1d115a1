// SPDX-License-Identifier: Apache-2.0
#include "ps/shard/shard_server.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/crash_point.h"
#include "common/job_file.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "kernels/cpu_kernels.h"
#include "proto/bulk.h"
#include "ps/shard/mailbox.h"
#include "ps/shard/replica_dialer.h"
#include "ps/shard/shard_engine.h"
#include "ps/shard/shard_service.h"
#include "rpc/endpoint.h"
#include "rpc/member.h"

namespace ballast {
namespace {

v1::JoinRequest MakeJoin(const ShardServerOptions& options,
                         const std::string& data_dir,
                         const std::string& address) {
  v1::JoinRequest join;
  join.set_role(v1::ROLE_SERVER);
  join.set_name(options.name);
  join.set_address(options.advertise.empty() ? address : options.advertise);
  join.set_pid(getpid());
  join.set_host(options.host);
  join.set_data_dir(data_dir);
  for (const auto& [key, value] : NumericsFields(options.job)) {
    v1::ConfigField* field = join.add_numerics();
    field->set_key(key);
    field->set_value(value);
  }
  for (const auto& [key, value] : OperationsFields(options.job)) {
    v1::ConfigField* field = join.add_operations();
    field->set_key(key);
    field->set_value(value);
  }
  return join;
}

// gRPC gathers a message before anyone can look at its header, and no push that
// is above the whole budget can ever be taken.
int ReceiveBytesMax(uint64_t memory) {
  constexpr uint64_t kHeaderMax =
      kBulkFixedBytes + uint64_t{kBulkItemsMax} * kBulkItemBytes;
  const auto limit = static_cast<uint64_t>(kMessageBytesMax);
  return static_cast<int>(std::min(memory, limit - kHeaderMax) + kHeaderMax);
}

// The session's blocking question becomes one with an answer later.
class MemberShardSession final : public ShardSession {
 public:
  MemberShardSession(MemberSession* member, BlockingExecutor blocking)
      : member_(member), blocking_(std::move(blocking)) {}
  const v1::JoinReply& admission() const override {
    return member_->admission();
  }
  void Post(v1::ReportRequest request) override {
    member_->Post(std::move(request));
  }
  void AskPlacement(
      std::function<void(absl::StatusOr<v1::Placement>)> done) override {
    blocking_([member = member_, done = std::move(done)] {
      done(member->GetPlacement());
    });
  }

 private:
  MemberSession* const member_;
  const BlockingExecutor blocking_;
};

constexpr absl::Duration kIdleWait = absl::Milliseconds(50);
constexpr absl::Duration kLastReportMax = absl::Seconds(5);

// Nobody knows of us yet, so a full disk is waited for right here.
absl::Status OpenWithSpace(ShardEngine* engine, Mailbox* mailbox,
                           absl::Duration give_up_after) {
  const absl::Time give_up = MonotonicNow() + give_up_after;
  while (true) {
    absl::Status status = engine->Open();
    if (!absl::IsResourceExhausted(status) || MonotonicNow() > give_up) {
      return status;
    }
    LogEvent(Severity::kWarn, "disk_full", {{"why", status.message()}});
    mailbox->Wait(absl::Seconds(1));
  }
}

absl::Status Serve(ShardEngine* engine, Mailbox* mailbox,
                   MemberSession* member) {
  while (!engine->over()) {
    if (!engine->Step()) {
      mailbox->Wait(kIdleWait);
    }
  }
  if (auto report = engine->LastReport()) {
    member->Report(*std::move(report), kLastReportMax).IgnoreError();
  }
  return engine->failure();
}

}  // namespace

absl::Status RunShardServer(const ShardServerOptions& options) {
  BALLAST_RETURN_IF_ERROR(CheckCpuForKernels());
  std::error_code error;
  const std::string data_dir =
      std::filesystem::absolute(options.data_dir, error)
          .lexically_normal()
          .string();
  if (error) {
    return absl::InvalidArgumentError(absl::StrCat(
        "server.data_dir '", options.data_dir, "': ", error.message()));
  }
  auto mailbox = std::make_shared<Mailbox>();
  BlockingThread commits;
  const std::unique_ptr<ReplicaDialer> dialer = MakeReplicaDialer(mailbox);
  ShardEngine engine({options.job, options.name, data_dir, PosixDisk(),
                      MonotonicNow, commits.executor(), dialer.get()},
                     mailbox);
  BALLAST_RETURN_IF_ERROR(
      OpenWithSpace(&engine, mailbox.get(), options.job.cluster.give_up_after));
  // Services and sessions post to the engine; they go before it does.
  const std::unique_ptr<grpc::Service> service = MakeShardService(
      mailbox, engine.fetch(), engine.push(), engine.replicate());
  BALLAST_ASSIGN_OR_RETURN(
      const std::unique_ptr<Endpoint> endpoint,
      Endpoint::Start(options.host, options.port, {service.get()},
                      ReceiveBytesMax(options.job.server.memory)));
  MemberSession::Options session;
  session.coordinator = options.coordinator;
  session.join = MakeJoin(options, data_dir, endpoint->address());
  engine.FillJoin(&session.join);
  session.silence_max = options.job.cluster.give_up_after;
  session.on_directive = [&engine](const v1::PollReply& reply) {
    engine.Deliver(reply);
  };
  session.stats = [&engine] { return engine.stats(); };
  session.on_end = [&engine](const absl::Status& why) {
    engine.SessionOver(why);
  };
  BALLAST_CRASH_POINT("server.join.before");
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<MemberSession> member,
                           MemberSession::Start(std::move(session)));
  LogEvent(Severity::kInfo, "server_joined",
           {{"address", endpoint->address()},
            {"incarnation", member->admission().incarnation()},
            {"data_dir", data_dir}});
  BlockingThread questions;  // None of which waits for a sync.
  MemberShardSession shard_session(member.get(), questions.executor());
  absl::Status status = engine.Start(&shard_session);
  if (status.ok()) {
    if (options.on_admitted) {
      // A closed mailbox drops the task, so the engine may be gone.
      options.on_admitted([mailbox, &engine] {
        mailbox->Post([&engine] { engine.Drain("SIGTERM"); });
      });
    }
    status = Serve(&engine, mailbox.get(), member.get());
  } else {
    v1::ReportRequest request;
    request.set_timeline(member->admission().timeline());
    request.mutable_fatal()->set_code(static_cast<int32_t>(status.code()));
    request.mutable_fatal()->set_message(
        absl::StrCat(options.name, ": ", status.message()));
    member->Report(std::move(request), kLastReportMax).IgnoreError();
  }
  member->Stop();
  endpoint->Stop(absl::Seconds(1));
  return status;
}

}  // namespace ballast
