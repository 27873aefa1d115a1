// SPDX-License-Identifier: Apache-2.0
#include "ps/cli/shard_query.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/clock.h"
#include "common/status_macros.h"
#include "proto/bulk.h"
#include "rpc/bulk_message.h"
#include "rpc/endpoint.h"
#include "rpc/raw_stream.h"
#include "storage/record.h"

namespace ballast {
namespace {

// One chunk's part of a slice.
struct Piece {
  uint32_t chunk = 0;
  uint64_t begin = 0;  // From the start of the chunk.
  uint64_t count = 0;
  uint64_t offset = 0;  // In the values.
};

std::vector<Piece> PiecesOf(const ChunkTable& chunks, uint32_t tensor,
                            ElementSlice slice) {
  std::vector<Piece> pieces;
  for (const uint32_t id : chunks.chunks_of_tensor(tensor)) {
    const Chunk& chunk = chunks.chunk(id);
    const uint64_t begin = std::max(slice.begin, chunk.begin);
    const uint64_t end = std::min(slice.end, chunk.end);
    if (begin < end) {
      pieces.push_back(
          {id, begin - chunk.begin, end - begin, begin - slice.begin});
    }
  }
  return pieces;
}

// Asks one server for `pieces`, one after the other, and returns the oldest
// and the newest version among the answers.
absl::StatusOr<std::pair<uint64_t, uint64_t>> FetchPieces(
    RawStream* stream, const v1::Placement& placement, uint8_t field,
    const std::vector<Piece>& pieces, std::vector<float>* values) {
  uint64_t oldest = kAnyVersion;
  uint64_t newest = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    BulkHeader request;
    request.kind = BulkKind::kFetchRequest;
    request.timeline = placement.timeline();
    request.step = kAnyVersion;
    request.placement_version = placement.placement_version();
    request.sequence = i + 1;
    BulkItem item;
    item.chunk = piece.chunk;
    item.field = field;
    item.elem_begin = piece.begin;
    item.elem_count = piece.count;
    request.items.push_back(item);
    BALLAST_RETURN_IF_ERROR(stream->Write(MakeBulkMessage(request)));
    BALLAST_ASSIGN_OR_RETURN(const grpc::ByteBuffer buffer, stream->Read());
    BALLAST_ASSIGN_OR_RETURN(const BulkMessage reply,
                             BulkMessage::Parse(buffer));
    const BulkHeader& header = reply.header();
    if (header.kind == BulkKind::kError) {
      return reply.error();
    }
    if (header.kind != BulkKind::kFetchReply || header.sequence != i + 1 ||
        header.items.size() != 1 || header.items[0].dtype != DType::kF32 ||
        header.items[0].payload_bytes != piece.count * sizeof(float)) {
      return absl::InternalError(absl::StrCat(
          "the answer for chunk ", piece.chunk, " is not what was asked for"));
    }
    reply.CopyPayload(
        0, reinterpret_cast<std::byte*>(values->data() + piece.offset));
    oldest = std::min(oldest, header.step);
    newest = std::max(newest, header.step);
  }
  return std::pair{oldest, newest};
}

}  // namespace

absl::StatusOr<ElementSlice> ParseSlice(absl::string_view text,
                                        uint64_t elem_count) {
  ElementSlice slice = {0, elem_count};
  if (text.empty()) {
    return slice;
  }
  const size_t colon = text.find(':');
  const absl::string_view first = text.substr(0, colon);
  const absl::string_view second =
      colon == absl::string_view::npos ? "" : text.substr(colon + 1);
  if (colon == absl::string_view::npos ||
      (!first.empty() && !absl::SimpleAtoi(first, &slice.begin)) ||
      (!second.empty() && !absl::SimpleAtoi(second, &slice.end))) {
    return absl::InvalidArgumentError(
        absl::StrCat("--slice is `", text,
                     "`; want first:end, element numbers such as 0:4"));
  }
  if (slice.begin >= slice.end || slice.end > elem_count) {
    return absl::OutOfRangeError(
        absl::StrCat("--slice ", slice.begin, ":", slice.end,
                     " is empty or beyond the tensor's ", elem_count,
                     " elements; want first < end <= ", elem_count));
  }
  return slice;
}

