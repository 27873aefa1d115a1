// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/run_state.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/bytes.h"
#include "common/hash.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

constexpr uint32_t kFormatVersion = 1;

std::string Key(absl::string_view kind, uint64_t timeline) {
  return absl::StrFormat("%s/%020d", kind, timeline);
}

std::string Key(absl::string_view kind, const StepKey& key) {
  return absl::StrFormat("%s/%020d/%020d", kind, key.timeline, key.step);
}

absl::Status Damaged(absl::string_view key) {
  return absl::DataLossError(
      absl::StrCat("the coordinator's state holds '", key,
                   "', which is no record of this program or is damaged"));
}

absl::StatusOr<RunIdentity> ParseIdentity(absl::string_view value) {
  ByteReader reader(value);
  RunIdentity identity;
  const auto version = reader.Get<uint32_t>();
  identity.run_id = reader.GetString();
  identity.name = reader.GetString();
  identity.timeline = reader.Get<uint64_t>();
  identity.term = reader.Get<uint64_t>();
  const auto fields = reader.Get<uint32_t>();
  for (uint32_t i = 0; i < fields && reader.ok(); ++i) {
    std::string name = reader.GetString();
    identity.numerics.emplace_back(std::move(name), reader.GetString());
  }
  if (!reader.ok() || reader.remaining() != 0 || version != kFormatVersion ||
      !ParseHashHex(identity.run_id)) {
    return Damaged("run");
  }
  return identity;
}

// "kind/<timeline>[/<step>]" split up; a missing step is 0.
struct ParsedKey {
  absl::string_view kind;
  StepKey at;
  int numbers = 0;
};

absl::StatusOr<ParsedKey> ParseKey(absl::string_view key) {
  const std::vector<absl::string_view> parts = absl::StrSplit(key, '/');
  ParsedKey parsed;
  parsed.kind = parts[0];
  parsed.numbers = static_cast<int>(parts.size()) - 1;
  if (parsed.numbers > 2 ||
      (parsed.numbers >= 1 &&
       !absl::SimpleAtoi(parts[1], &parsed.at.timeline)) ||
      (parsed.numbers == 2 && !absl::SimpleAtoi(parts[2], &parsed.at.step))) {
    return Damaged(key);
  }
  return parsed;
}

absl::Status ParseWanted(const std::string& value, RunState* state) {
  ByteReader reader(value);
  const auto count = reader.Get<uint32_t>();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    WantedMember member;
    member.name = reader.GetString();
    member.role = static_cast<v1::Role>(reader.Get<uint32_t>());
    member.draining = reader.Get<uint32_t>() != 0;
    state->wanted.push_back(std::move(member));
  }
  return reader.ok() && reader.remaining() == 0 ? absl::OkStatus()
                                                : Damaged("wanted");
}

absl::Status ParseSingle(absl::string_view key, const std::string& value,
                         RunState* state) {
  if (key == "run") {
    BALLAST_ASSIGN_OR_RETURN(state->identity, ParseIdentity(value));
  } else if (key == "layout") {
    state->layout = value;
  } else if (key == "placement") {
    v1::Placement placement;
    if (!placement.ParseFromString(value)) {
      return Damaged(key);
    }
    state->placement = std::move(placement);
  } else if (key == "wanted") {
    return ParseWanted(value, state);
  } else if (key == "durability") {
    state->durability = value;
  } else if (key != "leader") {
    return Damaged(key);
  }
  return absl::OkStatus();
}

// Records that one number names: a timeline, an incarnation or a count.
absl::Status ParseNumberedRecord(absl::string_view key, const ParsedKey& parsed,
                                 const std::string& value, RunState* state) {
  ByteReader reader(value);
  if (parsed.kind == "member") {
    v1::JoinRequest& join = state->members[parsed.at.timeline];
    return join.ParseFromString(value) ? absl::OkStatus() : Damaged(key);
  }
  if (parsed.kind == "fault") {
    v1::Fault& fault = state->faults[parsed.at.timeline];
    return fault.ParseFromString(value) ? absl::OkStatus() : Damaged(key);
  }
  if (parsed.kind == "branch") {
    Branch branch;
    branch.parent.timeline = reader.Get<uint64_t>();
    branch.parent.step = reader.Get<uint64_t>();
    state->branches[parsed.at.timeline] = branch;
  } else if (parsed.kind == "end") {
    EndRecord end;
    end.step = reader.Get<uint64_t>();
    end.state_hash = reader.GetString();
    state->ends[parsed.at.timeline] = end;
  } else {
    return Damaged(key);
  }
  return reader.ok() && reader.remaining() == 0 ? absl::OkStatus()
                                                : Damaged(key);
}

