// SPDX-License-Identifier: Apache-2.0
#include "ps/coordinator/run_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace ballast {
namespace {

using Json = nlohmann::ordered_json;

// A line takes some 500 bytes: this is two million steps.
constexpr uint64_t kHistoryBytesMax = uint64_t{1} << 30;

absl::StatusOr<StorageFile> OpenAppending(const std::string& path) {
  StorageFile file;
  file.path = path;
  file.fd = UniqueFd(
      open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!file.fd.valid()) {
    return ErrnoError(errno, absl::StrCat("cannot open ", path));
  }
  return file;
}

// Lines of a JSON-lines file by their step, up to `last`. Torn lines are left
// out; a missing file has none.
absl::StatusOr<std::map<uint64_t, std::string>> ReadLines(
    const std::string& path, uint64_t last) {
  std::map<uint64_t, std::string> lines;
  absl::StatusOr<std::string> text = ReadFile(path, kHistoryBytesMax);
  if (absl::IsNotFound(text.status())) {
    return lines;
  }
  BALLAST_RETURN_IF_ERROR(text.status());
  for (const absl::string_view line : absl::StrSplit(*text, '\n')) {
    const Json parsed = Json::parse(line.begin(), line.end(), nullptr,
                                    /*allow_exceptions=*/false);
    if (!parsed.is_object() || !parsed.contains("step") ||
        !parsed["step"].is_number_unsigned()) {
      continue;
    }
    const auto step = parsed["step"].get<uint64_t>();
    if (step <= last) {
      lines[step] = std::string(line);
    }
  }
  return lines;
}

std::vector<std::string> CheckpointFolders(const std::string& checkpoints_dir) {
  std::vector<std::string> folders;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(checkpoints_dir, error)) {
    if (entry.path().filename().string().rfind("step-", 0) == 0) {
      folders.push_back(entry.path().string());
    }
  }
  return folders;
}

}  // namespace

bool HoldsCheckpoints(const std::string& checkpoints_dir) {
  return !CheckpointFolders(checkpoints_dir).empty();
}

std::string MetricsJson(const StepMetrics& metrics) {
  const v1::Decision& decision = metrics.decision;
  const auto measured = [&metrics](auto value) {
    return metrics.measured ? Json(value) : Json();
  };
  Json line;
  line["step"] = decision.step();
  line["loss"] = decision.loss();
  line["lr"] = decision.learning_rate();
  line["grad_norm"] = decision.grad_norm();
  line["grad_norm_clipped"] =
      decision.skip() ? Json() : Json(decision.grad_norm_clipped());
  line["tokens"] = decision.tokens();
  line["tokens_per_s"] =
      metrics.step_seconds > 0.0
          ? Json(static_cast<double>(decision.tokens()) / metrics.step_seconds)
          : Json();
  line["skipped"] = decision.skip();
  if (decision.skip()) {
    line["skip_reason"] = decision.skip_reason();
  }
  line["workers"] = decision.workers();
  line["servers"] = decision.servers();
  line["generation"] = decision.generation();
  line["timeline"] = decision.timeline();
  if (!metrics.state_hash.empty()) {
    line["state_hash"] = metrics.state_hash;
  }
  line["pushed_bytes"] = measured(metrics.pushed_bytes);
  line["fetched_bytes"] = measured(metrics.fetched_bytes);
  line["minor_faults"] =
      measured(metrics.worker_faults + metrics.server_faults);
  line["forward_s"] = measured(metrics.forward_seconds);
  line["backward_s"] = measured(metrics.backward_seconds);
  line["fetch_wait_s"] = measured(metrics.fetch_wait_seconds);
  line["push_wait_s"] = measured(metrics.push_wait_seconds);
  line["update_s"] = measured(metrics.update_seconds);
  line["log_bytes"] = measured(metrics.log_bytes);
  line["log_s"] = measured(metrics.log_seconds);
  line["step_s"] = measured(metrics.step_seconds);
  return line.dump();
}

