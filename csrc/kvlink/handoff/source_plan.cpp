#include "kvlink/handoff/source_plan.hpp"

#include <limits>
#include <unordered_set>

namespace kvlink::handoff {

std::vector<bool> mask_of(std::span<const LayerRange> ranges, std::size_t layers) {
  std::vector<bool> mask(layers);
  for (const LayerRange& range : ranges) {
    for (std::size_t i = range.first; i < range.end; ++i) mask[i] = true;
  }
  return mask;
}

std::vector<LayerRange> ranges_of(const std::vector<bool>& mask) {
  std::vector<LayerRange> ranges;
  for (std::uint32_t i = 0; i < mask.size(); ++i) {
    if (!mask[i]) continue;
    if (!ranges.empty() && ranges.back().end == i) {
      ranges.back().end = i + 1;
    } else {
      ranges.push_back({.first = i, .end = i + 1});
    }
  }
  return ranges;
}

std::shared_ptr<const plan::Plan> plan_of_fetch(const Peer& peer, const Fetch& fetch, const BlockTables& offered,
                                                const std::vector<Group>& groups) {
  std::shared_ptr<const plan::Template> layers = peer.layout_template;
  if (!fetch.layers.empty()) {
    if (fetch.layers.back().end > layers->layers().size()) {
      throw Error(Code::protocol_error, "FETCH names layers that the template has not");
    }
    layers = std::make_shared<const plan::Template>(
        peer.layout_template->restricted_to(mask_of(fetch.layers, layers->layers().size())));
  }
  const auto geometry = layers->groups();
  if (fetch.pieces.size() != geometry.size()) {
    throw Error(Code::protocol_error, "FETCH lists " + std::to_string(fetch.pieces.size()) +
                                          " groups, the template has " + std::to_string(geometry.size()));
  }
  std::vector<std::vector<plan::BlockPair>> pairs(geometry.size());
  for (std::size_t g = 0; g < geometry.size(); ++g) {
    const std::size_t own = geometry[g].source_index;
    const std::unordered_set<std::int32_t> allowed(offered[own].begin(), offered[own].end());
    // A reader wants each token once: whoever lists more only makes work.
    const std::uint64_t most_tokens = std::uint64_t{groups[own].block_tokens} * allowed.size();
    std::uint64_t sequence_token = 0;
    for (const FetchPiece& piece : fetch.pieces[g]) {
      if (piece.tokens > most_tokens - sequence_token) {
        throw Error(Code::protocol_error, "the pieces of group '" + groups[own].name + "' have more tokens than the " +
                                              std::to_string(allowed.size()) + " blocks that are offered");
      }
      if (piece.block < 0 || !allowed.contains(piece.block)) {
        throw Error(Code::not_offered, "block " + std::to_string(piece.block) + " of group '" + groups[own].name +
                                           "' does not belong to the offer");
      }
      pairs[g].push_back({.source_block = piece.block,
                          .target_block = -1,
                          .source_token = piece.token,
                          .target_token = 0,
                          .tokens = piece.tokens,
                          .sequence_token = sequence_token});
      sequence_token += piece.tokens;
    }
  }
  return std::make_shared<plan::Plan>(std::move(layers), std::move(pairs));
}

void check_pieces(const plan::Template& geometry) {
  constexpr std::uint32_t kMostTokens = std::numeric_limits<std::uint16_t>::max();
  for (const plan::GroupGeometry& group : geometry.groups()) {
    if (group.source_block_tokens > kMostTokens) {
      throw Error(Code::layout_mismatch, "group '" + group.name + "' has blocks of " +
                                             std::to_string(group.source_block_tokens) +
                                             " tokens at the source, and FETCH and CHECK name at most " +
                                             std::to_string(kMostTokens) + ": use another lane without integrity");
    }
  }
}

Fetch fetch_of_plan(const plan::Plan& plan) {
  Fetch fetch;
  for (std::size_t g = 0; g < plan.geometry().groups().size(); ++g) {
    auto& pieces = fetch.pieces.emplace_back();
    for (const plan::BlockPair& pair : plan.pairs(g)) {
      pieces.push_back({.block = pair.source_block,
                        .token = static_cast<std::uint16_t>(pair.source_token),
                        .tokens = static_cast<std::uint16_t>(pair.tokens)});
    }
  }
  return fetch;
}

}  // namespace kvlink::handoff
