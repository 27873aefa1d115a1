// SPDX-License-Identifier: Apache-2.0
#include "rpc/member.h"

#include <sys/prctl.h>

#include <algorithm>
#include <deque>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/mutex.h"
#include "common/status_macros.h"
#include "proto/ballast.grpc.pb.h"
#include "rpc/endpoint.h"

namespace ballast {
namespace {

// Each poll brings the member's figures along, so this is also how old what
// `ballast status` shows may be: short against a step.
constexpr absl::Duration kPollWaitMax = absl::Milliseconds(100);
constexpr absl::Duration kCallTimeout = absl::Seconds(5);
constexpr absl::Duration kRetryFirst = absl::Milliseconds(20);
constexpr absl::Duration kRetryLast = absl::Milliseconds(500);
// A member reports a handful of events a step; more than this waiting means
// that nobody takes them, and silence_max ends the session before.
constexpr size_t kQueuedMax = 100000;

bool IsRepeatable(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsCancelled(status) || absl::IsResourceExhausted(status);
}

uint64_t FreshLifeId() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

class MemberSessionImpl final : public MemberSession {
 public:
  explicit MemberSessionImpl(Options options)
      : options_(std::move(options)),
        poll_stub_(v1::Coordinator::NewStub(MakeChannel(options_.coordinator))),
        report_stub_(
            v1::Coordinator::NewStub(MakeChannel(options_.coordinator))) {}
  ~MemberSessionImpl() override { Stop(); }

  absl::Status Join();
  void StartThreads() {
    poller_ = std::thread([this] { PollLoop(); });
    reporter_ = std::thread([this] { ReportLoop(); });
  }

  const v1::JoinReply& admission() const override { return admission_; }
  void Post(v1::ReportRequest request) override { Enqueue(std::move(request)); }
  absl::Status Report(v1::ReportRequest request,
                      absl::Duration timeout) override;
  absl::StatusOr<v1::Placement> GetPlacement() override;
  void Stop() override;

 private:
  using StubPointer = std::unique_ptr<v1::Coordinator::Stub>;