std::string EvaluationJson(const EvaluationRecord& evaluation) {
  Json line;
  line["step"] = evaluation.at.step;
  line["timeline"] = evaluation.at.timeline;
  line["validation_loss"] = evaluation.loss;
  line["seconds"] = evaluation.seconds;
  return line.dump();
}

absl::StatusOr<std::unique_ptr<RunFolder>> RunFolder::Open(
    const std::string& dir) {
  BALLAST_RETURN_IF_ERROR(MakeDirectories(dir));
  std::error_code error;
  const std::string absolute = std::filesystem::canonical(dir, error).string();
  if (error) {
    return ErrnoError(error.value(), absl::StrCat("cannot open ", dir));
  }
  std::unique_ptr<RunFolder> folder(new RunFolder(absolute));
  BALLAST_RETURN_IF_ERROR(MakeDirectories(folder->checkpoints_dir()));
  folder->metrics_.file.path = absl::StrCat(absolute, "/metrics.jsonl");
  folder->evaluations_.file.path = absl::StrCat(absolute, "/evaluations.jsonl");
  return folder;
}

std::string RunFolder::ManifestPath(uint64_t step) const {
  return absl::StrFormat("%s/step-%08d/manifest.json", checkpoints_dir(), step);
}

absl::Status RunFolder::Rewrite(const std::map<uint64_t, std::string>& lines,
                                History* history) {
  std::string text;
  for (const auto& [step, line] : lines) {
    absl::StrAppend(&text, line, "\n");
  }
  const std::string path = history->file.path;
  BALLAST_RETURN_IF_ERROR(WriteFileAtomically(path, text));
  BALLAST_ASSIGN_OR_RETURN(history->file, OpenAppending(path));
  history->bytes = text.size();
  history->last = lines.empty() ? 0 : lines.rbegin()->first;
  return absl::OkStatus();
}

absl::Status RunFolder::Append(const std::string& text, uint64_t last,
                               History* history) {
  if (text.empty()) {
    return absl::OkStatus();
  }
  const absl::Status written = WriteFully(history->file, text);
  if (!written.ok()) {
    // Half a line on a full disk: the next attempt begins where this one did.
    if (ftruncate(history->file.fd.get(), static_cast<off_t>(history->bytes)) !=
        0) {
      return ErrnoError(errno,
                        absl::StrCat("cannot truncate ", history->file.path));
    }
    return written;
  }
  history->bytes += text.size();
  history->last = last;
  return absl::OkStatus();
}

absl::Status RunFolder::Reconcile(const RunState& state, uint64_t step) {
  std::map<uint64_t, std::string> metrics;
  BALLAST_ASSIGN_OR_RETURN(metrics, ReadLines(metrics_.file.path, step));
  for (const v1::Decision& decision : state.History()) {
    if (decision.step() <= step && !metrics.contains(decision.step())) {
      StepMetrics line;
      line.decision = decision;
      line.measured = false;
      metrics[decision.step()] = MetricsJson(line);
    }
  }
  BALLAST_RETURN_IF_ERROR(Rewrite(metrics, &metrics_));

  std::map<uint64_t, std::string> evaluations;
  BALLAST_ASSIGN_OR_RETURN(evaluations,
                           ReadLines(evaluations_.file.path, step));
  for (const auto& [key, loss] : state.evaluations) {
    if (key.step <= step && !evaluations.contains(key.step)) {
      evaluations[key.step] = EvaluationJson({key, loss, 0.0});
    }
  }
  BALLAST_RETURN_IF_ERROR(Rewrite(evaluations, &evaluations_));

  std::set<std::string> listed;
  for (const auto& [key, path] : state.checkpoints) {
    listed.insert(path);
  }
  for (const std::string& folder : CheckpointFolders(checkpoints_dir())) {
    const std::string manifest = folder + "/manifest.json";
    if (!listed.contains(manifest)) {
      LogEvent(Severity::kInfo, "unlogged_checkpoint_removed",
               {{"path", manifest}});
      BALLAST_RETURN_IF_ERROR(RemoveManifest(manifest));
    }
  }
  return absl::OkStatus();
}

