// What a pushing source says is ready, piece by piece: nothing counts twice, and the pieces' plans are together the
// plan of the whole.
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "fuzz.hpp"
#include "kvlink/error.hpp"
#include "kvlink/plan/pieces.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::plan;

constexpr std::size_t kLayers = 3;
constexpr std::uint64_t kMostTokens = 24;
constexpr std::uint32_t kBlocks = 32;

/// Layers 0 and 1 with blocks of tokens, layer 2 with a slot of state.
std::shared_ptr<const Template> geometry(std::uint32_t source_tokens, std::uint32_t target_tokens,
                                         std::uint32_t window) {
  std::vector<GroupGeometry> groups(2);
  groups[0].name = "full";
  groups[0].source_block_tokens = source_tokens;
  groups[0].target_block_tokens = target_tokens;
  groups[0].window = window;
  groups[1].name = "state";
  groups[1].source_block_tokens = groups[1].target_block_tokens = 1;
  groups[1].slots = true;
  for (auto& group : groups) group.source_num_blocks = group.target_num_blocks = kBlocks;
  std::vector<Op> ops(kLayers);
  const std::uint64_t block = 64;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    Op& op = ops[layer];
    op.layer = layer;
    op.group = layer / 2;
    op.component = layer == 2 ? 3 : 0;
    op.dims = 2;
    op.source = {
        .region = layer, .offset = 0, .block_stride = block, .token_stride = 2, .head_stride = 2, .dim_stride = 1};
    op.target = op.source;
  }
  const std::vector<std::uint64_t> sizes(kLayers, block * kBlocks);
  return std::make_shared<const Template>(ops, groups, std::vector<std::string>{"a", "b", "c"}, sizes, sizes);
}

Piece piece_of(fuzz::Input& input, std::uint64_t tokens) {
  Piece piece;
  const std::uint8_t layers = input.byte();
  for (std::size_t layer = 0; layer < kLayers; ++layer) piece.layers.push_back((layers >> layer & 1U) != 0);
  if (layers >= 250) piece.layers.resize(layers - 250);
  piece.first_token = input.edgy(static_cast<std::uint32_t>(tokens));
  piece.end_token = input.edgy(static_cast<std::uint32_t>(tokens));
  return piece;
}

/// By layer and token; the last of each is its state.
using There = std::array<std::array<bool, kMostTokens + 1>, kLayers>;

/// Calls for everything that a piece has.
template <class Visit>
void each(const Piece& piece, std::uint64_t tokens, Visit visit) {
  const std::uint64_t end = piece.end_token == tokens ? tokens + 1 : piece.end_token;
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    for (std::uint64_t token = piece.first_token; piece.layers[layer] && token < end; ++token) visit(layer, token);
  }
}

struct Tables {
  std::vector<std::int32_t> source;
  std::vector<std::int32_t> target;
  std::vector<std::int32_t> slot{4};
};

Tables tables_of(fuzz::Input& input) {
  Tables tables;
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(kMostTokens); ++i) {
    tables.source.push_back(i);
    tables.target.push_back(static_cast<std::int32_t>(kBlocks) - 1 - i);
  }
  const std::uint8_t spoiled = input.byte();
  if (spoiled >= 192) tables.target[spoiled % kMostTokens] = -1;
  if (spoiled >= 224) tables.source[spoiled % kMostTokens] = static_cast<std::int32_t>(input.edgy32(kBlocks));
  return tables;
}

/// The bytes of all pieces, taken as the book of pulls takes them.
std::uint64_t bytes_of(std::vector<Piece> pieces, const std::shared_ptr<const Template>& made,
                       const PieceTables& tables) {
  std::uint64_t bytes = 0;
  while (!pieces.empty()) {
    const std::size_t before = pieces.size();
    std::vector<bool> layers;
    bytes += take_plan(pieces, made, tables, layers)->total_bytes();
    HOLDS(pieces.size() < before);
  }
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const std::uint64_t tokens = input.below(kMostTokens + 1);
  const std::uint64_t skip = std::min<std::uint64_t>(tokens, input.below(kMostTokens + 1));
  const auto made = geometry(1 + input.below(8), 1 + input.below(8), input.below(12));
  const Tables own = tables_of(input);
  Coverage coverage(kLayers, tokens);
  There there{};
  std::size_t count = 0;
  std::vector<Piece> pieces;
  while (!input.empty() && pieces.size() < 32) {
    const Piece piece = piece_of(input, tokens);
    if (!coverage.is_inside(piece)) continue;
    bool is_new = true;
    each(piece, tokens, [&](std::size_t layer, std::uint64_t token) { is_new = is_new && !there[layer][token]; });
    HOLDS(coverage.is_new(piece) == is_new);
    if (!is_new) continue;
    coverage.add(piece);
    if (!piece.has_layers()) continue;
    each(piece, tokens,
         [&](std::size_t layer, std::uint64_t token) { count += !std::exchange(there[layer][token], true); });
    pieces.push_back(piece);
  }
  HOLDS(coverage.complete() == (count == kLayers * (tokens + 1)));
  for (const Piece& piece : coverage.missing()) {
    each(piece, tokens, [&](std::size_t layer, std::uint64_t token) {
      HOLDS(!std::exchange(there[layer][token], true));
      ++count;
    });
    pieces.push_back(piece);
  }
  HOLDS(count == kLayers * (tokens + 1));
  const std::array<GroupTables, 2> tables{{{own.source, own.target}, {own.slot, own.slot}}};
  const PieceTables request{.tables = tables, .skip_tokens = skip, .num_tokens = tokens};
  std::optional<std::uint64_t> whole;
  std::optional<std::uint64_t> together;
  try {
    const Plan plan(made, pair_groups(*made, tables, skip, tokens));
    whole = plan.total_bytes();
  } catch (const Error&) {
    whole.reset();
  }
  try {
    together = bytes_of(pieces, made, request);
  } catch (const Error&) {
    together.reset();
  }
  if (whole) HOLDS(whole == together);
  return 0;
}
