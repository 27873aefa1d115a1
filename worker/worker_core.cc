// SPDX-License-Identifier: Apache-2.0
#include "worker/worker_core.h"

#include "absl/strings/str_cat.h"
#include "common/rule.h"

namespace ballast {
namespace {

bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status) ||
         absl::IsCancelled(status) || absl::IsDeadlineExceeded(status);
}

bool Works(const v1::WorkerDirective& directive) {
  return directive.task() == v1::WORKER_TRAIN ||
         directive.task() == v1::WORKER_EVALUATE;
}

// Whether a pass begun under `old` can still reach its end: every server that
// it reads from lives.
bool SameLives(const WorkerCore::View& old, const WorkerCore::View& now) {
  for (size_t i = 0; i < old.servers.size(); ++i) {
    if (old.servers[i].owns_chunks &&
        (i >= now.servers.size() ||
         now.servers[i].life != old.servers[i].life)) {
      return false;
    }
  }
  return true;
}

std::string TaskName(const v1::WorkerDirective& directive) {
  return absl::StrCat(
      directive.task() == v1::WORKER_EVALUATE ? "evaluation at " : "step ",
      directive.step());
}

uint64_t TermOf(uint64_t number) { return number >> 32; }

void AddFigures(const v1::WorkerDone& from, v1::WorkerDone* to) {
  to->set_pushed_bytes(to->pushed_bytes() + from.pushed_bytes());
  to->set_fetched_bytes(to->fetched_bytes() + from.fetched_bytes());
  to->set_minor_faults(to->minor_faults() + from.minor_faults());
  to->set_forward_seconds(to->forward_seconds() + from.forward_seconds());
  to->set_backward_seconds(to->backward_seconds() + from.backward_seconds());
  to->set_fetch_wait_seconds(to->fetch_wait_seconds() +
                             from.fetch_wait_seconds());
  to->set_push_wait_seconds(to->push_wait_seconds() + from.push_wait_seconds());
}

}  // namespace

WorkerCore::View WorkerCore::ViewOf(const v1::Placement& placement) {
  View view;
  view.placement_version = placement.placement_version();
  view.address_version = placement.address_version();
  for (const v1::ServerEntry& server : placement.servers()) {
    view.servers.push_back({.name = server.name(),
                            .life = server.incarnation(),
                            .owns_chunks = false});
  }
  for (const uint32_t owner : placement.owner()) {
    if (owner < view.servers.size()) {
      view.servers[owner].owns_chunks = true;
    }
  }
  return view;
}

bool WorkerCore::Pass::Has(uint32_t micro_batch) const {
  for (const Part& part : parts) {
    if (part.node.Contains({micro_batch, 1})) {
      return true;
    }
  }
  return false;
}

void WorkerCore::OnJoined(const v1::JoinReply& reply, absl::Time now) {
  incarnation_ = reply.incarnation();
  joined_timeline_ = reply.timeline();
  rejoin_ = false;
  newest_.reset();
  placement_asked_ = false;
  placement_stale_ = true;
  progress_at_ = now;
  if (draining_since_.has_value()) {
    ReportDraining();
  }
  Advance(now);
}

void WorkerCore::OnDirective(const v1::PollReply& reply, absl::Time now) {
  if (incarnation_ == 0 || !reply.has_worker() ||
      (newest_.has_value() && reply.number() <= newest_->number())) {
    return;
  }
  newest_ = reply;
  placement_at_ = absl::InfinitePast();
  if (draining_since_.has_value() && TermOf(reply.number()) != draining_term_) {
    draining_term_ = TermOf(reply.number());
    ReportDraining();  // Another coordinator may not know.
  }
  Advance(now);
}

