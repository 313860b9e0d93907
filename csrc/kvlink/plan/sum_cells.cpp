#include "kvlink/plan/sum_cells.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace kvlink::plan {
namespace {

struct Tokens {
  std::uint64_t first{};
  std::uint64_t end{};
  bool operator==(const Tokens&) const = default;
};

void append(std::vector<Tokens>& ranges, Tokens next) {
  if (!ranges.empty() && (ranges.back().end == next.first || ranges.back() == next)) {
    ranges.back().end = next.end;  // Slots all count as token 0.
  } else {
    ranges.push_back(next);
  }
}

}  // namespace

SumCells::SumCells(std::shared_ptr<const Plan> plan, Sides side) : plan_(std::move(plan)), side_(side) {
  const Template& geometry = plan_->geometry();
  for (std::size_t g = 0; g < geometry.groups().size(); ++g) {
    const GroupGeometry& paged = geometry.groups()[g];
    Group group{.sub_tokens = std::gcd(paged.source_block_tokens, paged.target_block_tokens),
                .tokens_before = {0},
                .cells_before = {0}};
    group.tokens_before.reserve(plan_->pairs(g).size() + 1);
    group.cells_before.reserve(plan_->pairs(g).size() + 1);
    for (const BlockPair& pair : plan_->pairs(g)) {
      group.tokens_before.push_back(group.tokens_before.back() + pair.tokens);
      group.cells_before.push_back(group.cells_before.back() + sub_blocks_of(pair, group.sub_tokens));
    }
    groups_.push_back(std::move(group));
  }
  op_begin_.push_back(0);
  cell_begin_.push_back(0);
  for (const Op& op : geometry.ops()) {
    const Group& group = groups_[op.group];
    const auto token_bytes = std::uint64_t{op.heads} * op.dims * op.element_bytes;
    op_begin_.push_back(op_begin_.back() + group.tokens_before.back() * token_bytes);
    cell_begin_.push_back(cell_begin_.back() + group.cells_before.back() * op.heads);
  }
}

std::size_t SumCells::at(const std::vector<std::uint64_t>& begins, std::uint64_t position) noexcept {
  return static_cast<std::size_t>(std::distance(begins.begin(), std::ranges::upper_bound(begins, position))) - 1;
}

std::vector<FailedRange> SumCells::describe(const std::function<bool(std::uint64_t)>& wrong) const {
  std::vector<FailedRange> ranges;
  for (std::size_t op = 0; op < plan_->geometry().ops().size(); ++op) describe_op(op, wrong, ranges);
  return ranges;
}

void SumCells::describe_op(std::size_t op_index, const std::function<bool(std::uint64_t)>& wrong,
                           std::vector<FailedRange>& ranges) const {
  const Op& op = plan_->geometry().ops()[op_index];
  const Group& group = groups_[op.group];
  if (plan_->pairs(op.group).empty()) return;  // A peer's layout says how many heads there are, and may say anything.
  std::vector<std::vector<Tokens>> by_head(op.heads);
  std::uint64_t cell = cell_begin_[op_index];
  for (const BlockPair& pair : plan_->pairs(op.group)) {
    for (std::uint64_t sub = 0; sub < sub_blocks_of(pair, group.sub_tokens); ++sub) {
      const Tokens tokens{pair.sequence_token + start_of(pair, group.sub_tokens, sub),
                          pair.sequence_token + std::min(pair.tokens, start_of(pair, group.sub_tokens, sub + 1))};
      for (std::uint32_t head = 0; head < op.heads; ++head, ++cell) {
        if (wrong(cell)) append(by_head[head], tokens);
      }
    }
  }
  // Neighbours with the same tokens become one range of heads, so that what it names is exactly what is wrong.
  for (std::uint32_t head = 0; head < op.heads;) {
    std::uint32_t end = head + 1;
    while (end < op.heads && by_head[end] == by_head[head]) ++end;
    for (const Tokens& tokens : by_head[head]) {
      ranges.push_back({.group = op.group,
                        .layer = op.layer,
                        .component = op.component,
                        .first_head = op.first_head + head,
                        .end_head = op.first_head + end,
                        .first_token = tokens.first,
                        .end_token = tokens.end});
    }
    head = end;
  }
}

}  // namespace kvlink::plan
