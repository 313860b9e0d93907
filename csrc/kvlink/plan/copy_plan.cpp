#include "kvlink/plan/copy_plan.hpp"

#include <iterator>
#include <string>
#include <utility>

#include "kvlink/error.hpp"

namespace kvlink::plan {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(Code::invalid_argument, "plan copies: " + what);
}

void check_tokens(std::uint32_t first, std::uint32_t tokens, std::uint32_t block_tokens, const char* side) {
  if (tokens == 0 || first >= block_tokens || tokens > block_tokens - first) {
    refuse("tokens [" + std::to_string(first) + ", +" + std::to_string(tokens) + ") of a " + side + " block of " +
           std::to_string(block_tokens));
  }
}

void check_block(std::int32_t block, std::uint32_t num_blocks, const char* side) {
  if (block < 0 || static_cast<std::uint32_t>(block) >= num_blocks) {
    refuse(std::string(side) + " block " + std::to_string(block) + " is outside [0, " + std::to_string(num_blocks) +
           ")");
  }
}

Sides sides_of(const BlockPair& pair) {
  if (pair.source_block < 0 && pair.target_block < 0) refuse("a pair has a block on neither side");
  if (pair.target_block < 0) return Sides::source;
  return pair.source_block < 0 ? Sides::target : Sides::both;
}

void check_pair(const BlockPair& pair, const GroupGeometry& group, Sides sides) {
  if (sides_of(pair) != sides) refuse("some pairs leave a side out and others do not");
  if (sides != Sides::target) {
    check_block(pair.source_block, group.source_num_blocks, "source");
    check_tokens(pair.source_token, pair.tokens, group.source_block_tokens, "source");
  }
  if (sides != Sides::source) {
    check_block(pair.target_block, group.target_num_blocks, "target");
    check_tokens(pair.target_token, pair.tokens, group.target_block_tokens, "target");
  }
}

/// Adds one pair, as a longer end of the last range where it goes on from there.
void append(std::vector<FailedRange>& ranges, const Op& op, const BlockPair& pair) {
  const FailedRange range{.group = op.group,
                          .layer = op.layer,
                          .component = op.component,
                          .first_head = op.first_head,
                          .end_head = op.first_head + op.heads,
                          .first_token = pair.sequence_token,
                          .end_token = pair.sequence_token + pair.tokens};
  if (!ranges.empty()) {
    auto& last = ranges.back();
    const auto alike = last.group == range.group && last.layer == range.layer && last.component == range.component &&
                       last.first_head == range.first_head && last.end_head == range.end_head;
    if (alike && last.end_token == range.first_token) {
      last.end_token = range.end_token;
      return;
    }
    if (last == range) return;
  }
  ranges.push_back(range);
}

}  // namespace

Plan::Plan(std::shared_ptr<const Template> geometry, std::vector<std::vector<BlockPair>> pairs_by_group)
    : geometry_(std::move(geometry)), pairs_(std::move(pairs_by_group)) {
  const auto groups = geometry_->groups();
  if (pairs_.size() != groups.size()) {
    refuse("pairs for " + std::to_string(pairs_.size()) + " of " + std::to_string(groups.size()) + " groups");
  }
  const auto some = std::ranges::find_if(pairs_, [](const auto& pairs) { return !pairs.empty(); });
  if (some != pairs_.end()) sides_ = sides_of(some->front());
  for (std::size_t group = 0; group < pairs_.size(); ++group) {
    std::vector<std::uint64_t> before;
    before.reserve(pairs_[group].size() + 1);
    before.push_back(0);
    for (const auto& pair : pairs_[group]) {
      check_pair(pair, groups[group], sides_);
      before.push_back(before.back() + pair.tokens);  // 2^31 pairs of 2^32 tokens fit
    }
    tokens_before_.push_back(std::move(before));
  }
  op_begin_.reserve(geometry_->ops().size() + 1);
  op_begin_.push_back(0);
  for (const auto& op : geometry_->ops()) {
    const auto token_bytes = std::uint64_t{op.heads} * op.dims * op.element_bytes;
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(token_bytes, tokens_before_[op.group].back(), &bytes) ||
        __builtin_add_overflow(bytes, op_begin_.back(), &bytes)) {
      refuse("the stream has more than 2^64 bytes");
    }
    op_begin_.push_back(bytes);
  }
}

std::size_t Plan::op_at(std::uint64_t position) const noexcept {
  return static_cast<std::size_t>(std::distance(op_begin_.begin(), std::ranges::upper_bound(op_begin_, position))) - 1;
}

std::size_t Plan::pair_at(std::size_t group, std::uint64_t token) const noexcept {
  const auto& before = tokens_before_[group];
  return static_cast<std::size_t>(std::distance(before.begin(), std::ranges::upper_bound(before, token))) - 1;
}

std::vector<FailedRange> Plan::describe(ByteRange range) const {
  std::vector<FailedRange> ranges;
  range.end = std::min(range.end, total_bytes());
  if (range.begin >= range.end) return ranges;
  for (auto i = op_at(range.begin); i + 1 < op_begin_.size() && op_begin_[i] < range.end; ++i) {
    const auto& op = geometry_->ops()[i];
    const auto token_bytes = std::uint64_t{op.heads} * op.dims * op.element_bytes;
    const auto begin = std::max(range.begin, op_begin_[i]);
    const auto end = std::min(range.end, op_begin_[i + 1]);
    if (begin >= end) continue;
    const auto last = pair_at(op.group, (end - 1 - op_begin_[i]) / token_bytes);
    for (auto pair = pair_at(op.group, (begin - op_begin_[i]) / token_bytes); pair <= last; ++pair) {
      append(ranges, op, pairs_[op.group][pair]);
    }
  }
  return ranges;
}

std::uint64_t Plan::valid_prefix_tokens(std::span<const ByteRange> missing, std::uint64_t num_tokens) const {
  auto valid = num_tokens;
  for (const auto& range : missing) {
    for (const auto& failed : describe(range)) valid = std::min(valid, failed.first_token);
  }
  return valid;
}

}  // namespace kvlink::plan