void WorkerCore::OnPlacement(const View& view, absl::Time now) {
  placement_asked_ = false;
  placement_stale_ = false;
  const bool news = !view_.has_value() ||
                    view.placement_version != view_->placement_version ||
                    view.address_version != view_->address_version ||
                    !SameLives(*view_, view);
  view_ = view;
  if (news) {
    progress_at_ = now;
    retry_at_ = absl::InfinitePast();
    retry_pause_ = kRetryFirst;
    placement_pause_ = kRetryFirst;
  }
  // In case that it is not the one that is wanted.
  placement_at_ = now + placement_pause_;
  placement_pause_ = std::min(placement_pause_ * 2, kRetryLast);
  Advance(now);
}

void WorkerCore::OnPlacementFailed(absl::Time now) {
  placement_asked_ = false;
  placement_stale_ = false;  // What we have must do.
  placement_at_ = now + placement_pause_;
  placement_pause_ = std::min(placement_pause_ * 2, kRetryLast);
  Advance(now);
}

void WorkerCore::OnError(const absl::Status& status, absl::Time now) {
  Fail(status);
  Advance(now);
}

void WorkerCore::OnPassProgress(uint64_t id, absl::Time now) {
  if (running_.has_value() && running_->pass.id == id) {
    running_->progress_at = now;
    progress_at_ = now;
    Advance(now);
  }
}

void WorkerCore::OnAllPushed(uint64_t id, absl::Time now) {
  if (running_.has_value() && running_->pass.id == id) {
    running_->all_pushed = true;
    running_->progress_at = now;
    progress_at_ = now;
    Advance(now);
  }
}

void WorkerCore::OnPassEnded(const PassEnd& end, absl::Time now) {
  if (!running_.has_value() || running_->pass.id != end.id) {
    return;
  }
  const Running ended = *std::move(running_);
  running_.reset();
  TakeResults(ended.pass, end);
  if (end.status.ok()) {
    progress_at_ = now;
    retry_pause_ = kRetryFirst;
    // Its step went on meanwhile; the report completes the step's figures.
    if (newest_.has_value() && !IsWork(newest_->worker()) &&
        ended.pass.number == work_.number) {
      ReportEnd();
    }
  } else if (!ended.called_off) {
    Retry(end.status, now);
  }
  Advance(now);
}

void WorkerCore::OnSessionOver(const absl::Status& status, absl::Time now) {
  incarnation_ = 0;
  if (!absl::IsAborted(status)) {
    Exit(status);
  } else if (draining_since_.has_value()) {
    Exit(absl::OkStatus());
  } else {
    rejoin_ = true;
  }
  Advance(now);
}

void WorkerCore::OnTerm(absl::Time now) {
  if (draining_since_.has_value() || incarnation_ == 0) {
    Exit(absl::OkStatus());
    return;
  }
  draining_since_ = now;
  draining_term_ = newest_.has_value() ? TermOf(newest_->number()) : 0;
  ReportDraining();
  Advance(now);
}

void WorkerCore::Tick(absl::Time now) { Advance(now); }

absl::Time WorkerCore::NextWake() const { return wake_; }

void WorkerCore::Advance(absl::Time now) {
  wake_ = absl::InfiniteFuture();
  waits_next_.clear();
  if (!over_) {
    Decide(now);
  }
  if (waits_next_ != waits_for_) {
    waits_for_ = waits_next_;
    waits_since_ = now;
  }
}