absl::StatusOr<ShardMap> ShardMap::FromPlacement(v1::Placement placement) {
  BALLAST_ASSIGN_OR_RETURN(const ModelLayout layout,
                           ModelLayout::Decode(placement.layout()));
  BALLAST_ASSIGN_OR_RETURN(ChunkTable chunks,
                           ChunkTable::Build(layout, placement.chunk_elems()));
  const auto known = [&placement](uint32_t server) {
    return server < static_cast<uint32_t>(placement.servers_size());
  };
  if (static_cast<size_t>(placement.owner_size()) != chunks.chunks().size() ||
      !std::all_of(placement.owner().begin(), placement.owner().end(), known)) {
    return absl::DataLossError(
        absl::StrCat("the placement names owners of ", placement.owner_size(),
                     " chunks, its layout has ", chunks.chunks().size()));
  }
  return ShardMap(std::move(placement), std::move(chunks));
}

absl::StatusOr<uint32_t> ShardMap::FindTensor(absl::string_view name) const {
  const std::vector<TensorSpec>& tensors = chunks_.layout().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].name == name) {
      return i;
    }
  }
  return absl::NotFoundError(absl::StrCat(
      "no tensor ", name, "; the model has ", tensors.size(), ", such as ",
      tensors.front().name, " (`ballast shard list` names all)"));
}

absl::StatusOr<uint8_t> FieldNumber(absl::string_view name,
                                    absl::string_view optimizer) {
  const OptimizerKind kind =
      optimizer == "sgd" ? OptimizerKind::kSgd : OptimizerKind::kAdamW;
  std::vector<Field> fields = {Field::kParam, Field::kSlot0};
  if (kind == OptimizerKind::kAdamW) {
    fields.push_back(Field::kSlot1);
  }
  std::vector<std::string> names;
  for (const Field field : fields) {
    names.emplace_back(FieldName(field, kind));
    if (name == names.back()) {
      return static_cast<uint8_t>(field);
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--field is `", name, "`; with ", optimizer, " want ",
                   absl::StrJoin(names, " or ")));
}

absl::StatusOr<SliceValues> FetchSlice(const ShardMap& map, uint32_t tensor,
                                       uint8_t field, ElementSlice slice,
                                       absl::Duration timeout) {
  const absl::Time until = MonotonicNow() + timeout;
  std::map<std::string, std::vector<Piece>> by_server;
  for (const Piece& piece : PiecesOf(map.chunks(), tensor, slice)) {
    by_server[map.owner(piece.chunk).address()].push_back(piece);
  }
  std::map<std::string, std::unique_ptr<RawStream>> streams;
  for (const auto& [address, pieces] : by_server) {
    streams[address] =
        RawStream::Open(MakeChannel(address), kFetchMethod, timeout);
  }
  SliceValues result;
  result.values.resize(slice.end - slice.begin);
  // A commit between two answers shows as two versions: read again.
  uint64_t oldest = 0;
  uint64_t newest = 1;
  while (oldest != newest && MonotonicNow() < until) {
    oldest = kAnyVersion;
    newest = 0;
    for (const auto& [address, pieces] : by_server) {
      BALLAST_ASSIGN_OR_RETURN(
          const auto versions,
          FetchPieces(streams[address].get(), map.placement(), field, pieces,
                      &result.values));
      oldest = std::min(oldest, versions.first);
      newest = std::max(newest, versions.second);
    }
  }
  if (oldest != newest) {
    return absl::AbortedError(
        "steps were committed faster than the slice could be read; read fewer "
        "elements at once");
  }
  result.step = newest;
  return result;
}

}  // namespace ballast
