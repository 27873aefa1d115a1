// SPDX-License-Identifier: Apache-2.0
#include "rpc/member.h"

#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
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
#include "rpc/coordinator_addresses.h"
#include "rpc/endpoint.h"

namespace ballast {
namespace {

// Each poll brings the member's figures along, so this is also how old what
// `ballast status` shows may be: short against a step.
constexpr absl::Duration kPollWaitMax = absl::Milliseconds(100);
constexpr absl::Duration kCallTimeout = absl::Seconds(5);
// An answer to a poll that is later than this is taken for lost: the lease must
// not run out over one reply.
constexpr absl::Duration kPollGraceMin = absl::Seconds(1);
// Short, since a coordinator that was started again takes members for dead that
// it does not hear of.
constexpr absl::Duration kRetryFirst = absl::Milliseconds(20);
constexpr absl::Duration kRetryLast = absl::Milliseconds(100);
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

// A report must not wait behind a poll.
enum Lane : size_t { kPolls, kReports, kLanes };

struct Link {
  explicit Link(const std::string& to)
      : address(to),
        channel(MakeChannel(to)),
        stub(v1::Coordinator::NewStub(channel)) {}

  // A channel that could not connect fails every call at once, and goes on
  // connecting only while some call waits on it.
  bool HasFailed() const {
    return channel->GetState(/*try_to_connect=*/false) ==
           GRPC_CHANNEL_TRANSIENT_FAILURE;
  }

  const std::string address;
  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::Coordinator::Stub> stub;
};

class MemberSessionImpl final : public MemberSession {
 public:
  MemberSessionImpl(Options options, CoordinatorAddresses addresses)
      : options_(std::move(options)), addresses_(std::move(addresses)) {}
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
  absl::StatusOr<v1::Placement> TryPlacement(absl::Duration timeout) override;
  void Stop() override;

 private:
  using Stub = v1::Coordinator::Stub;
  template <typename Request, typename Reply>
  using Method = grpc::Status (Stub::*)(grpc::ClientContext*, const Request&,
                                        Reply*);

  // One call that Stop() can cancel, to whom `addresses_` names; a failure
  // moves that on.
  template <typename Request, typename Reply>
  absl::Status Call(Lane lane, Method<Request, Reply> method,
                    const Request& request, Reply* reply,
                    absl::Duration timeout);
  // Repeats `call` until it ends otherwise than by silence, for silence_max.
  absl::Status CallUntilAnswered(absl::string_view what,
                                 const std::function<absl::Status()>& call);
  // The end of a session that was silent since `since`.
  absl::Status Silent(absl::string_view what, const absl::Status& why) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
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
  v1::JoinReply admission_;

