#include "kvlink/plan/block_pairs.hpp"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <iterator>
#include <string>

#include "kvlink/error.hpp"
#include "kvlink/plan/repeats.hpp"

namespace kvlink::plan {
namespace {

constexpr std::int32_t hole = -1;

std::int32_t checked_entry(std::span<const std::int32_t> table, std::size_t index, const char* side) {
  const auto block = table[index];
  if (block < hole) {
    throw Error(Code::invalid_argument, std::string("pair blocks: entry ") + std::to_string(index) + " of the " + side +
                                            " table is " + std::to_string(block));
  }
  return block;
}

/// One side of a walk over the tokens of a request. Stepping to the next block takes no division.
class TableCursor {
 public:
  TableCursor(std::span<const std::int32_t> table, std::uint32_t block_tokens, std::uint64_t token, const char* side)
      : table_(table),
        side_(side),
        block_tokens_(block_tokens),
        entry_(token / block_tokens),
        token_(static_cast<std::uint32_t>(token % block_tokens)) {}

  [[nodiscard]] std::int32_t block() const {
    if (entry_ < table_.size()) return checked_entry(table_, entry_, side_);
    throw Error(Code::invalid_argument, std::string("pair blocks: the ") + side_ + " table has " +
                                            std::to_string(table_.size()) + " blocks of " +
                                            std::to_string(block_tokens_) + " tokens, none for token " +
                                            std::to_string(entry_ * block_tokens_ + token_));
  }
  /// The token inside of its block, and how many there are from it to the block's end.
  [[nodiscard]] std::uint32_t token() const noexcept { return token_; }
  [[nodiscard]] std::uint32_t left() const noexcept { return block_tokens_ - token_; }

  void advance(std::uint32_t tokens) noexcept {
    if (tokens < left()) {
      token_ += tokens;
      return;
    }
    tokens -= left();
    ++entry_;
    token_ = tokens;
    if (tokens < block_tokens_) return;
    entry_ += tokens / block_tokens_;
    token_ = tokens % block_tokens_;
  }

 private:
  std::span<const std::int32_t> table_;
  const char* side_;
  std::uint32_t block_tokens_;
  std::uint64_t entry_;
  std::uint32_t token_;
};

/// Two table entries with one block would have two tokens race for the same bytes.
void refuse_repeats(std::span<const std::int32_t> table) {
  if (const auto repeat = find_repeat(table)) {
    throw Error(Code::invalid_argument, "pair blocks: target block " + std::to_string(*repeat) + " appears twice");
  }
}

/// Entries of the table that hold a token of [first_token, end_token).
std::span<const std::int32_t> entries_of(std::span<const std::int32_t> table, std::uint32_t block_tokens,
                                         std::uint64_t first_token, std::uint64_t end_token) {
  const auto first = std::min<std::uint64_t>(first_token / block_tokens, table.size());
  const auto end = std::min<std::uint64_t>((end_token - 1) / block_tokens + 1, table.size());
  return table.subspan(first, end - first);
}

/// Blocks of one block pool are told apart by their ids alone, since its groups lie in the same bytes.
void refuse_shared_blocks(std::span<const GroupGeometry> groups, const std::vector<std::vector<BlockPair>>& pairs) {
  struct Written {
    std::uint32_t pool;
    std::int32_t block;
    std::size_t group;
    auto operator<=>(const Written&) const = default;
  };
  std::vector<Written> written;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto pool = groups[i].target_block_pool;
    const auto alone = std::ranges::count(groups, pool, &GroupGeometry::target_block_pool) == 1;
    if (pool == GroupGeometry::own_blocks || alone) continue;
    for (const auto& pair : pairs[i]) written.push_back({pool, pair.target_block, i});
  }
  std::ranges::sort(written);
  const auto shared = std::ranges::adjacent_find(written, [](const Written& left, const Written& right) {
    return left.pool == right.pool && left.block == right.block && left.group != right.group;
  });
  if (shared != written.end()) {
    throw Error(Code::invalid_argument, "pair blocks: target block " + std::to_string(shared->block) +
                                            " appears in group " + groups[shared->group].name + " and in group " +
                                            groups[std::next(shared)->group].name + ", which share one block pool");
  }
}

std::vector<BlockPair> pairs_of_group(const Template& geometry, std::size_t index, const GroupTables& tables,
                                      std::uint32_t source_block_tokens, std::uint64_t first_token,
                                      std::uint64_t end_token) {
  const auto& group = geometry.groups()[index];
  if (geometry.token_bytes(index) == 0) return {};
  if (group.slots) return pair_slots(tables.source, tables.target);
  return pair_blocks(tables.source, source_block_tokens, tables.target, group.target_block_tokens,
                     group.first_wanted_token(first_token, end_token), end_token);
}

}  // namespace