void WorkerCore::Decide(absl::Time now) {
  if (draining_since_.has_value()) {
    if (now >= *draining_since_ + options_.drain_timeout) {
      Leave();
      return;
    }
    WakeAt(*draining_since_ + options_.drain_timeout);
  }
  if (running_.has_value()) {
    DecideWhileRunning(now);
    return;
  }
  if (rejoin_) {
    rejoin_ = false;
    actions_.rejoin = true;
    return;
  }
  if (incarnation_ == 0 || !newest_.has_value()) {
    return;
  }
  const v1::WorkerDirective& next = newest_->worker();
  if (next.task() == v1::WORKER_EXIT) {
    Leave();
    return;
  }
  if (!Works(next)) {
    return;
  }
  Adopt(now);
  if (const absl::Status status = CheckSpans(); !status.ok()) {
    Fail(status);
    return;
  }
  if (!HaveView(now)) {
    waits_next_ =
        absl::StrCat("the coordinator: the placement of ", TaskName(next));
    return;
  }
  if (work_.placement_version != view_->placement_version) {
    work_.placement_version = view_->placement_version;
    work_.acked.clear();  // Chunks have other owners.
  }
  std::vector<Part> parts =
      next.task() == v1::WORKER_TRAIN ? MissingParts() : MissingLosses();
  if (parts.empty()) {
    if (work_.reported != work_.number) {
      ReportEnd();
    }
    return;
  }
  for (const Server& server : view_->servers) {
    if (server.owns_chunks && server.life == 0) {
      waits_next_ =
          absl::StrCat(server.name, ": its return, for ", TaskName(next));
      GivesUp(waits_next_, now);
      return;
    }
  }
  if (now < retry_at_) {
    waits_next_ = last_error_;
    WakeAt(retry_at_);
    return;
  }
  StartPass(std::move(parts), now);
}

void WorkerCore::DecideWhileRunning(absl::Time now) {
  bool useless = rejoin_ || incarnation_ == 0;
  if (!useless && newest_.has_value()) {
    if (IsWork(newest_->worker())) {
      Adopt(now);
      HaveView(now);  // Only asks: a life that the pass needs may be gone.
    }
    useless = Useless(now);
  }
  if (useless && !running_->called_off) {
    running_->called_off = true;
    actions_.call_off = running_->pass.id;
  }
}

bool WorkerCore::IsWork(const v1::WorkerDirective& directive) const {
  return directive.task() == work_.directive.task() &&
         directive.timeline() == work_.directive.timeline() &&
         directive.step() == work_.directive.step();
}

void WorkerCore::Adopt(absl::Time now) {
  if (!IsWork(newest_->worker())) {
    work_ = Work();
    progress_at_ = now;
    retry_at_ = absl::InfinitePast();
    retry_pause_ = kRetryFirst;
  }
  work_.number = newest_->number();
  work_.directive = newest_->worker();
}

bool WorkerCore::HaveView(absl::Time now) {
  const v1::WorkerDirective& directive = newest_->worker();
  if (view_.has_value() && !placement_stale_ &&
      view_->placement_version == directive.placement_version() &&
      view_->address_version == directive.address_version()) {
    return true;
  }
  if (!placement_asked_) {
    if (now >= placement_at_) {
      placement_asked_ = true;
      actions_.want_placement = true;
    } else {
      WakeAt(placement_at_);
    }
  }
  return false;
}

bool WorkerCore::Useless(absl::Time now) {
  const Pass& pass = running_->pass;
  const v1::WorkerDirective& next = newest_->worker();
  if (next.timeline() != pass.timeline) {
    return true;
  }
  // Nothing else is wanted, so what runs may end; a coordinator that has just
  // begun asks for the same again.
  if (next.task() == v1::WORKER_WAIT) {
    return false;
  }
  const bool wanted = IsWork(next);
  if (wanted && view_.has_value() &&
      view_->placement_version != pass.view.placement_version) {
    return true;
  }
  if (wanted && (!view_.has_value() || SameLives(pass.view, *view_))) {
    running_->late_since.reset();
    if (pass.evaluate) {
      return false;
    }
    const std::vector<Part> missing = MissingParts();
    const bool more =
        std::any_of(missing.begin(), missing.end(), [&](const Part& part) {
          for (uint32_t m = part.node.first; m < part.node.end(); ++m) {
            if (!pass.Has(m)) {
              return true;
            }
          }
          return false;
        });
    if (!more || !BALLAST_RULE(kBlockedPassIsDropped)) {
      return false;
    }
    WakeAt(running_->progress_at + kBlockedMax);
    return now >= running_->progress_at + kBlockedMax;
  }
  if (!running_->all_pushed) {
    return true;
  }
  if (!running_->late_since.has_value()) {
    running_->late_since = now;
  }
  WakeAt(*running_->late_since + kLastAcksMax);
  return now >= *running_->late_since + kLastAcksMax;
}

