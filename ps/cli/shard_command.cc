// SPDX-License-Identifier: Apache-2.0
// `ballast shard`: what the shard servers hold, by tensor name.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "ps/cli/cluster_client.h"
#include "ps/cli/shard_query.h"
#include "ps/cli/text_table.h"
#include "ps/cli/tool.h"

namespace ballast {
namespace {

using Json = nlohmann::ordered_json;

constexpr absl::Duration kCallTimeout = absl::Seconds(5);
constexpr absl::Duration kFetchTimeout = absl::Seconds(30);

struct Arguments {
  Target target;
  std::string tensor;
  std::string slice;
  std::string field = "param";
  bool json = false;
};

std::string ShapeText(const TensorSpec& tensor) {
  return absl::StrCat("(", absl::StrJoin(tensor.shape, ", "), ")");
}

absl::StatusOr<ShardMap> LoadMap(const Target& target) {
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<ClusterClient> client,
                           ConnectTo(target));
  BALLAST_ASSIGN_OR_RETURN(v1::Placement placement,
                           client->GetPlacement(kCallTimeout));
  return ShardMap::FromPlacement(std::move(placement));
}

// The chunks of one tensor.
Json ChunksJson(const ShardMap& map, uint32_t tensor) {
  Json list = Json::array();
  for (const uint32_t id : map.chunks().chunks_of_tensor(tensor)) {
    const Chunk& chunk = map.chunks().chunk(id);
    list.push_back({{"chunk", id},
                    {"begin", chunk.begin},
                    {"end", chunk.end},
                    {"server", map.owner(id).name()},
                    {"address", map.owner(id).address()}});
  }
  return list;
}

absl::StatusOr<std::string> ListShards(const Arguments& arguments) {
  BALLAST_ASSIGN_OR_RETURN(const ShardMap map, LoadMap(arguments.target));
  const std::vector<TensorSpec>& tensors = map.chunks().layout().tensors;
  Json json = Json::array();
  std::vector<std::vector<std::string>> rows = {
      {"tensor", "shape", "elements", "chunks", "on"}};
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    std::map<std::string, int> servers;  // To the number of its chunks.
    for (const uint32_t id : map.chunks().chunks_of_tensor(i)) {
      ++servers[map.owner(id).name()];
    }
    rows.push_back(
        {tensors[i].name, ShapeText(tensors[i]),
         WithCommas(tensors[i].elem_count()),
         absl::StrCat(map.chunks().chunks_of_tensor(i).size()),
         absl::StrJoin(servers, ", ", [](std::string* out, const auto& server) {
           absl::StrAppend(out, server.first);
         })});
    json.push_back({{"name", tensors[i].name},
                    {"shape", tensors[i].shape},
                    {"elements", tensors[i].elem_count()},
                    {"chunks", ChunksJson(map, i)}});
  }
  if (!arguments.json) {
    return FormatTable(rows, {false, false, true, true, false});
  }
  return Json({{"placement_version", map.placement().placement_version()},
               {"tensors", json}})
             .dump(2) +
         "\n";
}

absl::StatusOr<std::string> LocateTensor(const Arguments& arguments) {
  BALLAST_ASSIGN_OR_RETURN(const ShardMap map, LoadMap(arguments.target));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t tensor,
                           map.FindTensor(arguments.tensor));
  const Json chunks = ChunksJson(map, tensor);
  if (arguments.json) {
    return Json({{"tensor", arguments.tensor},
                 {"placement_version", map.placement().placement_version()},
                 {"chunks", chunks}})
               .dump(2) +
           "\n";
  }
  std::vector<std::vector<std::string>> rows = {
      {"chunk", "elements", "server", "address"}};
  for (const Json& chunk : chunks) {
    rows.push_back({absl::StrCat(chunk["chunk"].get<uint32_t>()),
                    absl::StrCat(chunk["begin"].get<uint64_t>(), ":",
                                 chunk["end"].get<uint64_t>()),
                    chunk["server"].get<std::string>(),
                    chunk["address"].get<std::string>()});
  }
  return FormatTable(rows);
}

