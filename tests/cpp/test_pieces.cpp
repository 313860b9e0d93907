// Pieces of a request, in any cut and any order: together they are the plan of the whole, and nothing is there twice.
#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "kvlink/plan/pieces.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::plan;

constexpr std::uint64_t kDimBytes = 3;
/// By target region and byte: the source's byte.
using Bytes = std::map<std::pair<std::uint32_t, std::uint64_t>, std::uint64_t>;

struct Request {
  std::shared_ptr<const Template> geometry;
  std::vector<std::vector<std::int32_t>> source;
  std::vector<std::vector<std::int32_t>> target;
  std::uint64_t skip{};
  std::uint64_t tokens{};

  [[nodiscard]] std::vector<GroupTables> tables() const {
    std::vector<GroupTables> both;
    for (std::size_t g = 0; g < source.size(); ++g) both.push_back({.source = source[g], .target = target[g]});
    return both;
  }
};

/// Full attention of two layers, a sliding window, and slots of state: one region a layer.
Request draw(std::mt19937& random) {
  const auto below = [&](std::uint64_t end) {
    return std::uniform_int_distribution<std::uint64_t>(0, end - 1)(random);
  };
  constexpr std::uint32_t kBlocks = 16;
  std::vector<GroupGeometry> groups(3);
  std::vector<Op> ops;
  Request request;
  const std::uint32_t sizes[] = {static_cast<std::uint32_t>(1 + below(4)), static_cast<std::uint32_t>(1 + below(4))};
  request.tokens = below(30);
  request.skip = below(3) == 0 ? below(request.tokens + 1) : 0;
  for (std::uint32_t g = 0; g < 3; ++g) {
    GroupGeometry& group = groups[g];
    group.name = "group " + std::to_string(g);
    group.source_index = group.target_index = g;
    group.slots = g == 2;
    group.source_block_tokens = group.slots ? 1 : sizes[0];
    group.target_block_tokens = group.slots ? 1 : sizes[1];
    group.source_num_blocks = group.target_num_blocks = kBlocks * 2;
    group.window = g == 1 ? static_cast<std::uint32_t>(1 + below(12)) : 0;
    for (auto* const side : {&request.source, &request.target}) {
      std::vector<std::int32_t> blocks(kBlocks * 2);
      std::iota(blocks.begin(), blocks.end(), 0);
      std::ranges::shuffle(blocks, random);
      if (group.slots) blocks.resize(2);
      side->push_back(blocks);
    }
  }
  for (std::uint32_t layer = 0; layer < 4; ++layer) {
    Op op;
    op.group = layer < 2 ? 0 : layer - 1;
    op.layer = layer;
    op.dims = kDimBytes;
    const auto side = [&](std::uint32_t block_tokens) {
      return Side{.region = layer,
                  .offset = 0,
                  .block_stride = kDimBytes * block_tokens,
                  .token_stride = kDimBytes,
                  .head_stride = kDimBytes,
                  .dim_stride = 1};
    };
    op.source = side(groups[op.group].source_block_tokens);
    op.target = side(groups[op.group].target_block_tokens);
    ops.push_back(op);
  }
  const std::vector<std::uint64_t> bytes(4, kBlocks * 2 * 4 * kDimBytes);
  request.geometry =
      std::make_shared<const Template>(ops, groups, std::vector<std::string>{"a", "b", "c", "d"}, bytes, bytes);
  return request;
}

void add(const Plan& plan, Bytes& bytes) {
  plan.visit(0, plan.total_bytes(), [&](const StridedCopy& copy) {
    CHECK(copy.source_region == copy.target_region);
    for (std::uint64_t outer = 0; outer < copy.outer; ++outer) {
      for (std::uint64_t inner = 0; inner < copy.inner; ++inner) {
        for (std::uint64_t i = 0; i < copy.run_bytes; ++i) {
          const auto from =
              copy.source_offset + outer * copy.source_outer_stride + inner * copy.source_inner_stride + i;
          const auto to = copy.target_offset + outer * copy.target_outer_stride + inner * copy.target_inner_stride + i;
          CHECK(bytes.emplace(std::pair(copy.target_region, to), from).second);  // Each byte is written once.
        }
      }
    }
  });
}

