// Stage 2. Which layers of a request are there, for which tokens: what a push says piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "kvlink/plan/block_pairs.hpp"
#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/plan/template.hpp"

namespace kvlink::plan {

/// Some layers, by their positions, for the tokens [first_token, end_token) of a request. State, which a request has as
/// a whole, goes with its last token, or with none where the request has none.
struct Piece {
  std::vector<bool> layers;
  std::uint64_t first_token{};
  std::uint64_t end_token{};

  [[nodiscard]] bool has_layers() const noexcept;
  bool operator==(const Piece&) const = default;
};

/// What of a request has been there already. Nothing is there twice.
class Coverage {
 public:
  Coverage(std::size_t layers, std::uint64_t num_tokens);

  /// Whether `piece` is of this request at all.
  [[nodiscard]] bool is_inside(const Piece& piece) const noexcept;
  /// Whether none of it was there before. For one that is inside.
  [[nodiscard]] bool is_new(const Piece& piece) const noexcept;
  /// For one that is inside and new.
  void add(const Piece& piece);
  [[nodiscard]] bool complete() const noexcept { return missing_ == 0; }
  /// What is not there, in as few pieces as have the same tokens.
  [[nodiscard]] std::vector<Piece> missing() const;

 private:
  /// The state of a layer counts as one token behind the last.
  [[nodiscard]] std::uint64_t end_of(const Piece& piece) const noexcept {
    return piece.end_token == num_tokens_ ? piece.end_token + 1 : piece.end_token;
  }

  std::uint64_t num_tokens_;
  std::uint64_t missing_;
  std::vector<std::map<std::uint64_t, std::uint64_t>> there_;  // by layer: disjoint ranges, begin to end
};

/// The same in fewer pieces: those for the same tokens as one. In the order in which their tokens came first.
[[nodiscard]] std::vector<Piece> joined(std::span<const Piece> pieces);

/// One request, as far as its pieces go.
struct PieceTables {
  std::span<const GroupTables> tables;  // by the groups of the template
  std::uint64_t skip_tokens{};          // wanted are [skip_tokens, num_tokens)
  std::uint64_t num_tokens{};
};

/// Takes some pieces out of `pieces` that go into one plan, as many as the first allows, and returns that plan. Throws
/// like `pair_groups`. `layers` is what they are of.
[[nodiscard]] std::shared_ptr<const Plan> take_plan(std::vector<Piece>& pieces,
                                                    const std::shared_ptr<const Template>& geometry,
                                                    const PieceTables& request, std::vector<bool>& layers);

}  // namespace kvlink::plan