absl::Status RunFolder::RollBack(uint64_t step) {
  for (History* history : {&metrics_, &evaluations_}) {
    std::map<uint64_t, std::string> lines;
    BALLAST_ASSIGN_OR_RETURN(lines, ReadLines(history->file.path, step));
    BALLAST_RETURN_IF_ERROR(Rewrite(lines, history));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<StepMetrics>> RunFolder::ReadMeasured() const {
  std::map<uint64_t, std::string> lines;
  BALLAST_ASSIGN_OR_RETURN(lines, ReadLines(metrics_.file.path, UINT64_MAX));
  std::vector<StepMetrics> measured;
  for (const auto& [step, line] : lines) {
    const Json parsed = Json::parse(line);  // ReadLines has parsed it.
    const auto number = [&parsed](const char* key) {
      const auto place = parsed.find(key);
      return place != parsed.end() && place->is_number() ? place->get<double>()
                                                         : 0.0;
    };
    if (number("step_s") > 0.0) {
      StepMetrics& metrics = measured.emplace_back();
      metrics.decision.set_step(step);
      metrics.decision.set_tokens(static_cast<uint64_t>(number("tokens")));
      metrics.step_seconds = number("step_s");
      metrics.log_seconds = number("log_s");
      metrics.log_bytes = static_cast<uint64_t>(number("log_bytes"));
    }
  }
  return measured;
}

absl::Status RunFolder::AppendMetrics(const std::vector<StepMetrics>& lines) {
  std::string text;
  uint64_t last = metrics_.last;
  for (const StepMetrics& line : lines) {
    if (line.decision.step() > last) {
      last = line.decision.step();
      absl::StrAppend(&text, MetricsJson(line), "\n");
    }
  }
  return Append(text, last, &metrics_);
}

absl::Status RunFolder::AppendEvaluations(
    const std::vector<EvaluationRecord>& lines) {
  std::string text;
  uint64_t last = evaluations_.last;
  for (const EvaluationRecord& line : lines) {
    // Version 0 may be evaluated; it is the first line then.
    if (line.at.step > last || evaluations_.bytes + text.size() == 0) {
      last = line.at.step;
      absl::StrAppend(&text, EvaluationJson(line), "\n");
    }
  }
  return Append(text, last, &evaluations_);
}

absl::Status RunFolder::Sync() {
  if (fsync(metrics_.file.fd.get()) != 0) {
    return ErrnoError(errno, absl::StrCat("cannot sync ", metrics_.file.path));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> RunFolder::PutAside(
    const std::string& manifest_path) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(manifest_path).parent_path();
  std::string aside =
      (folder.parent_path() / ("damaged-" + folder.filename().string()))
          .string();
  std::error_code error;
  fs::remove_all(aside, error);
  fs::rename(folder, aside, error);
  if (error && error != std::errc::no_such_file_or_directory) {
    return ErrnoError(error.value(),
                      absl::StrCat("cannot rename ", folder.string()));
  }
  return aside;
}

absl::Status RunFolder::RemoveManifest(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(std::filesystem::path(path).parent_path(), error);
  if (error) {
    return ErrnoError(error.value(), absl::StrCat("cannot remove ", path));
  }
  return absl::OkStatus();
}

absl::Status RunFolder::WriteSummary(const std::string& json) {
  return WriteFileAtomically(absl::StrCat(dir_, "/summary.json"), json);
}

absl::Status RunFolder::WriteConfig(const std::string& yaml) {
  return WriteFileAtomically(absl::StrCat(dir_, "/config.yaml"), yaml);
}

absl::Status RunFolder::WriteAddress(const std::string& address) {
  return WriteFileAtomically(absl::StrCat(dir_, "/coordinator.address"),
                             absl::StrCat(address, "\n"));
}

void RunFolder::RemoveAddress() {
  unlink(absl::StrCat(dir_, "/coordinator.address").c_str());
}

}  // namespace ballast
