// SPDX-License-Identifier: Apache-2.0
// Who serves which chunk, as a worker needs it: by unit and by server.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/layout.h"
#include "proto/ballast.pb.h"

namespace ballast {

struct ServerAddress {
  std::string name;          // "server-1".
  std::string address;       // host:port.
  uint64_t incarnation = 0;  // Of its life; 0: it is not in.
  friend bool operator==(const ServerAddress&, const ServerAddress&) = default;
};

// Immutable; thread-safe.
class PlacementMap {
 public:
  // Checks what the coordinator sent against the model that this worker runs.
  // Errors: FAILED_PRECONDITION  another model.
  //         INVALID_ARGUMENT     it does not add up.
  static absl::StatusOr<PlacementMap> Create(const v1::Placement& placement,
                                             const ModelLayout& layout);

  // A chunk that a unit reads: part of its tensor `slot`.
  struct UnitChunk {
    uint32_t chunk = 0;
    uint32_t slot = 0;
  };

  uint64_t version() const { return version_; }
  // Whether a server has chunks at all: only then is there a link to it.
  bool owns_chunks(uint32_t server) const { return owns_chunks_[server]; }
  const ChunkTable& table() const { return table_; }
  const std::vector<ServerAddress>& servers() const { return servers_; }
  // Index into servers().
  uint32_t owner(uint32_t chunk) const { return owner_[chunk]; }
  // What a server has of a unit, in tensor order; may be empty.
  const std::vector<UnitChunk>& chunks_of(uint32_t server,
                                          uint32_t unit) const {
    return by_server_[server][unit];
  }

 private:
  PlacementMap() = default;

  uint64_t version_ = 0;
  ChunkTable table_;
  std::vector<ServerAddress> servers_;
  std::vector<uint32_t> owner_;
  std::vector<bool> owns_chunks_;
  std::vector<std::vector<std::vector<UnitChunk>>> by_server_;
};

}  // namespace ballast
