// SPDX-License-Identifier: Apache-2.0
#include "worker/client/placement_map.h"

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace ballast {

absl::StatusOr<PlacementMap> PlacementMap::Create(
    const v1::Placement& placement, const ModelLayout& layout) {
  BALLAST_ASSIGN_OR_RETURN(const ModelLayout served,
                           ModelLayout::Decode(placement.layout()));
  if (served != layout) {
    return absl::FailedPreconditionError(
        "the run trains another model than this worker was told; start it with "
        "the run's own job file");
  }
  PlacementMap map;
  map.version_ = placement.placement_version();
  BALLAST_ASSIGN_OR_RETURN(map.table_,
                           ChunkTable::Build(layout, placement.chunk_elems()));
  const size_t chunks = map.table_.chunks().size();
  if (static_cast<size_t>(placement.owner_size()) != chunks) {
    return absl::InvalidArgumentError(
        absl::StrCat("the placement names ", placement.owner_size(),
                     " chunks; the model has ", chunks));
  }
  for (const v1::ServerEntry& server : placement.servers()) {
    map.servers_.push_back(
        {server.name(), server.address(), server.incarnation()});
  }
  map.owns_chunks_.assign(map.servers_.size(), false);
  for (const uint32_t owner : placement.owner()) {
    if (owner >= map.servers_.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the placement names server ", owner, " of ", map.servers_.size()));
    }
    map.owner_.push_back(owner);
    map.owns_chunks_[owner] = true;
  }
  map.by_server_.assign(
      map.servers_.size(),
      std::vector<std::vector<UnitChunk>>(layout.units.size()));
  for (uint32_t unit = 0; unit < layout.units.size(); ++unit) {
    const std::vector<TensorUse>& uses = layout.units[unit].tensors;
    for (uint32_t slot = 0; slot < uses.size(); ++slot) {
      for (const uint32_t chunk :
           map.table_.chunks_of_tensor(uses[slot].tensor)) {
        map.by_server_[map.owner_[chunk]][unit].push_back({chunk, slot});
      }
    }
  }
  return map;
}

}  // namespace ballast
