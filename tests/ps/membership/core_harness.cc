// SPDX-License-Identifier: Apache-2.0
#include "tests/ps/membership/core_harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/exact_sum.h"
#include "ps/membership/placement.h"

namespace ballast::testing {

ModelLayout SmallLayout(uint32_t blocks) {
  ModelLayout layout;
  TensorSpec table;
  table.name = "wte.weight";
  table.shape = {256, 128};
  table.by_rows = true;
  table.use_count = 2;
  layout.tensors.push_back(table);
  layout.units.push_back({"embedding", {{0, 0}}});
  for (uint32_t i = 0; i < blocks; ++i) {
    TensorSpec matrix;
    matrix.name = absl::StrCat("h.", i, ".weight");
    matrix.shape = {512, 512};
    matrix.decay = true;
    TensorSpec vector;
    vector.name = absl::StrCat("h.", i, ".bias");
    vector.shape = {512};
    const auto first = static_cast<uint32_t>(layout.tensors.size());
    layout.tensors.push_back(matrix);
    layout.tensors.push_back(vector);
    layout.units.push_back(
        {absl::StrCat("h.", i), {{first, 0}, {first + 1, 0}}});
  }
  layout.units.push_back({"head", {{0, 1}}});
  return layout;
}

Job SmallJob() {
  Job job;
  job.run.name = "small";
  job.run.dir = "runs/small";
  job.run.steps = 6;
  job.model.context = 16;
  job.batch.micro_batches = 8;
  job.batch.micro_batch_size = 2;
  job.server.count = 2;
  job.server.durability = Durability::kCheckpoint;
  job.worker.count = 2;
  job.server.chunk_elems = 2 * kBlockElems;
  job.checkpoint.every = 2;
  job.checkpoint.keep = 2;
  job.eval.every = 2;
  job.eval.micro_batches = 4;
  job.cluster.lease = absl::Seconds(5);
  job.cluster.progress_timeout = absl::Seconds(60);
  job.cluster.skip_max = 3;
  return job;
}

ConfigFields SmallNumerics() {
  return {{"model.width", "128"}, {"optimizer.lr", "0.001"}};
}

std::string ManifestPath(const StepKey& key) {
  return absl::StrCat("/checkpoints/", key.timeline, "-", key.step);
}

CoreHarness::CoreHarness() {
  options.numerics = SmallNumerics();
  options.new_run_id = "00112233445566778899aabbccddeeff";
  options.config = "run: {name: small}\n";
}

absl::Status CoreHarness::Start() {
  options.job = job;
  if (!options.continue_run) {
    servers.clear();
    workers.clear();
  }
  core.reset();
  absl::StatusOr<RunState> state = ParseRunState({pairs.begin(), pairs.end()});
  if (!state.ok()) {
    return state.status();
  }
  std::optional<CheckpointManifest> checkpoint;
  if (options.resume && state->newest_checkpoint().has_value()) {
    checkpoint =
        manifests.at(state->checkpoints.at(*state->newest_checkpoint()));
  }
  auto made = CoordinatorCore::Create(options, *state, checkpoint, now);
  if (!made.ok()) {
    return made.status();
  }
  core = *std::move(made);
  Carry();
  return absl::OkStatus();
}

void CoreHarness::Train() {
  ASSERT_TRUE(Start().ok());
  JoinAll();
  LoadAll();
}

v1::JoinRequest CoreHarness::JoinOf(v1::Role role, int index) const {
  const bool server = role == v1::ROLE_SERVER;
  v1::JoinRequest request;
  request.set_role(role);
  request.set_name(absl::StrCat(server ? "server-" : "worker-", index));
  request.set_life_id(static_cast<uint64_t>(index) + (server ? 1000 : 2000));
  request.set_pid(42);
  request.set_host("here");
  for (const auto& [key, value] : options.numerics) {
    v1::ConfigField* field = request.add_numerics();
    field->set_key(key);
    field->set_value(value);
  }
  if (server) {
    request.set_address(absl::StrCat("127.0.0.1:", 9000 + index));
    request.set_data_dir(absl::StrCat("/data/server-", index));
  } else {
    request.set_layout(layout.Encode());
  }
  return request;
}

absl::StatusOr<v1::JoinReply> CoreHarness::TryJoin(
    const v1::JoinRequest& request) {
  auto reply = core->Join(request, now);
  Carry();
  return reply;
}

void CoreHarness::Join(v1::Role role, int index) {
  const auto reply = TryJoin(JoinOf(role, index));
  ASSERT_TRUE(reply.ok()) << reply.status();
  (role == v1::ROLE_SERVER ? servers : workers).push_back(reply->incarnation());
}

void CoreHarness::JoinAll() {
  for (uint32_t i = 0; i < job.server.count; ++i) {
    Join(v1::ROLE_SERVER, static_cast<int>(i));
  }
  for (uint32_t i = 0; i < job.worker.count; ++i) {
    Join(v1::ROLE_WORKER, static_cast<int>(i));
  }
}

void CoreHarness::LoadAll() {
  const uint64_t step = ServerOf(0).load_step();
  for (const uint64_t server : servers) {
    const absl::Status loaded = Load(server, step);
    ASSERT_TRUE(loaded.ok()) << loaded;
  }
}

v1::JoinRequest CoreHarness::NextLifeOf(v1::Role role, int index) {
  v1::JoinRequest request = JoinOf(role, index);
  request.set_life_id(++lives);
  request.set_pid(43);
  return request;
}

v1::JoinRequest CoreHarness::NextLifeOf(int server, uint64_t version,
                                        uint64_t redoable) {
  v1::JoinRequest request = NextLifeOf(v1::ROLE_SERVER, server);
  v1::HeldChunks* entry = request.add_held();
  entry->set_timeline(core->identity().timeline);
  entry->set_version(version);
  entry->set_redoable(redoable);
  entry->set_redoable_timeline(core->identity().timeline);
  const v1::Placement placement = *core->GetPlacement();
  for (int i = 0; i < placement.owner_size(); ++i) {
    if (placement.servers(static_cast<int>(placement.owner(i))).name() ==
        request.name()) {
      v1::ChunkRange* range = entry->add_chunks();
      range->set_first(static_cast<uint32_t>(i));
      range->set_count(1);
    }
  }
  return request;
}

absl::StatusOr<uint64_t> CoreHarness::Return(const v1::JoinRequest& request) {
  const auto reply = TryJoin(request);
  if (!reply.ok()) {
    return reply.status();
  }
  const auto index = static_cast<size_t>(request.name().back() - '0');
  auto& group = request.role() == v1::ROLE_SERVER ? servers : workers;
  group.resize(std::max(group.size(), index + 1));
  group[index] = reply->incarnation();
  return reply->incarnation();
}

void CoreHarness::Kill(v1::Role role, int index) {
  v1::ExitReport report;
  report.set_name(
      absl::StrCat(role == v1::ROLE_SERVER ? "server-" : "worker-", index));
  report.set_signal(9);
  core->ExitReported(report, now);
  Carry();
}

v1::ReportRequest CoreHarness::Of(uint64_t incarnation) const {
  v1::ReportRequest request;
  request.set_incarnation(incarnation);
  request.set_timeline(core->identity().timeline);
  return request;
}

absl::Status CoreHarness::Send(const v1::ReportRequest& request) {
  absl::Status status = core->Report(request, now);
  Carry();
  return status;
}

absl::Status CoreHarness::Load(uint64_t server, uint64_t step) {
  v1::ReportRequest request = Of(server);
  request.mutable_loaded()->set_step(step);
  return Send(request);
}

absl::Status CoreHarness::Vote(int server, uint64_t step, double squares,
                               double loss_sum) {
  ExactSum sum;
  sum.Add(squares);
  v1::ReportRequest request = Of(servers[static_cast<size_t>(server)]);
  v1::Vote* vote = request.mutable_vote();
  vote->set_step(step);
  vote->set_sum_squares(sum.Encode());
  vote->set_has_loss(server == 0);
  vote->set_loss_sum(server == 0 ? loss_sum : 0.0);
  return Send(request);
}

absl::Status CoreHarness::VoteNonFinite(int server, uint64_t step,
                                        uint32_t tensor, uint64_t count) {
  ExactSum sum;
  sum.Add(1.0);
  v1::ReportRequest request = Of(servers[static_cast<size_t>(server)]);
  v1::Vote* vote = request.mutable_vote();
  vote->set_step(step);
  vote->set_sum_squares(sum.Encode());
  vote->set_has_loss(server == 0);
  vote->set_loss_sum(512.0);
  v1::NonFinite* entry = vote->add_non_finite();
  entry->set_tensor(tensor);
  entry->set_count(count);
  return Send(request);
}

absl::Status CoreHarness::Confirm(int server, uint64_t step) {
  v1::ReportRequest request = Of(servers[static_cast<size_t>(server)]);
  request.mutable_confirm()->set_step(step);
  request.mutable_confirm()->set_update_seconds(0.25);
  return Send(request);
}

absl::Status CoreHarness::Done(int worker, uint64_t step) {
  v1::ReportRequest request = Of(workers[static_cast<size_t>(worker)]);
  v1::WorkerDone* done = request.mutable_worker_done();
  done->set_timeline(core->identity().timeline);
  done->set_step(step);
  done->set_number(NumberOf(workers[static_cast<size_t>(worker)]));
  done->set_pushed_bytes(100);
  done->set_minor_faults(3);
  done->set_forward_seconds(1.0 + worker);
  return Send(request);
}

absl::Status CoreHarness::Evaluate(int worker, uint64_t step, double loss_sum) {
  v1::ReportRequest request = Of(workers[static_cast<size_t>(worker)]);
  v1::EvalResult* result = request.mutable_eval_result();
  result->set_timeline(core->identity().timeline);
  result->set_step(step);
  const v1::WorkerDirective directive = WorkerOf(worker);
  for (const v1::MicroBatchSpan& span : directive.spans()) {
    for (uint32_t i = 0; i < span.count(); ++i) {
      v1::MicroBatchLoss* loss = result->add_losses();
      loss->set_micro_batch(span.first() + i);
      loss->set_loss_sum(loss_sum);
    }
  }
  return Send(request);
}

absl::Status CoreHarness::Save(int server, uint64_t step) {
  v1::ReportRequest request = Of(servers[static_cast<size_t>(server)]);
  v1::CheckpointSaved* saved = request.mutable_checkpoint_saved();
  saved->set_timeline(core->identity().timeline);
  saved->set_step(step);
  saved->set_data_dir(absl::StrCat("/data/server-", server));
  const v1::Placement placement = *core->GetPlacement();
  for (int i = 0; i < placement.owner_size(); ++i) {
    if (placement.owner(i) == static_cast<uint32_t>(server)) {
      v1::SavedRecord* record = saved->add_records();
      record->set_chunk(static_cast<uint32_t>(i));
      record->set_timeline(core->identity().timeline);
      record->set_version(step);
      record->set_extent_offset(static_cast<uint64_t>(i) * 4096);
      record->set_extent_bytes(4096);
    }
  }
  return Send(request);
}

absl::Status CoreHarness::Digest(int server, uint64_t step) {
  v1::ReportRequest request = Of(servers[static_cast<size_t>(server)]);
  v1::StateDigests* report = request.mutable_state_digests();
  report->set_step(step);
  const v1::Placement placement = *core->GetPlacement();
  const uint32_t fields = HashedFields(job.optimizer.kind);
  for (int i = 0; i < placement.owner_size(); ++i) {
    if (placement.owner(i) != static_cast<uint32_t>(server)) {
      continue;
    }
    const auto id = static_cast<uint32_t>(i);
    const Chunk& chunk = core->table()->chunk(id);
    const uint64_t block = core->table()->tensor_of(id).block_elems();
    ByteWriter writer;
    for (uint64_t field = 0; field < fields; ++field) {
      for (uint64_t at = chunk.begin; at < chunk.end; at += block) {
        // Depends on what the state is, not on how it is cut.
        writer.Put(uint64_t{chunk.tensor} << 8 | field);
        writer.Put(at / block + step * 1000);
      }
    }
    v1::ChunkDigests* entry = report->add_chunks();
    entry->set_chunk(id);
    entry->set_digests(writer.Take());
  }
  return Send(request);
}

absl::Status CoreHarness::Leave(uint64_t incarnation) {
  v1::ReportRequest request = Of(incarnation);
  request.mutable_leaving();
  return Send(request);
}

void CoreHarness::EvaluateAll(uint64_t step) {
  for (size_t i = 0; i < workers.size(); ++i) {
    ASSERT_TRUE(Evaluate(static_cast<int>(i), step).ok());
  }
}

void CoreHarness::Step(uint64_t step) {
  for (size_t i = 0; i < workers.size(); ++i) {
    ASSERT_TRUE(Done(static_cast<int>(i), step).ok());
  }
  for (size_t i = 0; i < servers.size(); ++i) {
    ASSERT_TRUE(Vote(static_cast<int>(i), step).ok());
  }
  ASSERT_EQ(core->committed(), step);
  for (size_t i = 0; i < servers.size(); ++i) {
    const auto server = static_cast<int>(i);
    ASSERT_TRUE(Confirm(server, step).ok());
    if (core->last_decision().checkpoint()) {
      ASSERT_TRUE(Save(server, step).ok());
    }
    if (job.run.state_hash_every) {
      ASSERT_TRUE(Digest(server, step).ok());
    }
  }
  if (core->phase() == Phase::kEvaluating) {
    EvaluateAll(step);
  }
}

void CoreHarness::RunToDone() {
  while (core->phase() == Phase::kTraining) {
    const uint64_t step = core->committed() + 1;
    Step(step);
    ASSERT_EQ(core->committed(), step);
  }
  for (size_t i = 0; i < servers.size(); ++i) {
    ASSERT_TRUE(Digest(static_cast<int>(i), core->committed()).ok());
  }
  ASSERT_EQ(core->phase(), Phase::kDone) << core->GetStatus(now).waits_for();
}

v1::WorkerDirective CoreHarness::WorkerOf(int index) const {
  return core->Directive(workers[static_cast<size_t>(index)], 0)->worker();
}

v1::ServerDirective CoreHarness::ServerOf(int index) const {
  return core->Directive(servers[static_cast<size_t>(index)], 0)->server();
}

uint64_t CoreHarness::NumberOf(uint64_t incarnation) const {
  return core->Directive(incarnation, UINT64_MAX)->number();
}

void CoreHarness::Advance(absl::Duration by) { AdvanceWithout(0, by); }

void CoreHarness::AdvanceWithout(uint64_t silent, absl::Duration by) {
  // In steps as the shell ticks, so that no pause is seen.
  const absl::Time end = now + by;
  do {
    now = std::min(now + absl::Milliseconds(100), end);
    for (const std::vector<uint64_t>* group : {&servers, &workers}) {
      for (const uint64_t incarnation : *group) {
        if (incarnation != silent) {
          v1::PollRequest poll;
          poll.set_incarnation(incarnation);
          (void)core->Heartbeat(poll, now);
        }
      }
    }
    core->Tick(now);
    Carry();
  } while (now < end);
}

void CoreHarness::Stats(uint64_t incarnation, const v1::MemberStats& stats) {
  v1::PollRequest poll;
  poll.set_incarnation(incarnation);
  *poll.mutable_stats() = stats;
  ASSERT_TRUE(core->Heartbeat(poll, now).ok());
}

v1::Fault CoreHarness::LastFault() const {
  const v1::StatusReply status = core->GetStatus(now);
  return status.faults().empty() ? v1::Fault()
                                 : status.faults(status.faults_size() - 1);
}

void CoreHarness::Carry() {
  for (CoreActions actions = core->TakeActions(); !actions.empty();
       actions = core->TakeActions()) {
    for (const StateChange& change : actions.changes) {
      if (change.value.has_value()) {
        pairs[change.key] = *change.value;
      } else {
        pairs.erase(change.key);
      }
    }
    if (actions.rollback_to.has_value()) {
      rollback_to = actions.rollback_to;
    }
    probes.insert(probes.end(), actions.probes.begin(), actions.probes.end());
    for (const std::string& path : actions.manifests_to_remove) {
      manifests.erase(path);
      removed.push_back(path);
    }
    metrics.insert(metrics.end(), actions.metrics.begin(),
                   actions.metrics.end());
    evaluations.insert(evaluations.end(), actions.evaluations.begin(),
                       actions.evaluations.end());
    for (const CheckpointManifest& manifest : actions.manifests_to_write) {
      if (hold_manifests) {
        held.push_back(manifest);
        continue;
      }
      const StepKey key = {manifest.timeline, manifest.step};
      manifests[ManifestPath(key)] = manifest;
      core->ManifestWritten(key, ManifestPath(key), now);
    }
  }
}

}  // namespace ballast::testing