/// Cuts layers and tokens at random, in random order; the rest is what `missing` says.
std::vector<Piece> cut(const Request& request, std::mt19937& random) {
  Coverage coverage(4, request.tokens);
  std::vector<Piece> pieces;
  for (int tries = 0; tries < 20; ++tries) {
    const auto drawn = [&](std::uint64_t end) { return std::uniform_int_distribution<std::uint64_t>(0, end)(random); };
    Piece piece{.layers = std::vector<bool>(4), .first_token = drawn(request.tokens), .end_token = 0};
    piece.end_token = piece.first_token + drawn(request.tokens - piece.first_token);
    for (std::size_t layer = 0; layer < 4; ++layer) piece.layers[layer] = drawn(2) == 0;
    if (!piece.has_layers() || !coverage.is_inside(piece) || !coverage.is_new(piece)) continue;
    coverage.add(piece);
    CHECK(!coverage.is_new(piece));
    pieces.push_back(piece);
  }
  for (const Piece& piece : coverage.missing()) {
    CHECK(coverage.is_inside(piece));
    CHECK(coverage.is_new(piece));
    coverage.add(piece);
    pieces.push_back(piece);
  }
  CHECK(coverage.complete());
  CHECK(coverage.missing().empty());
  return pieces;
}

void pieces_in_any_cut_are_the_plan_of_the_whole() {
  std::mt19937 random(20);
  for (int round = 0; round < 300; ++round) {
    const Request request = draw(random);
    const auto tables = request.tables();
    const Plan whole(request.geometry, pair_groups(*request.geometry, tables, request.skip, request.tokens));
    Bytes expected;
    add(whole, expected);
    Bytes found;
    std::uint64_t total = 0;
    std::vector<Piece> waiting;
    std::vector<bool> layers;
    const auto take = [&] {
      const auto plan =
          take_plan(waiting, request.geometry,
                    {.tables = tables, .skip_tokens = request.skip, .num_tokens = request.tokens}, layers);
      CHECK(std::ranges::count(layers, true) != 0);
      add(*plan, found);
      total += plan->total_bytes();
    };
    for (const Piece& piece : cut(request, random)) {
      waiting.push_back(piece);
      if (random() % 3 == 0) take();
    }
    while (!waiting.empty()) take();
    CHECK(found == expected);
    CHECK(total == whole.total_bytes());
  }
}

void pieces_for_the_same_tokens_or_the_same_layers_go_together() {
  std::mt19937 random(1);
  Request request = draw(random);
  request.tokens = 8;
  request.skip = 0;
  const auto tables = request.tables();
  const auto piece = [](std::vector<bool> layers, std::uint64_t first, std::uint64_t end) {
    return Piece{.layers = std::move(layers), .first_token = first, .end_token = end};
  };
  std::vector<Piece> waiting{piece({true, false, false, false}, 0, 4), piece({false, true, false, false}, 0, 4),
                             piece({true, true, false, false}, 4, 8), piece({false, false, true, false}, 0, 8)};
  std::vector<bool> layers;
  (void)take_plan(waiting, request.geometry, {.tables = tables, .skip_tokens = 0, .num_tokens = 8}, layers);
  CHECK((layers == std::vector<bool>{true, true, false, false}));
  CHECK(waiting.size() == 1);
  CHECK(waiting.front() == piece({false, false, true, false}, 0, 8));
}

void what_is_no_piece_of_the_request_is_not_inside() {
  const Coverage coverage(2, 5);
  const auto inside = [&](std::uint64_t first, std::uint64_t end, std::size_t layers = 2) {
    return coverage.is_inside({.layers = std::vector<bool>(layers, true), .first_token = first, .end_token = end});
  };
  CHECK(inside(0, 5));
  CHECK(inside(4, 5));
  CHECK(!inside(0, 6));
  CHECK(!inside(3, 3));
  CHECK(!inside(5, 5));
  CHECK(!inside(4, 2));
  CHECK(!inside(0, 5, 3));
  Coverage none(2, 0);
  const Piece state{.layers = std::vector<bool>(2, true), .first_token = 0, .end_token = 0};
  CHECK(!none.complete());  // Of no tokens, but maybe of state.
  CHECK(none.is_inside(state));
  CHECK(!none.is_inside({.layers = state.layers, .first_token = 1, .end_token = 0}));
  none.add(state);
  CHECK(none.complete());
}

}  // namespace

int main() {
#define NAMED(test) \
  {                 \
    #test, test     \
  }
  return test::run({NAMED(pieces_in_any_cut_are_the_plan_of_the_whole),
                    NAMED(pieces_for_the_same_tokens_or_the_same_layers_go_together),
                    NAMED(what_is_no_piece_of_the_request_is_not_inside)});
}