std::vector<BlockPair> pair_blocks(std::span<const std::int32_t> source_table, std::uint32_t source_block_tokens,
                                   std::span<const std::int32_t> target_table, std::uint32_t target_block_tokens,
                                   std::uint64_t first_token, std::uint64_t end_token) {
  if (source_block_tokens == 0 || target_block_tokens == 0) {
    throw Error(Code::invalid_argument, "pair blocks: blocks of 0 tokens");
  }
  std::vector<BlockPair> pairs;
  if (first_token >= end_token) return pairs;
  const auto wanted = entries_of(target_table, target_block_tokens, first_token, end_token);
  refuse_repeats(wanted);
  pairs.reserve(wanted.size() + entries_of(source_table, source_block_tokens, first_token, end_token).size());
  TableCursor source{source_table, source_block_tokens, first_token, "source"};
  TableCursor target{target_table, target_block_tokens, first_token, "target"};
  for (auto token = first_token; token < end_token;) {
    auto tokens = static_cast<std::uint32_t>(std::min<std::uint64_t>(target.left(), end_token - token));
    if (const auto target_block = target.block(); target_block != hole) {
      const auto source_block = source.block();
      if (source_block == hole) {
        throw Error(Code::not_offered, "pair blocks: the target wants token " + std::to_string(token) +
                                           ", which is in a hole of the source's table");
      }
      tokens = std::min(tokens, source.left());
      pairs.push_back({source_block, target_block, source.token(), target.token(), tokens, token});
    }
    source.advance(tokens);
    target.advance(tokens);
    token += tokens;
  }
  return pairs;
}

std::vector<BlockPair> pair_slots(std::span<const std::int32_t> source_table,
                                  std::span<const std::int32_t> target_table) {
  refuse_repeats(target_table);
  std::vector<BlockPair> pairs;
  for (std::size_t slot = 0; slot < target_table.size(); ++slot) {
    const auto target_block = checked_entry(target_table, slot, "target");
    if (target_block == hole) continue;
    if (slot >= source_table.size()) {
      throw Error(Code::invalid_argument, "pair blocks: the source table has " + std::to_string(source_table.size()) +
                                              " slots, and the target wants slot " + std::to_string(slot));
    }
    const auto source_block = checked_entry(source_table, slot, "source");
    if (source_block == hole) {
      throw Error(Code::not_offered, "pair blocks: the target wants slot " + std::to_string(slot) +
                                         ", which is a hole of the source's table");
    }
    pairs.push_back({source_block, target_block, 0, 0, 1, 0});
  }
  return pairs;
}

std::vector<std::vector<BlockPair>> pair_groups(const Template& geometry, std::span<const GroupTables> tables,
                                                std::uint64_t first_token, std::uint64_t end_token) {
  const auto groups = geometry.groups();
  if (tables.size() != groups.size()) {
    throw Error(Code::invalid_argument, "pair blocks: tables for " + std::to_string(tables.size()) + " of " +
                                            std::to_string(groups.size()) + " groups");
  }
  std::vector<std::vector<BlockPair>> pairs;
  pairs.reserve(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    pairs.push_back(pairs_of_group(geometry, i, tables[i], groups[i].source_block_tokens, first_token, end_token));
  }
  refuse_shared_blocks(groups, pairs);
  return pairs;
}

std::vector<std::vector<BlockPair>> pair_span(const Template& geometry, std::span<const GroupTables> tables,
                                              const TokenSpan& span) {
  const auto groups = geometry.groups();
  std::vector<std::vector<BlockPair>> pairs(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto& group = groups[i];
    if (geometry.token_bytes(i) == 0) continue;
    if (group.slots) {
      if (span.end_token == span.num_tokens) pairs[i] = pair_slots(tables[i].source, tables[i].target);
      continue;
    }
    const auto first = std::max(span.first_token, group.first_wanted_token(span.wanted_from, span.num_tokens));
    if (first >= span.end_token) continue;
    pairs[i] = pair_blocks(tables[i].source, group.source_block_tokens, tables[i].target, group.target_block_tokens,
                           first, span.end_token);
  }
  return pairs;
}

std::vector<std::vector<BlockPair>> wanted_of_groups(const Template& geometry,
                                                     std::span<const std::span<const std::int32_t>> target_tables,
                                                     std::uint64_t first_token, std::uint64_t end_token) {
  std::vector<std::vector<BlockPair>> pairs;
  pairs.reserve(target_tables.size());
  for (std::size_t i = 0; i < target_tables.size(); ++i) {
    // A source whose blocks are the target's own has every token that the target wants.
    const auto block_tokens = geometry.groups()[i].target_block_tokens;
    const GroupTables own{target_tables[i], target_tables[i]};
    pairs.push_back(pairs_of_group(geometry, i, own, block_tokens, first_token, end_token));
    for (auto& pair : pairs.back()) pair.source_block = -1;
  }
  return pairs;
}

}  // namespace kvlink::plan