bool WorkerCore::IsAcked(const Server& server, uint32_t micro_batch) const {
  const auto lives = work_.acked.find(server.name);
  if (lives == work_.acked.end()) {
    return false;
  }
  for (const auto& [life, micro_batches] : lives->second) {
    // What an earlier life had acknowledged died with it.
    if (BALLAST_RULE(kAckNamesServerLife) && life != server.life) {
      continue;
    }
    if (micro_batches.contains(micro_batch)) {
      return true;
    }
  }
  return false;
}

std::vector<WorkerCore::Part> WorkerCore::MissingParts() const {
  const auto& voted = work_.directive.voted();
  // By micro-batch: the servers that miss it.
  std::map<uint32_t, std::vector<uint32_t>> missing;
  for (uint32_t i = 0; i < view_->servers.size(); ++i) {
    const Server& server = view_->servers[i];
    if (!server.owns_chunks ||
        std::find(voted.begin(), voted.end(), server.life) != voted.end()) {
      continue;
    }
    for (const v1::MicroBatchSpan& span : work_.directive.spans()) {
      for (uint32_t m = span.first(); m < span.first() + span.count(); ++m) {
        if (!IsAcked(server, m)) {
          missing[m].push_back(i);
        }
      }
    }
  }
  // Runs with the same servers, as few nodes as can be: a worker sums what it
  // has before it pushes.
  std::vector<Part> parts;
  for (auto begin = missing.begin(); begin != missing.end();) {
    Span run = {begin->first, 0};
    auto end = begin;
    while (end != missing.end() && end->first == run.end() &&
           end->second == begin->second) {
      ++run.count;
      ++end;
    }
    for (const Span& node : Cover(run, options_.micro_batches)) {
      parts.push_back({node, begin->second});
    }
    begin = end;
  }
  return parts;
}

std::vector<WorkerCore::Part> WorkerCore::MissingLosses() const {
  std::set<uint32_t> missing;
  for (const v1::MicroBatchSpan& span : work_.directive.spans()) {
    for (uint32_t m = span.first(); m < span.first() + span.count(); ++m) {
      if (!work_.losses.contains(m)) {
        missing.insert(m);
      }
    }
  }
  std::vector<Part> parts;
  for (const uint32_t m : missing) {
    if (parts.empty() || parts.back().node.end() != m) {
      parts.push_back({{m, 0}, {}});
    }
    ++parts.back().node.count;
  }
  return parts;
}

absl::Status WorkerCore::CheckSpans() const {
  if (work_.directive.task() != v1::WORKER_TRAIN) {
    return absl::OkStatus();
  }
  for (const v1::MicroBatchSpan& span : work_.directive.spans()) {
    if (!IsNode({span.first(), span.count()}, options_.micro_batches)) {
      return absl::InternalError(absl::StrCat(
          "assigned micro-batches [", span.first(), ", +", span.count(),
          ") of ", options_.micro_batches, " are not a node of the span tree"));
    }
  }
  return absl::OkStatus();
}

void WorkerCore::StartPass(std::vector<Part> parts, absl::Time now) {
  const v1::WorkerDirective& directive = work_.directive;
  const bool evaluate = directive.task() == v1::WORKER_EVALUATE;
  Pass pass;
  pass.id = ++last_pass_;
  pass.evaluate = evaluate;
  pass.timeline = directive.timeline();
  pass.step = directive.step();
  pass.version = evaluate ? directive.step() : directive.step() - 1;
  pass.incarnation = incarnation_;
  pass.number = work_.number;
  pass.view = *view_;
  pass.parts = std::move(parts);
  actions_.start = pass;
  running_ =
      Running{.pass = std::move(pass), .progress_at = now, .late_since = {}};
}