  // One call that Stop() can cancel.
  template <typename Request, typename Reply>
  absl::Status Call(v1::Coordinator::Stub* stub,
                    grpc::Status (v1::Coordinator::Stub::*method)(
                        grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply* reply,
                    absl::Duration timeout);
  // Repeats `call` until it ends otherwise than by silence, for silence_max.
  absl::Status CallUntilAnswered(absl::string_view what,
                                 const std::function<absl::Status()>& call);
  uint64_t Enqueue(v1::ReportRequest request);
  void PollLoop();
  void ReportLoop();
  void End(const absl::Status& status);
  bool IsOver() {
    MutexLock lock(&mutex_);
    return over_;
  }
  void FillStats(v1::MemberStats* stats) {
    if (options_.stats) {
      *stats = options_.stats();
    }
  }

  Options options_;
  const StubPointer poll_stub_;
  const StubPointer report_stub_;
  v1::JoinReply admission_;

  Mutex mutex_;
  CondVar changed_;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
  std::set<grpc::ClientContext*> calls_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::ReportRequest> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t posted_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;

  std::thread poller_;
  std::thread reporter_;
};

template <typename Request, typename Reply>
absl::Status MemberSessionImpl::Call(
    v1::Coordinator::Stub* stub,
    grpc::Status (v1::Coordinator::Stub::*method)(grpc::ClientContext*,
                                                  const Request&, Reply*),
    const Request& request, Reply* reply, absl::Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  {
    MutexLock lock(&mutex_);
    if (over_) {
      return absl::CancelledError("the session is over");
    }
    calls_.insert(&context);
  }
  absl::Status status =
      FromGrpcStatus((stub->*method)(&context, request, reply));
  MutexLock lock(&mutex_);
  calls_.erase(&context);
  return status;
}

absl::Status MemberSessionImpl::CallUntilAnswered(
    absl::string_view what, const std::function<absl::Status()>& call) {
  const absl::Time give_up = MonotonicNow() + options_.silence_max;
  absl::Duration pause = kRetryFirst;
  while (true) {
    absl::Status status = call();
    if (status.ok() || !IsRepeatable(status)) {
      return status;
    }
    MutexLock lock(&mutex_);
    if (over_) {
      return end_.ok() ? absl::CancelledError("the session was stopped") : end_;
    }
    if (MonotonicNow() >= give_up) {
      return absl::UnavailableError(absl::StrCat(
          "the coordinator at ", options_.coordinator, " did not take ", what,
          " for ", absl::FormatDuration(options_.silence_max), ": ",
          status.message()));
    }
    changed_.WaitFor(&mutex_, pause);
    pause = std::min(pause * 2, kRetryLast);
  }
}

absl::Status MemberSessionImpl::Join() {
  options_.join.set_life_id(FreshLifeId());
  BALLAST_RETURN_IF_ERROR(CallUntilAnswered("the join", [this] {
    return Call(report_stub_.get(), &v1::Coordinator::Stub::Join, options_.join,
                &admission_, kCallTimeout);
  }));
  if (admission_.life_id() != options_.join.life_id()) {
    return absl::AbortedError("the coordinator admitted another life of ours");
  }
  return absl::OkStatus();
}

void MemberSessionImpl::PollLoop() {
  uint64_t seen = 0;
  const absl::Duration wait =
      std::min(kPollWaitMax, absl::Milliseconds(admission_.lease_ms()) / 4);
  while (!IsOver()) {
    v1::PollReply reply;
    const absl::Status status = CallUntilAnswered("a poll", [&] {
      v1::PollRequest request;
      request.set_incarnation(admission_.incarnation());
      request.set_seen_number(seen);
      request.set_wait_ms(absl::ToInt64Milliseconds(wait));
      FillStats(request.mutable_stats());
      return Call(poll_stub_.get(), &v1::Coordinator::Stub::Poll, request,
                  &reply, wait + kCallTimeout);
    });
    if (!status.ok()) {
      End(status);
      return;
    }
    if (reply.number() > seen && !IsOver()) {
      seen = reply.number();
      options_.on_directive(reply);
    }
  }
}

void MemberSessionImpl::ReportLoop() {
  while (true) {
    v1::ReportRequest request;
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && !over_) {
        changed_.Wait(&mutex_);
      }
      if (over_) {
        return;
      }
      request = queue_.front();
    }
    request.set_incarnation(admission_.incarnation());
    const absl::Status status = CallUntilAnswered("a report", [&] {
      FillStats(request.mutable_stats());
      v1::ReportReply reply;
      return Call(report_stub_.get(), &v1::Coordinator::Stub::Report, request,
                  &reply, kCallTimeout);
    });
    if (!status.ok()) {
      End(status);
      return;
    }
    MutexLock lock(&mutex_);
    queue_.pop_front();
    ++taken_;
    changed_.NotifyAll();
  }
}

void MemberSessionImpl::End(const absl::Status& status) {
  {
    MutexLock lock(&mutex_);
    if (over_) {
      return;
    }
    over_ = true;
    end_ = status;
    for (grpc::ClientContext* call : calls_) {
      call->TryCancel();
    }
    changed_.NotifyAll();
  }
  LogEvent(Severity::kWarn, "session_over", {{"why", status.ToString()}});
  if (options_.on_end) {
    options_.on_end(status);
  }
}

uint64_t MemberSessionImpl::Enqueue(v1::ReportRequest request) {
  MutexLock lock(&mutex_);
  if (over_ || queue_.size() >= kQueuedMax) {
    return 0;
  }
  queue_.push_back(std::move(request));
  changed_.NotifyAll();
  return ++posted_;
}

absl::Status MemberSessionImpl::Report(v1::ReportRequest request,
                                       absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  const uint64_t number = Enqueue(std::move(request));
  MutexLock lock(&mutex_);
  while (number > 0 && taken_ < number && !over_) {
    const absl::Duration left = deadline - MonotonicNow();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat(
          "the coordinator at ", options_.coordinator,
          " did not take a report within ", absl::FormatDuration(timeout)));
    }
    changed_.WaitFor(&mutex_, left);
  }
  if (number > 0 && taken_ >= number) {
    return absl::OkStatus();
  }
  return end_.ok() ? absl::CancelledError("the session was stopped") : end_;
}

absl::StatusOr<v1::Placement> MemberSessionImpl::GetPlacement() {
  v1::Placement placement;
  BALLAST_RETURN_IF_ERROR(CallUntilAnswered("a placement request", [&] {
    return Call(report_stub_.get(), &v1::Coordinator::Stub::GetPlacement,
                v1::GetPlacementRequest(), &placement, kCallTimeout);
  }));
  return placement;
}

void MemberSessionImpl::Stop() {
  {
    MutexLock lock(&mutex_);
    over_ = true;
    for (grpc::ClientContext* call : calls_) {
      call->TryCancel();
    }
    changed_.NotifyAll();
  }
  for (std::thread* thread : {&poller_, &reporter_}) {
    if (thread->joinable()) {
      thread->join();
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemberSession>> MemberSession::Start(
    Options options) {
  auto session = std::make_unique<MemberSessionImpl>(std::move(options));
  BALLAST_RETURN_IF_ERROR(session->Join());
  // A launcher may have asked the kernel to end us with it, so that we do not
  // wait for a coordinator that will never answer. From here on one knows us
  // and says when to end; it may still want a checkpoint.
  prctl(PR_SET_PDEATHSIG, 0);
  session->StartThreads();
  return std::unique_ptr<MemberSession>(std::move(session));
}

}  // namespace ballast
