// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/member_link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast::sim {
namespace {

// As in rpc/member.cc.
constexpr absl::Duration kPollWaitMax = absl::Milliseconds(100);
constexpr absl::Duration kCallTimeout = absl::Seconds(5);
constexpr absl::Duration kRetryFirst = absl::Milliseconds(20);
constexpr absl::Duration kRetryLast = absl::Milliseconds(100);
constexpr absl::Duration kPollGraceMin = absl::Seconds(1);

bool IsRepeatable(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsCancelled(status) || absl::IsResourceExhausted(status);
}

}  // namespace

template <typename Reply>
struct MemberLink::Repeated {
  std::string what;
  absl::Duration timeout;
  std::function<Message<Reply>()> make;
  Network::Answer<Reply> done;
  absl::Time give_up;
  absl::Duration pause = kRetryFirst;
};

MemberLink::MemberLink(World* world, Network* network, LifePointer life,
                       std::function<CoordinatorCalls*()> calls,
                       Options options)
    : world_(*world),
      network_(*network),
      life_(std::move(life)),
      calls_(std::move(calls)),
      options_(std::move(options)) {}

template <typename Reply>
void MemberLink::Until(const std::string& what, absl::Duration timeout,
                       std::function<Message<Reply>()> make,
                       Network::Answer<Reply> done) {
  auto state = std::make_shared<Repeated<Reply>>();
  state->what = what;
  state->timeout = timeout;
  state->make = std::move(make);
  state->done = std::move(done);
  state->give_up = world_.NowOf(*life_) + options_.silence_max;
  Attempt(state);
}

template <typename Reply>
void MemberLink::Attempt(const std::shared_ptr<Repeated<Reply>>& state) {
  auto self = shared_from_this();
  network_.Call<Reply>(
      life_, kCoordinator, state->timeout,
      [find = calls_, message = state->make()](Network::Answer<Reply> answer) {
        if (CoordinatorCalls* calls = find()) {
          message(calls, std::move(answer));
        }
      },
      [self, state](absl::StatusOr<Reply> reply) {
        if (self->over_) {
          return;
        }
        if (reply.ok() || !IsRepeatable(reply.status())) {
          state->done(std::move(reply));
        } else if (self->world_.NowOf(*self->life_) >= state->give_up) {
          state->done(absl::UnavailableError(absl::StrCat(
              "the coordinator did not take ", state->what, " for ",
              absl::FormatDuration(self->options_.silence_max), ": ",
              reply.status().message())));
        } else {
          self->world_.After(state->pause, self->life_, [self, state] {
            if (!self->over_) {
              self->Attempt(state);
            }
          });
          state->pause = std::min(state->pause * 2, kRetryLast);
        }
      });
}

void MemberLink::Start() {
  options_.join.set_life_id(world_.random().Next() | 1);
  auto self = shared_from_this();
  Until<v1::JoinReply>(
      "the join", kCallTimeout,
      [join = options_.join]() -> Message<v1::JoinReply> {
        return [join](CoordinatorCalls* calls,
                      Network::Answer<v1::JoinReply> answer) {
          calls->Join(join, std::move(answer));
        };
      },
      [self](const absl::StatusOr<v1::JoinReply>& reply) {
        if (!reply.ok()) {
          self->End(reply.status());
          return;
        }
        if (reply->life_id() != self->options_.join.life_id()) {
          self->End(absl::AbortedError("another life of ours was admitted"));
          return;
        }
        self->admission_ = *reply;
        self->options_.on_admitted(*reply);
        self->Poll();
        self->SendReport();
      });
}

void MemberLink::Poll() {
  if (over_) {
    return;
  }
  auto self = shared_from_this();
  const absl::Duration lease = absl::Milliseconds(admission_.lease_ms());
  const absl::Duration wait = std::min(kPollWaitMax, lease / 4);
  Until<v1::PollReply>(
      "a poll", wait + std::clamp(lease / 2, kPollGraceMin, kCallTimeout),
      [self, wait]() -> Message<v1::PollReply> {
        v1::PollRequest request;
        request.set_incarnation(self->admission_.incarnation());
        request.set_seen_number(self->seen_);
        request.set_wait_ms(absl::ToInt64Milliseconds(wait));
        if (self->options_.stats) {
          *request.mutable_stats() = self->options_.stats();
        }
        return [life = self->life_, request](
                   CoordinatorCalls* calls,
                   Network::Answer<v1::PollReply> answer) {
          calls->Poll(life, request, std::move(answer));
        };
      },
      [self](const absl::StatusOr<v1::PollReply>& reply) {
        if (!reply.ok()) {
          self->End(reply.status());
          return;
        }
        if (reply->number() > self->seen_) {
          self->seen_ = reply->number();
          self->options_.on_directive(*reply);
        }
        self->Poll();
      });
}

void MemberLink::Post(v1::ReportRequest request) {
  if (over_ || !life_->alive) {
    return;
  }
  if (options_.on_post) {
    options_.on_post(request);
  }
  queue_.push_back(std::move(request));
  SendReport();
}

void MemberLink::SendReport() {
  if (over_ || sending_ || queue_.empty() || admission_.incarnation() == 0) {
    return;
  }
  sending_ = true;
  auto self = shared_from_this();
  Until<v1::ReportReply>(
      "a report", kCallTimeout,
      [self]() -> Message<v1::ReportReply> {
        v1::ReportRequest request = self->queue_.front();
        request.set_incarnation(self->admission_.incarnation());
        if (self->options_.stats) {
          *request.mutable_stats() = self->options_.stats();
        }
        return [request](CoordinatorCalls* calls,
                         Network::Answer<v1::ReportReply> answer) {
          calls->Report(request, std::move(answer));
        };
      },
      [self](const absl::StatusOr<v1::ReportReply>& reply) {
        self->sending_ = false;
        if (!reply.ok()) {
          self->End(reply.status());
          return;
        }
        self->queue_.pop_front();
        self->SendReport();
      });
}

void MemberLink::AskPlacement(
    std::function<void(absl::StatusOr<v1::Placement>)> done) {
  Until<v1::Placement>(
      "a placement request", kCallTimeout,
      []() -> Message<v1::Placement> {
        return
            [](CoordinatorCalls* calls, Network::Answer<v1::Placement> answer) {
              calls->GetPlacement(std::move(answer));
            };
      },
      std::move(done));
}

void MemberLink::End(const absl::Status& status) {
  if (over_) {
    return;
  }
  over_ = true;
  if (world_.tracing()) {
    world_.Trace(absl::StrCat("session over: ", status.ToString()));
  }
  options_.on_end(status);
}

}  // namespace ballast::sim
