#include "kvlink/plan/pieces.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvlink::plan {

bool Piece::has_layers() const noexcept {
  return std::ranges::find(layers, true) != layers.end();
}

Coverage::Coverage(std::size_t layers, std::uint64_t num_tokens)
    : num_tokens_(num_tokens), missing_(layers * (num_tokens + 1)), there_(layers) {}

bool Coverage::is_inside(const Piece& piece) const noexcept {
  const bool some =
      piece.first_token < piece.end_token || (num_tokens_ == 0 && piece.first_token == 0 && piece.end_token == 0);
  return some && piece.end_token <= num_tokens_ && piece.layers.size() == there_.size();
}

bool Coverage::is_new(const Piece& piece) const noexcept {
  const std::uint64_t end = end_of(piece);
  for (std::size_t layer = 0; layer < there_.size(); ++layer) {
    if (!piece.layers[layer]) continue;
    const auto& ranges = there_[layer];
    const auto next = ranges.lower_bound(piece.first_token);
    if (next != ranges.end() && next->first < end) return false;
    if (next != ranges.begin() && std::prev(next)->second > piece.first_token) return false;
  }
  return true;
}

void Coverage::add(const Piece& piece) {
  const std::uint64_t end = end_of(piece);
  for (std::size_t layer = 0; layer < there_.size(); ++layer) {
    if (!piece.layers[layer]) continue;
    auto& ranges = there_[layer];
    auto place = ranges.emplace(piece.first_token, end).first;
    missing_ -= end - piece.first_token;
    if (const auto next = std::next(place); next != ranges.end() && next->first == end) {
      place->second = next->second;
      ranges.erase(next);
    }
    if (place != ranges.begin() && std::prev(place)->second == place->first) {
      std::prev(place)->second = place->second;
      ranges.erase(place);
    }
  }
}

std::vector<Piece> Coverage::missing() const {
  std::vector<Piece> pieces;
  for (std::size_t layer = 0; layer < there_.size(); ++layer) {
    std::uint64_t token = 0;
    const auto note = [&](std::uint64_t end) {
      Piece piece{
          .layers = std::vector<bool>(there_.size()), .first_token = token, .end_token = std::min(end, num_tokens_)};
      piece.layers[layer] = true;
      if (token < end) pieces.push_back(std::move(piece));
    };
    for (const auto& [begin, end] : there_[layer]) {
      note(begin);
      token = end;
    }
    note(num_tokens_ + 1);
  }
  return joined(pieces);
}

std::vector<Piece> joined(std::span<const Piece> pieces) {
  std::vector<Piece> out;
  for (const Piece& piece : pieces) {
    const auto same = std::ranges::find_if(out, [&](const Piece& each) {
      return each.first_token == piece.first_token && each.end_token == piece.end_token;
    });
    if (same == out.end()) {
      out.push_back(piece);
      continue;
    }
    for (std::size_t layer = 0; layer < piece.layers.size(); ++layer) {
      if (piece.layers[layer]) same->layers[layer] = true;
    }
  }
  return out;
}

std::shared_ptr<const Plan> take_plan(std::vector<Piece>& pieces, const std::shared_ptr<const Template>& geometry,
                                      const PieceTables& request, std::vector<bool>& layers) {
  std::vector<Piece> left = joined(pieces);
  layers = left.front().layers;
  std::vector<Piece> taken;
  std::erase_if(left, [&](const Piece& piece) {
    if (piece.layers != layers) return false;
    taken.push_back(piece);
    return true;
  });
  std::ranges::sort(taken, {}, &Piece::first_token);
  auto part = std::make_shared<const Template>(geometry->restricted_to(layers));
  std::vector<std::vector<BlockPair>> pairs(geometry->groups().size());
  for (auto piece = taken.begin(); piece != taken.end();) {
    TokenSpan span{.wanted_from = request.skip_tokens,
                   .num_tokens = request.num_tokens,
                   .first_token = piece->first_token,
                   .end_token = piece->end_token};
    for (++piece; piece != taken.end() && piece->first_token == span.end_token; ++piece) {
      span.end_token = piece->end_token;
    }
    auto more = pair_span(*part, request.tables, span);
    for (std::size_t group = 0; group < pairs.size(); ++group) {
      pairs[group].insert(pairs[group].end(), more[group].begin(), more[group].end());
    }
  }
  auto plan = std::make_shared<const Plan>(std::move(part), std::move(pairs));
  pieces = std::move(left);
  return plan;
}

}  // namespace kvlink::plan
