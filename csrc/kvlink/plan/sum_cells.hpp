// Stage 2. What checksums are of: cells that both sides cut alike, however their blocks look.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kvlink/plan/copy_plan.hpp"

namespace kvlink::plan {

/// The cells of one plan, seen from one side. A cell is one head of one component of one layer in one sub-block: the
/// tokens between two multiples of what the block sizes of both sides are multiples of. Its bytes count token after
/// token, and dim after dim inside a token, wherever they lie.
///
/// Cells are numbered op after op of the template, sub-block after sub-block inside an op, head after head inside that.
/// So their order depends on what the order of the stream depends on. Immutable.
class SumCells {
 public:
  /// `side` is Sides::source or Sides::target, one that the plan addresses.
  SumCells(std::shared_ptr<const Plan> plan, Sides side);

  [[nodiscard]] const Plan& plan() const noexcept { return *plan_; }
  [[nodiscard]] Sides side() const noexcept { return side_; }
  [[nodiscard]] std::uint64_t count() const noexcept { return cell_begin_.back(); }

  /// The cells of all heads of an op in one sub-block.
  struct Row {
    const Op* op;
    std::uint64_t first_cell;
    std::uint64_t offset;  // of the first head's first byte, in the region of the op's side
    std::uint32_t tokens;
  };

  /// Calls `visit(const Row&)` for the rows that begin in `range` of the plan's stream: each row is of one range.
  template <class Visit>
  void visit(ByteRange range, Visit&& visit) const;

  /// The cells for which `wrong` is true, joined over tokens and heads.
  [[nodiscard]] std::vector<FailedRange> describe(const std::function<bool(std::uint64_t)>& wrong) const;

 private:
  /// Where the pairs of a group begin, in tokens and in sub-blocks; one entry longer than they are.
  struct Group {
    std::uint32_t sub_tokens{};
    std::vector<std::uint64_t> tokens_before;
    std::vector<std::uint64_t> cells_before;
  };

  [[nodiscard]] std::uint32_t own_token(const BlockPair& pair) const noexcept {
    return side_ == Sides::source ? pair.source_token : pair.target_token;
  }
  /// The first token of sub-block `index` of a pair, counted inside the pair.
  [[nodiscard]] std::uint32_t start_of(const BlockPair& pair, std::uint32_t sub_tokens,
                                       std::uint64_t index) const noexcept {
    if (index == 0) return 0;
    return static_cast<std::uint32_t>(index * sub_tokens) - own_token(pair) % sub_tokens;
  }
  [[nodiscard]] std::uint64_t sub_blocks_of(const BlockPair& pair, std::uint32_t sub_tokens) const noexcept {
    return (std::uint64_t{own_token(pair) % sub_tokens} + pair.tokens + sub_tokens - 1) / sub_tokens;
  }
  [[nodiscard]] static std::size_t at(const std::vector<std::uint64_t>& begins, std::uint64_t position) noexcept;
  void describe_op(std::size_t op, const std::function<bool(std::uint64_t)>& wrong,
                   std::vector<FailedRange>& ranges) const;
  template <class Visit>
  void visit_op(std::size_t op, ByteRange range, Visit& visit) const;

  std::shared_ptr<const Plan> plan_;
  Sides side_;
  std::vector<Group> groups_;
  std::vector<std::uint64_t> op_begin_;    // by op: where it starts in the stream, one entry longer
  std::vector<std::uint64_t> cell_begin_;  // by op: its first cell, one entry longer
};

template <class Visit>
void SumCells::visit(ByteRange range, Visit&& visit) const {
  range.end = std::min(range.end, op_begin_.back());
  if (range.begin >= range.end) return;
  for (auto op = at(op_begin_, range.begin); op + 1 < op_begin_.size() && op_begin_[op] < range.end; ++op) {
    visit_op(op, range, visit);
  }
}

template <class Visit>
void SumCells::visit_op(std::size_t op_index, ByteRange range, Visit& visit) const {
  const Op& op = plan_->geometry().ops()[op_index];
  const Group& group = groups_[op.group];
  const Side& side = side_ == Sides::source ? op.source : op.target;
  const auto token_bytes = std::uint64_t{op.heads} * op.dims * op.element_bytes;
  const auto begin = std::max(range.begin, op_begin_[op_index]) - op_begin_[op_index];
  const auto end = std::min(range.end, op_begin_[op_index + 1]) - op_begin_[op_index];
  // Counted in tokens, rounded up on both ends: a row is of the range in which its first token begins.
  auto token = (begin + token_bytes - 1) / token_bytes;
  const auto end_token = (end + token_bytes - 1) / token_bytes;
  const auto pairs = plan_->pairs(op.group);
  for (auto index = at(group.tokens_before, token); index < pairs.size() && token < end_token; ++index) {
    const BlockPair& pair = pairs[index];
    const auto inside = token - group.tokens_before[index];
    auto sub =
        inside == 0 ? 0 : (inside + own_token(pair) % group.sub_tokens + group.sub_tokens - 1) / group.sub_tokens;
    const auto block = side_ == Sides::source ? pair.source_block : pair.target_block;
    const auto base = side.offset + static_cast<std::uint64_t>(block) * side.block_stride;
    for (const auto subs = sub_blocks_of(pair, group.sub_tokens); sub < subs; ++sub) {
      const auto start = start_of(pair, group.sub_tokens, sub);
      if (group.tokens_before[index] + start >= end_token) return;
      const auto stop = std::min(pair.tokens, start_of(pair, group.sub_tokens, sub + 1));
      visit(Row{.op = &op,
                .first_cell = cell_begin_[op_index] + (group.cells_before[index] + sub) * op.heads,
                .offset = base + std::uint64_t{own_token(pair) + start} * side.token_stride,
                .tokens = stop - start});
    }
    token = group.tokens_before[index + 1];
  }
}

}  // namespace kvlink::plan
