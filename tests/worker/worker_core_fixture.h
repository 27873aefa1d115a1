// SPDX-License-Identifier: Apache-2.0
// A worker core whose actions are kept; a test answers in the place of its
// owner.

#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "worker/worker_core.h"

namespace ballast::testing {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Part = WorkerCore::Part;

constexpr uint64_t kFirstTerm = uint64_t{1} << 32;
class WorkerCoreTest : public ::testing::Test {
 protected:
  WorkerCoreTest() {
    for (const uint64_t life : {101u, 102u}) {
      v1::ServerEntry* const server = placement_.add_servers();
      server->set_name(absl::StrCat("server-", life - 101));
      server->set_incarnation(life);
    }
    placement_.set_placement_version(1);
    placement_.set_address_version(1);
    placement_.add_owner(0);
    placement_.add_owner(1);
    v1::JoinReply joined;
    joined.set_incarnation(7);
    joined.set_timeline(1);
    core_.OnJoined(joined, now_);
    Take();
  }

  void Pass(absl::Duration time) { now_ += time; }

  // The owner's part: keeps what the core asks for, answers for the placement.
  void Take() {
    WorkerCore::Actions actions = core_.TakeActions();
    if (actions.call_off.has_value()) {
      called_off_.push_back(*actions.call_off);
    }
    if (actions.start.has_value()) {
      EXPECT_FALSE(running_.has_value()) << "two passes at once";
      running_ = actions.start;
      ++started_;
    }
    for (v1::ReportRequest& report : actions.reports) {
      reports_.push_back(std::move(report));
    }
    rejoin_ = rejoin_ || actions.rejoin;
    if (actions.exit.has_value()) {
      exit_ = actions.exit;
    }
    if (actions.want_placement) {
      ++asked_;
      if (answers_) {
        core_.OnPlacement(WorkerCore::ViewOf(placement_), now_);
        Take();
      }
    }
  }

  v1::PollReply Directive(v1::WorkerTask task, uint64_t step,
                          std::initializer_list<Span> spans) {
    v1::PollReply reply;
    reply.set_number(++number_);
    v1::WorkerDirective* const worker = reply.mutable_worker();
    worker->set_task(task);
    worker->set_timeline(timeline_);
    worker->set_step(step);
    for (const Span& span : spans) {
      v1::MicroBatchSpan* const entry = worker->add_spans();
      entry->set_first(span.first);
      entry->set_count(span.count);
    }
    worker->set_placement_version(placement_.placement_version());
    worker->set_address_version(placement_.address_version());
    for (const uint64_t life : voted_) {
      worker->add_voted(life);
    }
    return reply;
  }
  void Tell(const v1::PollReply& reply) {
    core_.OnDirective(reply, now_);
    Take();
  }
  void Train(uint64_t step, std::initializer_list<Span> spans) {
    Tell(Directive(v1::WORKER_TRAIN, step, spans));
  }
  void Evaluate(uint64_t step, std::initializer_list<Span> spans) {
    Tell(Directive(v1::WORKER_EVALUATE, step, spans));
  }
  void Tell(v1::WorkerTask task) { Tell(Directive(task, 0, {})); }

  // A server's life changes; 0: it is gone.
  void SetLife(int server, uint64_t life) {
    placement_.mutable_servers(server)->set_incarnation(life);
    placement_.set_address_version(placement_.address_version() + 1);
  }

  void Tick() {
    core_.Tick(now_);
    Take();
  }
  // Moves on to when the core wants to be called.
  void TickAtWake() {
    ASSERT_LT(core_.NextWake(), absl::InfiniteFuture());
    now_ = std::max(now_, core_.NextWake());
    Tick();
  }
  void AllPushed() {
    core_.OnAllPushed(running_->id, now_);
    Take();
  }
  // The pass ends; `from` are the servers that acknowledged all of it.
  void EndPass(const absl::Status& status, std::initializer_list<uint32_t> from,
               uint64_t life = 0) {
    ASSERT_TRUE(running_.has_value());
    WorkerCore::PassEnd end;
    end.id = running_->id;
    end.status = status;
    end.figures.set_pushed_bytes(10);
    for (const Part& part : running_->parts) {
      for (const uint32_t server : from) {
        end.acks.push_back(
            {part.node, server,
             life != 0 ? life : running_->view.servers[server].life});
      }
      for (uint32_t m = part.node.first; m < part.node.end(); ++m) {
        if (running_->evaluate) {
          v1::MicroBatchLoss& loss = end.losses.emplace_back();
          loss.set_micro_batch(m);
          loss.set_loss_sum(m * 0.5);
        }
      }
    }
    running_.reset();
    core_.OnPassEnded(end, now_);
    Take();
  }
  void Succeed() { EndPass(absl::OkStatus(), {0, 1}); }
  void BreakOff() { EndPass(absl::UnavailableError("server-1: reset"), {}); }

  // Steps of the WorkerDone reports so far, with the numbers they answer.
  std::vector<std::pair<uint64_t, uint64_t>> Done() const {
    std::vector<std::pair<uint64_t, uint64_t>> done;
    for (const v1::ReportRequest& report : reports_) {
      if (report.has_worker_done()) {
        EXPECT_EQ(report.incarnation(), 7u);
        EXPECT_EQ(report.timeline(), report.worker_done().timeline());
        done.emplace_back(report.worker_done().step(),
                          report.worker_done().number());
      }
    }
    return done;
  }

  WorkerCore core_ = WorkerCore({.name = "worker-0",
                                 .micro_batches = 8,
                                 .give_up_after = absl::Seconds(60),
                                 .drain_timeout = absl::Seconds(5)});
  absl::Time now_ = absl::UnixEpoch();
  v1::Placement placement_;
  uint64_t number_ = kFirstTerm;
  uint64_t timeline_ = 1;
  std::vector<uint64_t> voted_;
  bool answers_ = true;  // Questions for the placement, at once.

  std::optional<WorkerCore::Pass> running_;
  int started_ = 0;
  int asked_ = 0;
  std::vector<uint64_t> called_off_;
  std::vector<v1::ReportRequest> reports_;
  bool rejoin_ = false;
  std::optional<absl::Status> exit_;
};

}  // namespace ballast::testing