std::string ValuesText(const std::vector<float>& values, uint64_t begin) {
  constexpr size_t kPerLine = 6;
  std::string text;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i % kPerLine == 0) {
      absl::StrAppend(&text, i == 0 ? "" : "\n",
                      absl::StrFormat("%8d:", begin + i));
    }
    absl::StrAppend(&text, absl::StrFormat(" %14.7g", values[i]));
  }
  return text + "\n";
}

absl::StatusOr<std::string> GetTensor(const Arguments& arguments) {
  BALLAST_ASSIGN_OR_RETURN(const ShardMap map, LoadMap(arguments.target));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t tensor,
                           map.FindTensor(arguments.tensor));
  const TensorSpec& spec = map.chunks().layout().tensors[tensor];
  BALLAST_ASSIGN_OR_RETURN(const ElementSlice slice,
                           ParseSlice(arguments.slice, spec.elem_count()));
  BALLAST_ASSIGN_OR_RETURN(
      const uint8_t field,
      FieldNumber(arguments.field, map.placement().optimizer()));
  BALLAST_ASSIGN_OR_RETURN(
      const SliceValues read,
      FetchSlice(map, tensor, field, slice, kFetchTimeout));
  if (arguments.json) {
    return Json({{"tensor", spec.name},
                 {"field", arguments.field},
                 {"shape", spec.shape},
                 {"begin", slice.begin},
                 {"end", slice.end},
                 {"step", read.step},
                 {"values", read.values}})
               .dump() +
           "\n";
  }
  return absl::StrCat(spec.name, " ", ShapeText(spec), " ", arguments.field,
                      ", elements ", slice.begin, ":", slice.end, " of ",
                      spec.elem_count(), ", after step ", read.step, "\n",
                      ValuesText(read.values, slice.begin));
}

using Query = absl::StatusOr<std::string> (*)(const Arguments&);

// Adds what all three queries have.
CLI::App* AddQuery(CLI::App* parent, const char* name, const char* description,
                   const std::shared_ptr<Arguments>& arguments, Query query,
                   Action* action) {
  CLI::App* command = parent->add_subcommand(name, description);
  AddTargetOptions(command, &arguments->target);
  command->add_flag("--json", arguments->json, "Print one JSON object.");
  command->callback([action, arguments, query] {
    *action = [arguments, query] {
      const absl::StatusOr<std::string> text = query(*arguments);
      if (!text.ok()) {
        return Fail(text.status());
      }
      std::fputs(text->c_str(), stdout);
      return int{kExitDone};
    };
  });
  return command;
}

constexpr char kExits[] = "0 shown   1 no answer, or no such tensor   2 usage";

}  // namespace

void AddShardCommand(CLI::App* app, const Surroundings&, Action* action) {
  auto arguments = std::make_shared<Arguments>();  // Lives in the callbacks.
  CLI::App* shard = app->add_subcommand(
      "shard", "Show what the shard servers hold, while a run is up.");
  shard->require_subcommand(1);
  shard->footer(HelpFooter("", kExits, "ballast shard list"));

  AddQuery(shard, "list", "List tensors: shape, elements, chunks, servers.",
           arguments, ListShards, action)
      ->footer(HelpFooter("", kExits, "ballast shard list --json"));

  CLI::App* get =
      AddQuery(shard, "get",
               "Print elements of a tensor as the servers hold them, in fp32.",
               arguments, GetTensor, action);
  get->add_option("tensor", arguments->tensor, "Its name.")
      ->required()
      ->type_name("TENSOR");
  get->add_option("--slice", arguments->slice,
                  "Elements first:end, end not included. Default: all.")
      ->type_name("A:B");
  get->add_option("--field", arguments->field,
                  "param, exp_avg or exp_avg_sq (sgd: momentum_buffer). "
                  "Default: param.")
      ->type_name("FIELD");
  get->footer(HelpFooter(
      "A slice counts elements of the tensor flattened row by row. All values "
      "printed are\nof one step, also while training goes on.",
      kExits,
      "ballast shard get h.0.attn.c_attn.weight --slice 0:4 --field exp_avg"));

  CLI::App* locate =
      AddQuery(shard, "locate", "Print which server holds which part.",
               arguments, LocateTensor, action);
  locate->add_option("tensor", arguments->tensor, "Its name.")
      ->required()
      ->type_name("TENSOR");
  locate->footer(HelpFooter("", kExits, "ballast shard locate wte.weight"));
}

}  // namespace ballast