absl::Status ParseStepRecord(absl::string_view key, const ParsedKey& parsed,
                             const std::string& value, RunState* state) {
  if (parsed.kind == "step") {
    v1::Decision decision;
    if (!decision.ParseFromString(value) ||
        decision.timeline() != parsed.at.timeline ||
        decision.step() != parsed.at.step) {
      return Damaged(key);
    }
    state->decisions[parsed.at] = std::move(decision);
  } else if (parsed.kind == "checkpoint") {
    state->checkpoints[parsed.at] = value;
  } else if (parsed.kind == "evaluation") {
    ByteReader reader(value);
    state->evaluations[parsed.at] = reader.Get<double>();
    if (!reader.ok() || reader.remaining() != 0) {
      return Damaged(key);
    }
  } else {
    return Damaged(key);
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<StepKey> RunState::newest_checkpoint() const {
  if (checkpoints.empty()) {
    return std::nullopt;
  }
  // A later timeline branched off a checkpoint that was the newest then, so
  // the order of keys is the order of age.
  return checkpoints.rbegin()->first;
}

std::vector<v1::Decision> RunState::History() const {
  std::vector<v1::Decision> history;
  if (!identity.has_value()) {
    return history;
  }
  // From the newest timeline down, each counts up to where its child left it.
  uint64_t last = UINT64_MAX;
  uint64_t timeline = identity->timeline;
  while (timeline != 0) {
    const auto branch = branches.find(timeline);
    const StepKey parent =
        branch == branches.end() ? StepKey{} : branch->second.parent;
    auto place = decisions.upper_bound({timeline, last});
    while (place != decisions.begin()) {
      --place;
      if (place->first.timeline != timeline ||
          place->first.step <= parent.step) {
        break;
      }
      history.push_back(place->second);
    }
    last = parent.step;
    timeline = parent.timeline;
  }
  std::reverse(history.begin(), history.end());
  return history;
}

absl::StatusOr<RunState> ParseRunState(
    const std::vector<std::pair<std::string, std::string>>& pairs) {
  RunState state;
  for (const auto& [key, value] : pairs) {
    BALLAST_ASSIGN_OR_RETURN(const ParsedKey parsed, ParseKey(key));
    if (parsed.numbers == 0) {
      BALLAST_RETURN_IF_ERROR(ParseSingle(key, value, &state));
    } else if (parsed.numbers == 1) {
      BALLAST_RETURN_IF_ERROR(ParseNumberedRecord(key, parsed, value, &state));
    } else {
      BALLAST_RETURN_IF_ERROR(ParseStepRecord(key, parsed, value, &state));
    }
  }
  const bool only_leader = pairs.size() == 1 && pairs[0].first == "leader";
  if (!state.identity.has_value() && !pairs.empty() && !only_leader) {
    return absl::DataLossError(
        "the coordinator's state has records but no run; it is damaged");
  }
  return state;
}

StateChange PutIdentity(const RunIdentity& identity) {
  ByteWriter writer;
  writer.Put(kFormatVersion);
  writer.PutString(identity.run_id);
  writer.PutString(identity.name);
  writer.Put(identity.timeline);
  writer.Put(identity.term);
  writer.Put(static_cast<uint32_t>(identity.numerics.size()));
  for (const auto& [key, value] : identity.numerics) {
    writer.PutString(key);
    writer.PutString(value);
  }
  return {"run", writer.Take()};
}

StateChange PutBranch(uint64_t timeline, const Branch& branch) {
  ByteWriter writer;
  writer.Put(branch.parent.timeline);
  writer.Put(branch.parent.step);
  return {Key("branch", timeline), writer.Take()};
}

StateChange PutDecision(const v1::Decision& decision) {
  return {Key("step", StepKey{decision.timeline(), decision.step()}),
          decision.SerializeAsString()};
}

StateChange DeleteDecision(const StepKey& key) {
  return {Key("step", key), std::nullopt};
}

StateChange PutCheckpoint(const StepKey& key, const std::string& path) {
  return {Key("checkpoint", key), path};
}

StateChange DeleteCheckpoint(const StepKey& key) {
  return {Key("checkpoint", key), std::nullopt};
}

StateChange PutEvaluation(const StepKey& key, double loss) {
  ByteWriter writer;
  writer.Put(loss);
  return {Key("evaluation", key), writer.Take()};
}

StateChange PutEnd(uint64_t timeline, const EndRecord& end) {
  ByteWriter writer;
  writer.Put(end.step);
  writer.PutString(end.state_hash);
  return {Key("end", timeline), writer.Take()};
}

StateChange PutLayout(const std::string& encoded) {
  return {"layout", encoded};
}

StateChange PutPlacement(const v1::Placement& placement) {
  v1::Placement bare = placement;
  bare.clear_layout();
  return {"placement", bare.SerializeAsString()};
}

StateChange DeletePlacement() { return {"placement", std::nullopt}; }

StateChange PutWanted(const std::vector<WantedMember>& wanted) {
  ByteWriter writer;
  writer.Put(static_cast<uint32_t>(wanted.size()));
  for (const WantedMember& member : wanted) {
    writer.PutString(member.name);
    writer.Put(static_cast<uint32_t>(member.role));
    writer.Put(uint32_t{member.draining});
  }
  return {"wanted", writer.Take()};
}

StateChange PutDurability(const std::string& durability) {
  return {"durability", durability};
}

StateChange PutMember(uint64_t incarnation, const v1::JoinRequest& join) {
  v1::JoinRequest bare = join;
  bare.clear_layout();
  return {Key("member", incarnation), bare.SerializeAsString()};
}

StateChange DeleteMember(uint64_t incarnation) {
  return {Key("member", incarnation), std::nullopt};
}

StateChange PutFault(uint64_t number, const v1::Fault& fault) {
  return {Key("fault", number), fault.SerializeAsString()};
}

StateChange DeleteFault(uint64_t number) {
  return {Key("fault", number), std::nullopt};
}

}  // namespace ballast
