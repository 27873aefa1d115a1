// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/history.h"

#include <bit>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/bytes.h"

namespace ballast::sim {

void History::Persisted(const CoreActions& actions) {
  for (const StateChange& change : actions.changes) {
    if (!change.value.has_value()) {
      continue;
    }
    if (change.key.starts_with("step/")) {
      TakeDecision(*change.value);
    } else if (change.key.starts_with("branch/")) {
      TakeBranch(change);
    } else if (change.key.starts_with("end/")) {
      TakeEnd(change);
    } else if (change.key.starts_with("fault/") && world_.tracing()) {
      v1::Fault fault;
      fault.ParseFromString(*change.value);
      world_.Trace(absl::StrCat("fault: ", fault.ShortDebugString()));
    }
  }
  TakeEvaluations(actions);
}

void History::TakeBranch(const StateChange& change) {
  ByteReader reader(*change.value);
  StepKey parent;
  parent.timeline = reader.Get<uint64_t>();
  parent.step = reader.Get<uint64_t>();
  const std::vector<std::string> parts = absl::StrSplit(change.key, '/');
  uint64_t timeline = 0;
  if (!absl::SimpleAtoi(parts[1], &timeline) ||
      (timeline <= last_.timeline && last_.timeline != 0)) {
    if (timeline != last_.timeline) {
      world_.Violate("history", absl::StrCat("timeline ", timeline, " after ",
                                             last_.timeline));
    }
    return;
  }
  last_ = {timeline, parent.step};
}

void History::TakeDecision(const std::string& value) {
  v1::Decision decision;
  decision.ParseFromString(value);
  const StepKey key = {decision.timeline(), decision.step()};
  const auto [place, fresh] = contents_.emplace(key, value);
  if (!fresh) {
    if (place->second != value) {
      world_.Violate("one content a step",
                     absl::StrCat("step ", key.step, " of timeline ",
                                  key.timeline, " was decided twice"));
    }
    return;
  }
  ++decided_;
  if (world_.tracing()) {
    world_.Trace(
        absl::StrCat("decided step ", key.step, " of timeline ", key.timeline));
  }
  if (key.timeline != last_.timeline || key.step != last_.step + 1) {
    world_.Violate("contiguous steps",
                   absl::StrCat("step ", key.step, " of timeline ",
                                key.timeline, " is decided after step ",
                                last_.step, " of timeline ", last_.timeline));
  }
  last_ = key;
  if (key.step >= twin_.decisions.size()) {
    world_.Violate("twin", absl::StrCat("step ", key.step,
                                        " is decided; the "
                                        "undisturbed run ends before"));
    return;
  }
  const std::string wanted = Essence(twin_.decisions[key.step]);
  const std::string got = Essence(decision);
  if (wanted != got) {
    world_.Violate("twin",
                   absl::StrCat("decided: ", got, "; undisturbed: ", wanted));
  }
}

void History::TakeEnd(const StateChange& change) {
  ByteReader reader(*change.value);
  const auto step = reader.Get<uint64_t>();
  const std::string hash = reader.GetString();
  ended_ = true;
  if (step >= twin_.state_hashes.size() || twin_.state_hashes[step] != hash) {
    world_.Violate(
        "final state",
        absl::StrCat("the run ends at step ", step, " with state ", hash,
                     "; undisturbed: ",
                     step < twin_.state_hashes.size() ? twin_.state_hashes[step]
                                                      : "no such step"));
  }
}

void History::TakeEvaluations(const CoreActions& actions) {
  for (const EvaluationRecord& record : actions.evaluations) {
    const double wanted = twin_.eval_losses[record.at.step];
    if (std::bit_cast<uint64_t>(wanted) !=
        std::bit_cast<uint64_t>(record.loss)) {
      world_.Violate("evaluation",
                     absl::StrCat("version ", record.at.step, " has loss ",
                                  record.loss, "; undisturbed: ", wanted));
    }
  }
  for (const StepMetrics& line : actions.metrics) {
    const uint64_t step = line.decision.step();
    if (!line.state_hash.empty() &&
        line.state_hash != twin_.state_hashes[step]) {
      world_.Violate(
          "state of a step",
          absl::StrCat("version ", step, " has state ", line.state_hash,
                       "; undisturbed: ", twin_.state_hashes[step]));
    }
  }
}

}  // namespace ballast::sim