  Mutex mutex_;
  CondVar changed_;
  CoordinatorAddresses addresses_ ABSL_GUARDED_BY(mutex_);
  // By address. shared: a call in flight holds its own.
  std::array<std::map<std::string, std::shared_ptr<Link>>, kLanes> links_
      ABSL_GUARDED_BY(mutex_);
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
absl::Status MemberSessionImpl::Call(Lane lane, Method<Request, Reply> method,
                                     const Request& request, Reply* reply,
                                     absl::Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  std::shared_ptr<Link> link;
  {
    MutexLock lock(&mutex_);
    if (over_) {
      return absl::CancelledError("the session is over");
    }
    std::shared_ptr<Link>& known = links_[lane][addresses_.current()];
    if (known == nullptr || known->HasFailed()) {
      known = std::make_shared<Link>(addresses_.current());
    }
    link = known;
    calls_.insert(&context);
  }
  absl::Status status =
      FromGrpcStatus((link->stub.get()->*method)(&context, request, reply));
  MutexLock lock(&mutex_);
  calls_.erase(&context);
  if (absl::IsDeadlineExceeded(status)) {
    // The connection may be a hole; the next call makes its own.
    if (const auto known = links_[lane].find(link->address);
        known != links_[lane].end() && known->second == link) {
      links_[lane].erase(known);
    }
  }
  if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) {
    addresses_.Failed(link->address, status);
  }
  return status;
}

absl::Status MemberSessionImpl::CallUntilAnswered(
    absl::string_view what, const std::function<absl::Status()>& call) {
  const absl::Time begin = MonotonicNow();
  absl::Duration pause = kRetryFirst;
  absl::Duration told = absl::Seconds(1);  // Log at 1 s, 2 s, 4 s ... of it.
  while (true) {
    absl::Status status = call();
    if (status.ok() || !IsRepeatable(status)) {
      return status;
    }
    const absl::Duration silent = MonotonicNow() - begin;
    MutexLock lock(&mutex_);
    if (over_) {
      return end_.ok() ? absl::CancelledError("the session was stopped") : end_;
    }
    if (silent >= options_.silence_max) {
      return Silent(what, status);
    }
    if (silent >= told) {
      told = silent * 2;
      LogEvent(Severity::kWarn, "coordinator_silent",
               {{"at", addresses_.list()},
                {"for_s", absl::ToDoubleSeconds(silent)},
                {"with", what},
                {"why", status.message()}});
    }
    changed_.WaitFor(&mutex_, pause);
    pause = std::min(pause * 2, kRetryLast);
  }
}

absl::Status MemberSessionImpl::Silent(absl::string_view what,
                                       const absl::Status& why) const {
  return absl::UnavailableError(absl::StrCat(
      options_.join.name(), ": the coordinator at ", addresses_.list(),
      " did not take ", what, " for ",
      absl::FormatDuration(options_.silence_max), ": ", why.message()));
}

absl::Status MemberSessionImpl::Join() {
  options_.join.set_life_id(FreshLifeId());
  BALLAST_RETURN_IF_ERROR(CallUntilAnswered("the join", [this] {
    return Call(kReports, &Stub::Join, options_.join, &admission_,
                kCallTimeout);
  }));
  if (admission_.life_id() != options_.join.life_id()) {
    return absl::AbortedError("the coordinator admitted another life of ours");
  }
  return absl::OkStatus();
}

void MemberSessionImpl::PollLoop() {
  uint64_t seen = 0;
  const absl::Duration lease = absl::Milliseconds(admission_.lease_ms());
  const absl::Duration wait = std::min(kPollWaitMax, lease / 4);
  const absl::Duration timeout =
      wait + std::clamp(lease / 2, kPollGraceMin, kCallTimeout);
  while (!IsOver()) {
    v1::PollReply reply;
    const absl::Status status = CallUntilAnswered("a poll", [&] {
      v1::PollRequest request;
      request.set_incarnation(admission_.incarnation());
      request.set_seen_number(seen);
      request.set_wait_ms(absl::ToInt64Milliseconds(wait));
      FillStats(request.mutable_stats());
      return Call(kPolls, &Stub::Poll, request, &reply, timeout);
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
      return Call(kReports, &Stub::Report, request, &reply, kCallTimeout);
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
          "the coordinator at ", addresses_.list(),
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
    return Call(kReports, &Stub::GetPlacement, v1::GetPlacementRequest(),
                &placement, kCallTimeout);
  }));
  return placement;
}

absl::StatusOr<v1::Placement> MemberSessionImpl::TryPlacement(
    absl::Duration timeout) {
  v1::Placement placement;
  BALLAST_RETURN_IF_ERROR(Call(kReports, &Stub::GetPlacement,
                               v1::GetPlacementRequest(), &placement, timeout));
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
  BALLAST_ASSIGN_OR_RETURN(CoordinatorAddresses addresses,
                           CoordinatorAddresses::Parse(options.coordinator));
  auto session = std::make_unique<MemberSessionImpl>(std::move(options),
                                                     std::move(addresses));
  BALLAST_RETURN_IF_ERROR(session->Join());
  // A launcher may have asked the kernel to end us with it, so that we do not
  // wait for a coordinator that will never answer. From here on one knows us
  // and says when to end; it may still want a checkpoint.
  prctl(PR_SET_PDEATHSIG, 0);
  session->StartThreads();
  return std::unique_ptr<MemberSession>(std::move(session));
}

}  // namespace ballast