void WorkerCore::TakeResults(const Pass& pass, const PassEnd& end) {
  if (pass.timeline != work_.directive.timeline() ||
      pass.step != work_.directive.step() ||
      pass.evaluate != (work_.directive.task() == v1::WORKER_EVALUATE)) {
    return;
  }
  AddFigures(end.figures, &work_.figures);
  for (const v1::MicroBatchLoss& loss : end.losses) {
    work_.losses[loss.micro_batch()] = loss.loss_sum();
  }
  if (pass.view.placement_version != work_.placement_version) {
    return;
  }
  for (const Ack& ack : end.acks) {
    std::set<uint32_t>& has =
        work_.acked[pass.view.servers[ack.server].name][ack.life];
    for (uint32_t m = ack.node.first; m < ack.node.end(); ++m) {
      has.insert(m);
    }
  }
}

void WorkerCore::Retry(const absl::Status& why, absl::Time now) {
  if (!MayPass(why)) {
    Fail(absl::Status(why.code(), absl::StrCat(TaskName(work_.directive), ": ",
                                               why.message())));
    return;
  }
  last_error_ = std::string(why.message());
  if (GivesUp(last_error_, now)) {
    return;
  }
  placement_stale_ = true;
  placement_at_ = absl::InfinitePast();
  retry_at_ = now + retry_pause_;
  retry_pause_ = std::min(retry_pause_ * 2, kRetryLast);
}

bool WorkerCore::GivesUp(const std::string& awaited, absl::Time now) {
  const absl::Time deadline = progress_at_ + options_.give_up_after;
  WakeAt(deadline);
  if (now < deadline) {
    return false;
  }
  Fail(absl::UnavailableError(absl::StrCat(
      options_.name, " gave up ", TaskName(work_.directive), " after ",
      absl::FormatDuration(options_.give_up_after),
      " without progress (cluster.give_up_after); it waits for ", awaited)));
  return true;
}

void WorkerCore::ReportEnd() {
  v1::ReportRequest request;
  if (work_.directive.task() == v1::WORKER_TRAIN) {
    v1::WorkerDone* const done = request.mutable_worker_done();
    *done = work_.figures;
    done->set_timeline(work_.directive.timeline());
    done->set_step(work_.directive.step());
    done->set_number(work_.number);
  } else {
    v1::EvalResult* const result = request.mutable_eval_result();
    result->set_timeline(work_.directive.timeline());
    result->set_step(work_.directive.step());
    for (const auto& [micro_batch, loss] : work_.losses) {
      v1::MicroBatchLoss* const entry = result->add_losses();
      entry->set_micro_batch(micro_batch);
      entry->set_loss_sum(loss);
    }
  }
  request.set_timeline(work_.directive.timeline());
  Post(std::move(request));
  work_.reported = work_.number;
}

void WorkerCore::ReportDraining() {
  v1::ReportRequest request;
  request.mutable_draining()->set_reason("SIGTERM");
  Post(std::move(request));
}

void WorkerCore::Leave() {
  v1::ReportRequest request;
  request.mutable_leaving();
  Post(std::move(request));
  Exit(absl::OkStatus());
}

void WorkerCore::Post(v1::ReportRequest request) {
  if (request.timeline() == 0) {
    request.set_timeline(newest_.has_value() ? newest_->worker().timeline()
                                             : joined_timeline_);
  }
  request.set_incarnation(incarnation_);
  actions_.reports.push_back(std::move(request));
}

void WorkerCore::Fail(const absl::Status& status) {
  v1::ReportRequest request;
  request.mutable_fatal()->set_code(static_cast<int>(status.code()));
  request.mutable_fatal()->set_message(
      absl::StrCat(options_.name, ": ", status.message()));
  Post(std::move(request));
  Exit(status);
}

void WorkerCore::Exit(const absl::Status& status) {
  if (!over_) {
    over_ = true;
    actions_.exit = status;
  }
}

}  // namespace ballast
